"""From the LOCAL graph to the schedule: compute between two cuts is a fragment, collectives are instructions.

The walk keeps the graph's order. It cuts where a call needs a collective that is still under way, where the
model's repeated block changes (so that eighty equal layers give one fragment), and between forward and backward.
A collective is launched at the first cut after its operand is computed and waited for just before its first use:

    RUN f0 (x, w) -> (partial)
    LAUNCH all_reduce sum tp (partial) -> h
    RUN f1 (…)                                what does not need h goes on meanwhile
    WAIT h
    RUN f2 (h, …)
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, GraphModule, Node

from autopar.ir.arguments import node_at
from autopar.ir.collectives import all_gather, all_reduce, is_launch, reduce_scatter, wait
from autopar.ir.keys import PHASE, SOURCE
from autopar.ir.program import Form, Program, results_of
from autopar.ir.schedule import Add, Collective, Fragment, Free, Instruction, Launch, Pause, Receive, Run, Schedule, Send, Wait

_BLOCK = re.compile(r"^(.*?\.\d+)(\.|$)")


def cut_fragments(program: Program, device: str = "cpu") -> Schedule:
    """The schedule of a LOCAL program; every rank runs it with its own coordinates.

    `device` is the type of device that fragments create tensors on ("cuda": the current one).
    """
    assert program.form is Form.LOCAL
    cutter = FragmentCutter(program, torch.device(device))
    return cutter.schedule()


@dataclass
class FragmentCutter:
    """Cuts sections of one LOCAL program into instructions; equal fragments of all sections are one."""

    program: Program
    device: torch.device
    instructions: list[Instruction] = field(default_factory=list[Instruction])
    fragments: dict[str, Fragment] = field(default_factory=dict[str, Fragment])
    current: list[Node] = field(default_factory=list[Node])
    launches: list[Node] = field(default_factory=list[Node])
    waiting: set[Node] = field(default_factory=set[Node])
    by_structure: dict[str, str] = field(default_factory=dict[str, str])
    block: str = ""

    def schedule(self) -> Schedule:
        program = self.program
        calls = [node for node in program.graph.nodes if node.op == "call_function"]
        paused = False
        for node in calls:
            if PHASE[node] == "backward" and not paused:
                self.pause()
                paused = True
            self.visit(node)
        self.cut()
        if not paused and program.signature.inputs_of("tangent"):
            self.pause()
        for node in program.results:
            self.complete(node)
        names = tuple(node.name for node in program.placeholders)
        outputs = tuple(buffer_of(node) for node in program.results)
        instructions, _ = with_frees(self.instructions, set(names) | set(outputs))
        return Schedule(instructions, self.fragments, names, outputs, program.signature, shapes_of(program))

    def section(self, nodes: Sequence[Node]) -> tuple[Instruction, ...]:
        """The instructions that compute `nodes`, given in the order of the graph; what they launch is complete at the end."""
        self.instructions, self.block = [], ""
        for node in nodes:
            self.visit(node)
        self.cut()
        self.instructions += [Wait(launch.name) for launch in nodes if launch in self.waiting]
        self.waiting.clear()
        return tuple(self.instructions)

    def visit(self, node: Node) -> None:
        if node.target is wait or node.target is operator.getitem:
            return
        needed = [operand for operand in node.all_input_nodes if operand.target is wait and operand.args[0] in self.waiting]
        block = _block(node)
        if needed or (block and self.block and block != self.block):
            self.cut()
            for operand in needed:
                self.complete(operand)
        self.block = block or self.block
        if is_launch(node):
            self.launches.append(node)
            self.waiting.add(node)
        else:
            self.current.append(node)
            # What an op with several results gives is named at once, lest a cut part the names from the op.
            self.current += [user for user in node.users if user.target is operator.getitem]

    def complete(self, node: Node) -> None:
        """Wait for the collective behind `node`, once."""
        launch = node.args[0] if node.target is wait else None
        if launch in self.waiting:
            assert isinstance(launch, Node)
            self.instructions.append(Wait(launch.name))
            self.waiting.remove(launch)

    def pause(self) -> None:
        """End the forward: what the caller gets must be complete."""
        self.cut()
        for output, node in self.program.named_outputs():
            if output.kind != "gradient":
                self.complete(node)
        self.instructions.append(Pause())

    def cut(self) -> None:
        """Close the current fragment, then launch the collectives that were waiting for it."""
        if self.current:
            self.instructions.append(self.run(self.current))
            self.current = []
        for launch in self.launches:
            self.instructions.append(_launch(launch))
        self.launches = []

    def run(self, nodes: list[Node]) -> Run:
        inside = set(nodes)
        inputs = list(dict.fromkeys(operand for node in nodes for operand in node.all_input_nodes if operand not in inside))
        outputs = [node for node in nodes if any(user not in inside for user in node.users) and not _is_tuple(node)]
        structure = _structure(nodes, inputs, outputs)
        if structure not in self.by_structure:
            name = f"f{len(self.fragments)}"
            self.by_structure[structure] = name
            self.fragments[name] = Fragment(name, _module(nodes, inputs, outputs, self.device), 0)
        name = self.by_structure[structure]
        fragment = self.fragments[name]
        self.fragments[name] = Fragment(name, fragment.module, fragment.num_uses + 1)
        return Run(name, tuple(buffer_of(node) for node in inputs), tuple(node.name for node in outputs))


def _block(node: Node) -> str:
    """The repeated block a node belongs to: `transformer.h.3` for anything inside it."""
    source = SOURCE.get(node)
    match = _BLOCK.match(source.module) if source else None
    return match.group(1) if match else ""


def _is_tuple(node: Node) -> bool:
    return isinstance(node.meta["val"], (tuple, list))


def buffer_of(node: Node) -> str:
    """A waited value and its launch are one buffer."""
    return node_at(node, 0).name if node.target is wait else node.name


def _launch(node: Node) -> Launch:
    operand, axes = node.args[0], node.args[1]
    assert isinstance(operand, Node)
    kind = node.args[2] if node.target in (all_reduce, reduce_scatter) else "copy"
    names: dict[object, Collective] = {all_reduce: "all_reduce", all_gather: "all_gather", reduce_scatter: "reduce_scatter"}
    return Launch(names.get(node.target, "all_to_all"), kind, axes, buffer_of(operand), node.name)  # type: ignore[arg-type]


def _structure(nodes: list[Node], inputs: list[Node], outputs: list[Node]) -> str:
    """A text that is equal for two fragments exactly when one compiled form serves both."""
    numbers = {node: number for number, node in enumerate([*inputs, *nodes])}

    def value(node: Node) -> str:
        return " ".join(f"{v.dtype}{tuple(v.shape)}{v.stride()}" for v in results_of(node) if v is not None)

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
    schema = getattr(node.target, "_schema", None)
    return "device" in node.kwargs or (
        not node.all_input_nodes and schema is not None and any(a.name == "device" for a in schema.arguments)
    )


def shapes_of(program: Program) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    shapes = {}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and node.op != "output":
            shapes[node.name] = (tuple(value.shape), value.dtype)
    return shapes


def with_frees(instructions: list[Instruction], kept: set[str]) -> tuple[tuple[Instruction, ...], list[int]]:
    """Free every intermediate buffer right after the last instruction that reads it (or makes it, if none does).

    The operand of a collective is in use until its WAIT, and so is what is sent. Also returns where each instruction is then,
    and, last, their number.
    """
    last: dict[str, int] = {}
    under_way: dict[str, tuple[str, ...]] = {}
    for position, instruction in enumerate(instructions):
        if isinstance(instruction, Launch):
            under_way[instruction.target] = (instruction.source, instruction.target)
        elif isinstance(instruction, (Send, Receive)):
            under_way[instruction.transfer] = instruction.buffers
        names = under_way[instruction.target] if isinstance(instruction, Wait) else touched(instruction)
        for name in names:
            last[name] = position
    ends: dict[int, list[str]] = {}
    for name, position in last.items():
        if name not in kept:
            ends.setdefault(position, []).append(name)
    result: list[Instruction] = []
    places: list[int] = []
    for position, instruction in enumerate(instructions):
        places.append(len(result))
        result.append(instruction)
        if position in ends:
            result.append(Free(tuple(ends[position])))
    return tuple(result), [*places, len(result)]


def touched(instruction: Instruction) -> tuple[str, ...]:
    if isinstance(instruction, Run):
        return instruction.inputs + instruction.outputs
    if isinstance(instruction, Launch):
        return (instruction.source, instruction.target)
    if isinstance(instruction, (Send, Receive)):
        return instruction.buffers
    if isinstance(instruction, Add):
        return (instruction.source, instruction.target)
    return ()
