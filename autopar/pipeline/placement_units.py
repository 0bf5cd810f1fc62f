"""A program as a line of units, the smallest pieces that can be placed on stages, each with its costs and its nodes.

A unit is a forward op with its backward. Ops of the forward that autograd knows by one sequence number (a product and its bias)
are one unit, since their backward is one. Without a backward it is the pieces of one op that are: where an evaluation is cut,
training can be, whichever of the two comes first and decides which stage holds a parameter. Which unit a backward node belongs to is
what `assign_stages` says, with units for stages: it goes by sequence numbers, maxima and minima alone, so that stages and units agree
however the line is cut.

    views       stay with what they show, and are no value of their own where they show all of it: what is sent is what they
                show. One that is larger (expand) is a unit, which the search puts behind a cut, not before it.
    copied ops  (masks, positions, transposed weights: `copied`) are no units and no values: each stage makes its own.
                Their seconds are the first reader's.
    saved       bytes are the producer's. A stage that reads the value of another one in its backward has received it.
    parameters  that one unit reads are its own; those of several units, be it through copied ops, are shared. So are copies of them
                that are there all step.
    buffers     that change from microbatch to microbatch are read and made by one unit.
    gradients   are reduced over replicas once a step, not for each microbatch: that reshard has no seconds here, nor has what
                else runs once a step.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch.fx import Node

from autopar.cost.model import CostModel, is_view
from autopar.graph.differentiable import differentiable
from autopar.ir.collectives import reshard
from autopar.ir.keys import DIMS, DROPPED, PHASE, REPEATABLE, SHARDING, SOURCE, STRATEGY
from autopar.ir.markers import save
from autopar.ir.mesh import MICROBATCHES
from autopar.ir.printing import op_name
from autopar.ir.program import Program, results_of
from autopar.ir.reshard import steps
from autopar.pipeline.assign import assign_stages, copied
from autopar.pipeline.placement_problem import Line, Shared, Unit, Value
from autopar.pipeline.stage_rules import is_copy
from autopar.pipeline.stage_work import Work


@dataclass(frozen=True)
class ProgramLine:
    """`nodes[u]` are the calls of unit u, forward and backward, in the graph's order; `copied` are those of no unit. `training` are the
    units that read a parameter that trains."""

    line: Line
    nodes: tuple[tuple[Node, ...], ...]
    copied: frozenset[Node]
    training: frozenset[int] = frozenset()

    def forward_stages(self, stage_of: tuple[int, ...]) -> dict[Node, int]:
        """The stage of every forward call that has one, for `assign_stages`, given that of each unit (`StagePlacement.stage_of`)."""
        pairs = zip(self.nodes, stage_of, strict=True)
        return {node: stage for nodes, stage in pairs for node in nodes if PHASE.get(node) == "forward"}


def line_of(program: Program, cost: CostModel, keeps_repeatable: bool = True) -> ProgramLine:
    """The line of a GLOBAL program that has its reshards, priced on one rank of `cost`'s mesh.

    Seconds and bytes are those of a microbatch where the program's mesh has the axis in time, else those of the whole batch. What may be
    computed again is saved if it `keeps_repeatable`; if not, it takes no more seconds.
    Reads: PHASE, STRATEGY, SHARDING, DIMS, SOURCE, `save` nodes, autograd's sequence numbers.
    """
    return _Reading(program, cost, keeps_repeatable).result()


@dataclass
class _Reading:
    program: Program
    cost: CostModel
    keeps_repeatable: bool = True
    # Of every call but the copied ones its unit, of every copied one the first unit that reads it; inputs as copied ones.
    unit_of: dict[Node, int] = field(default_factory=dict[Node, int])

    def __post_init__(self) -> None:
        self.calls = [node for node in self.program.graph.nodes if node.op == "call_function"]
        self.copied, self.work = copied(self.program), Work(self.program)
        forward = self._units()
        self.num_units = max(forward.values(), default=0) + 1
        self.unit_of = assign_stages(self.program, forward, self.num_units)
        self.readers: dict[Node, set[int]] = {}
        for node in reversed(self.program.graph.nodes):
            if node in self.copied or node.op == "placeholder":
                readers = {unit for user in node.users if user.op == "call_function" for unit in self._units_of(user)}
                self.readers[node] = readers
                self.unit_of[node] = min(readers, default=0)

    def _units_of(self, node: Node) -> set[int]:
        return self.readers[node] if node in self.readers else {self.unit_of[node]}

    def _units(self) -> dict[Node, int]:
        """The number of the unit that each forward op is in, views left out that stay with what they show."""
        has_backward = {node.meta.get("seq_nr") for node in self.calls if PHASE.get(node) == "backward"} - {None}
        differentiated = self.needs_gradient()
        found: dict[Node, int] = {}
        count, before, last = -1, None, None
        for node in self.calls:
            if PHASE.get(node) != "forward" or node in self.copied or (is_view(node) and not self._grows(node)):
                continue
            if has_backward:
                origin = node.meta.get("seq_nr")
                # Autograd does not count what needs no gradient: all of a frozen trunk has the number of what comes behind it.
                is_counted = last in differentiated or (last is not None and _recorded_as(last) == _recorded_as(node))
                is_part = is_counted and origin == before and origin in has_backward
            else:
                origin = _recorded_as(node)
                is_piece = origin is not None and origin == before and origin[1] != str(node.target)
                is_part = is_piece and count in self._nearest(found, node, True)
            count += not is_part
            before, last, found[node] = origin, node, count
        return self._joined(found)

    def _joined(self, units: dict[Node, int]) -> dict[Node, int]:
        """Merge all units between the first and the last use of a buffer that forward changes.

        Cut between them, the next microbatch would read the buffer on an early stage before a later stage has changed it for this one.
        """
        spans: list[tuple[int, int]] = []
        old = {item.name: node for item, node in self.program.named_inputs() if item.kind == "buffer"}
        for output, node in self.program.named_outputs():
            if output.kind == "buffer":
                touched = self._nearest(units, old[output.name], False) | self._nearest(units, node, True)
                touched |= {unit for user in node.users for unit in self._nearest(units, user, False) if PHASE.get(user) == "forward"}
                spans += [(min(touched), max(touched))] if touched else []
        inside = {unit for first, last in spans for unit in range(first + 1, last + 1)}
        numbers, count = list[int](), -1
        for unit in range(max(units.values(), default=-1) + 1):
            count += unit not in inside
            numbers.append(count)
        return {node: numbers[unit] for node, unit in units.items()}

    def _nearest(self, units: dict[Node, int], node: Node, above: bool) -> set[int]:
        """The units of those readers of `node` that have one, through views and copied ops; `above`, of what it is made from."""
        found, seen, pending = set[int](), {node}, [node]
        while pending:
            each = pending.pop()
            if each in units:
                found.add(units[each])
                continue
            others = {other for other in (each.all_input_nodes if above else each.users) if PHASE.get(other) == "forward"}
            pending += others - seen
            seen |= others
        return found

    def _grows(self, node: Node) -> bool:
        """Whether a view has more elements than what it shows."""
        return node.target is not operator.getitem and self.num_bytes(node) > self.num_bytes(node.all_input_nodes[0])

    def num_bytes(self, node: Node) -> float:
        """Of the results on one rank."""
        results = zip(DIMS[node], results_of(node), SHARDING[node], strict=True)
        return sum(self.cost.local_bytes(dims, value.dtype, sharding) for dims, value, sharding in results if value is not None)

    def result(self) -> ProgramLine:
        nodes: list[list[Node]] = [[] for _ in range(self.num_units)]
        seconds = {"forward": [0.0] * self.num_units, "backward": [0.0] * self.num_units}
        saved, working = [0.0] * self.num_units, [0.0] * self.num_units
        for node in self.calls:
            unit = self.unit_of[node]
            seconds[PHASE.get(node) or "forward"][unit] += self.seconds(node)
            working[unit] = max(working[unit], self.working_bytes(node))
            saved[unit] += self.num_bytes(node) if self.is_kept(node) else 0.0
            if node not in self.copied:
                nodes[unit].append(node)
        held, shared = self.parameters()
        columns = zip(map(_name, nodes), seconds["forward"], seconds["backward"], held, saved, working, strict=True)
        line = Line(tuple(itertools.starmap(Unit, columns)), tuple(self.values()), shared)
        trained = [node for item, node in self.program.named_inputs() if item.kind == "parameter" and item.requires_grad]
        training = frozenset(unit for node in trained for unit in self.readers[node])
        return ProgramLine(line, tuple(map(tuple, nodes)), self.copied, training)

    def is_kept(self, node: Node) -> bool:
        return node.target is save and node not in DROPPED and (self.keeps_repeatable or node not in REPEATABLE)

    def seconds(self, node: Node) -> float:
        if node in self.work.per_step:
            return 0.0
        if node.target is not reshard:
            return self.cost.node(node, STRATEGY[node]).seconds
        if node in self.work.finishing:
            return 0.0
        total, value, source = 0.0, results_of(node)[0], node.all_input_nodes[0]
        assert value is not None
        for step in steps(DIMS[node][0], SHARDING[source][0], SHARDING[node][0], self.program.mesh):
            axes = tuple(axis for axis in step.axes if axis != MICROBATCHES)
            if axes and step.collective != "slice":
                sizes = (step.num_input * value.dtype.itemsize, step.num_output * value.dtype.itemsize)
                total += self.cost.collective(step.collective, axes, *sizes).seconds
        return total

    def working_bytes(self, node: Node) -> float:
        if node.target is not reshard:
            return self.cost.traffic_bytes(node, STRATEGY[node])
        return self.num_bytes(node) + self.num_bytes(node.all_input_nodes[0])

    def parameters(self) -> tuple[list[float], tuple[Shared, ...]]:
        """What each unit holds alone, and what several do."""
        own, shared = [0.0] * self.num_units, list[Shared]()
        named = self.program.named_inputs()
        sizes = {
            node: self.cost.optimizer.held_bytes(item, self.num_bytes(node)) for item, node in named if item.kind in ("parameter", "buffer")
        }
        for node, num_bytes in (sizes | {node: self.num_bytes(node) for node in self.calls if is_copy(node)}).items():
            if len(self.readers[node]) > 1:
                shared.append(Shared(tuple(sorted(self.readers[node])), num_bytes))
            else:
                own[self.unit_of[node]] += num_bytes
        return own, tuple(shared)

    def values(self) -> Iterator[Value]:
        """What units make and later ones read, in the backward as well; a value and the views that show all of it are one."""
        shown: dict[Node, Node] = {}
        readers: dict[Node, set[int]] = {}
        needs_gradient = self.needs_gradient()
        for node in self.calls:
            if node in self.copied:
                continue
            for operand in node.all_input_nodes:
                if operand in shown:
                    readers.setdefault(shown[operand], set()).add(self.unit_of[node])
            if PHASE.get(node) == "forward" or self._shows_all(node, shown):
                shown[node] = shown[node.all_input_nodes[0]] if self._shows_all(node, shown) else node
        for node, units in readers.items():
            later = tuple(sorted(unit for unit in units if unit > self.unit_of[node]))
            if later:
                yield Value(self.unit_of[node], later, self.num_bytes(node), node in needs_gradient)

    def _shows_all(self, node: Node, shown: dict[Node, Node]) -> bool:
        source = node.all_input_nodes[0] if node.all_input_nodes else None
        if source not in shown or node.target is operator.getitem or not is_view(node):
            return False
        return math.isclose(self.num_bytes(node), self.num_bytes(source))

    def needs_gradient(self) -> set[Node]:
        """What gradients flow through in the forward; nothing in a program without a backward."""
        trains = any(PHASE.get(node) == "backward" for node in self.calls)
        return differentiable(self.program) if trains else set()


def _recorded_as(node: Node) -> tuple[str, str] | None:
    """The call that Dynamo recorded and the ATen op of it that `node` is, or a piece of; None where it is not known."""
    recorded, op = node.meta.get("from_node"), node.meta.get("original_aten")
    return (recorded[0].name, str(op)) if recorded and op is not None else None  # by name: Dynamo copies operators


def _name(nodes: list[Node]) -> str:
    """Of the first forward op that is no view, if there is one: its module in the user's model, and what it is. None are in the one unit
    of a program that every stage computes for itself."""
    chosen = min(nodes, key=lambda node: (PHASE.get(node) == "backward", is_view(node)), default=None)
    if chosen is None:
        return ""
    module = SOURCE[chosen].module if chosen in SOURCE else ""
    return f"{module} {op_name(chosen.target)}".strip()
