"""From calls of a LOCAL graph to instructions: compute between two cuts is a fragment, collectives are instructions.

The walk keeps the graph's order. It cuts where a call needs a collective that is still under way, where the
model's repeated block changes (so that eighty equal layers give one fragment), between pieces of a value of which each is sent by itself,
and, where memory is short, where much of it is read for the last time (`autopar.graph.early_frees`).
A collective is launched at the first cut after its operand is computed and waited for just before its first use:

    RUN f0 (x, w) -> (partial)
    LAUNCH all_reduce sum tp (partial) -> h
    RUN f1 (…)                                what does not need h goes on meanwhile
    WAIT h
    RUN f2 (h, …)

What a collective needs of a program's inputs alone, as the parts of a parameter, is a fragment of its own: it may run at any time.
Gathers of small parameters are launched and waited for together, in front of the first fragment that needs one of them, unless memory
is short (`autopar.graph.awaited_together`).
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, GraphModule, Node

from autopar._torch import schema_of
from autopar.graph.awaited_together import awaited_together
from autopar.graph.behind_launches import behind_launches
from autopar.graph.cut_places import Place
from autopar.graph.early_frees import last_reads
from autopar.graph.late_readers import late_readers
from autopar.graph.launch_operands import made_of_inputs
from autopar.ir.arguments import arguments, node_at
from autopar.ir.collectives import all_gather, all_reduce, is_launch, reduce_scatter, wait
from autopar.ir.instructions import Collective, Instruction, Launch, Run, Wait
from autopar.ir.program import Program, results_of
from autopar.ir.schedule import Fragment, TensorType


class FragmentCutter:
    """Cuts sections of one LOCAL program into instructions; equal fragments of all sections are one.

    `device` is the type of device that fragments create tensors on ("cuda": the current one). Instructions name buffers as the graph
    does; see `buffer_of`. With `frees_early` the backward is cut where it has read much for the last time.
    """

    def __init__(self, device: str, fragments: Mapping[str, Fragment], frees_early: bool = False) -> None:
        self.device = torch.device(device)
        self.frees_early = frees_early
        self.fragments = dict(fragments)
        self._named = {fragment.structure: name for name, fragment in fragments.items()}

    def section(self, nodes: Iterable[Node], under_way: set[Node]) -> tuple[Instruction, ...]:
        """The instructions that compute `nodes`, given in the order of the graph.

        `under_way` are the collectives that earlier sections left without a WAIT; those that this one leaves join them, in place.
        """
        instructions, late = self.section_without_late(nodes, under_way)
        return (*instructions, *self.late(late, under_way))

    def section_without_late(
        self, nodes: Iterable[Node], under_way: set[Node], summed: Collection[Node] = ()
    ) -> tuple[tuple[Instruction, ...], tuple[Node, ...]]:
        """Likewise but for what only the caller, or a sum over microbatches of `summed`, reads of what collectives bring: these nodes are
        returned, and are not computed."""
        nodes, launches = behind_launches(list(nodes))
        apart, late = made_of_inputs(nodes), late_readers(nodes, under_way, summed)
        now = [node for node in nodes if node not in late]
        if self.frees_early:
            section = _Section(self, under_way, apart, launches, ends=last_reads(nodes) if nodes else {})
        else:
            section = _Section(self, under_way, apart, launches, awaited_together(now, apart, under_way))
        for node in now:
            section.visit(node)
        section.cut()
        return tuple(section.instructions), tuple(node for node in nodes if node in late)

    def late(self, nodes: Sequence[Node], under_way: set[Node]) -> tuple[Instruction, ...]:
        """The instructions that compute what a section left, behind all that it waits for."""
        section = _Section(self, under_way)
        section.at_once(nodes)
        return tuple(section.instructions)

    def run(self, nodes: list[Node]) -> Run:
        inside = set(nodes)
        inputs = list(dict.fromkeys(operand for node in nodes for operand in node.all_input_nodes if operand not in inside))
        outputs = [node for node in nodes if any(user not in inside for user in node.users) and not _is_tuple(node)]
        structure = _structure(nodes, inputs, outputs)
        if structure not in self._named:
            name = self._named[structure] = f"f{len(self.fragments)}"
            self.fragments[name] = Fragment(name, _module(nodes, inputs, outputs, self.device), structure=structure)
        return Run(self._named[structure], tuple(buffer_of(node) for node in inputs), tuple(node.name for node in outputs))


def waits_for(values: Iterable[Node], under_way: set[Node]) -> list[Instruction]:
    """WAITs for those of `values` that are under way, which they are no longer then."""
    found: list[Instruction] = []
    for value in values:
        launch = node_at(value, 0) if value.target is wait else None
        if launch is not None and launch in under_way:
            found.append(Wait(launch.name))
            under_way.remove(launch)
    return found


@dataclass
class _Section:
    cutter: FragmentCutter
    under_way: set[Node]
    apart: frozenset[Node] = frozenset()
    # At these a fragment ends, so that the next computes while they move.
    hiding: frozenset[Node] = frozenset()
    together: Mapping[Node, Sequence[Node]] = field(default_factory=dict[Node, Sequence[Node]])
    ends: Mapping[Node, Sequence[Node]] = field(default_factory=dict[Node, Sequence[Node]])
    instructions: list[Instruction] = field(default_factory=list[Instruction])
    current: list[Node] = field(default_factory=list[Node])
    launches: list[Node] = field(default_factory=list[Node])
    launched: set[Node] = field(default_factory=set[Node])
    place: Place = Place()

    def visit(self, node: Node) -> None:
        if node.target is wait or node.target is operator.getitem or node in self.launched:  # hoisted: in front of an earlier call
            return
        more = self.together.get(node, ())
        for each in more:
            self.launch(node_at(each, 0))
        needed = [*(each for each in node.all_input_nodes if each.target is wait and each.args[0] in self.under_way), *more]
        before, self.place = self.place, self.place.at(node)
        if needed or self.place.is_cut_from(before):
            self.cut()
            self.instructions += waits_for(needed, self.under_way)
        if is_launch(node):
            self.launch(node)
            # Its operand has just arrived, and nothing is gained by waiting for the next cut; or what follows is to hide it.
            if needed or node in self.hiding:
                self.cut()
        elif node not in self.apart:
            self.current.append(node)
            # What an op with several results gives is named at once, lest a cut part the names from the op.
            self.current += [user for user in node.users if user.target is operator.getitem]
            if any(memory not in self.current for memory in self.ends.get(node, ())):
                self.cut()

    def launch(self, node: Node) -> None:
        """Launch `node` at the next cut, unless it is under way already: from an earlier section, or hoisted."""
        if node not in self.under_way:
            self.launches.append(node)
            self.launched.add(node)
            self.under_way.add(node)

    def at_once(self, nodes: Sequence[Node]) -> None:
        """Behind all that they wait for; there are no collectives among `nodes`."""
        self.instructions += waits_for([operand for node in nodes for operand in node.all_input_nodes], self.under_way)
        for node in nodes:
            self.visit(node)
        self.cut()

    def cut(self) -> None:
        """Close the current fragment, then launch the collectives that were waiting for it."""
        if self.current:
            self.instructions.append(self.cutter.run(self.current))
            self.current = []
        for launch in self.launches:
            self.instructions += [*self.operand(launch), _launch(launch)]
        self.launches = []

    def operand(self, launch: Node) -> list[Instruction]:
        """What computes the operand of a collective where that is apart from all else."""
        found: list[Node] = []
        node = node_at(launch, 0)
        while node in self.apart:
            found.insert(0, node)
            (node,) = node.all_input_nodes
        return [self.cutter.run(found)] if found else []


def _is_tuple(node: Node) -> bool:
    return isinstance(node.meta["val"], (tuple, list))


def buffer_of(node: Node) -> str:
    """A waited value and its launch are one buffer."""
    return node_at(node, 0).name if node.target is wait else node.name


def _launch(node: Node) -> Launch:
    operand, axes, *options = arguments(node)
    kind = options[0] if node.target in (all_reduce, reduce_scatter) else "copy"
    names: dict[object, Collective] = {all_reduce: "all_reduce", all_gather: "all_gather", reduce_scatter: "reduce_scatter"}
    return Launch(names.get(node.target, "all_to_all"), kind, axes, (buffer_of(operand),), (node.name,))


def _structure(nodes: list[Node], inputs: list[Node], outputs: list[Node]) -> str:
    """A text that is equal for two fragments exactly when one compiled form serves both."""
    numbers = {node: number for number, node in enumerate([*inputs, *nodes])}

    def value(node: Node) -> str:
        return " ".join(f"{v.dtype}{tuple(v.shape)}{v.stride()}{v.is_conj()}{v.is_neg()}" for v in results_of(node) if v is not None)

    lines = [value(node) for node in inputs]
    for node in nodes:
        arguments = torch.fx.map_arg((node.args, node.kwargs), lambda operand: f"%{numbers[operand]}")
        lines.append(f"{node.target} {arguments} {value(node)}")
    return "\n".join([*lines, str([numbers[node] for node in outputs])])


def _module(nodes: list[Node], inputs: list[Node], outputs: list[Node], device: torch.device) -> GraphModule:
    graph = Graph()
    mapping: dict[Node, Node] = {}
    for node in inputs:
        mapping[node] = graph.placeholder(node.name)
        mapping[node].meta = {"val": node.meta["val"]}
    for node in nodes:
        mapping[node] = graph.node_copy(node, lambda operand: mapping[operand])
        if _creates(node):
            mapping[node].kwargs = dict(node.kwargs) | {"device": device}
    graph.output(tuple(mapping[node] for node in outputs))
    return GraphModule(torch.nn.Module(), graph)


def _creates(node: Node) -> bool:
    """Whether `node` makes a tensor out of nothing, on the device that it names."""
    schema = schema_of(node.target)
    return "device" in node.kwargs or (
        not node.all_input_nodes and schema is not None and any(a.name == "device" for a in schema.arguments)
    )


def types_of(program: Program) -> dict[str, TensorType]:
    """Shape and dtype of every value of a program that is a tensor, by the name of its node."""
    found: dict[str, TensorType] = {}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and node.op != "output":
            found[node.name] = (tuple(value.shape), value.dtype)
    return found
