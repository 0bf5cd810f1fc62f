"""Compares two programs value by value, in the order of the second, and keeps the first node that differs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from autopar._torch import OpOverload, gives_views
from autopar.cost.model import is_view
from autopar.ir.collectives import reshard
from autopar.ir.keys import DIMS, ORIGIN, PHASE, SHARDING, SOURCE
from autopar.ir.program import Program
from autopar.ir.sharding import shape_of
from autopar.runtime.module.parameters import assemble, replica_difference
from autopar.runtime.verify.limits import floor_of
from autopar.runtime.verify.reference_run import Case, Stepper, origins
from autopar.runtime.verify.report import Difference, error_of, norm

aten = torch.ops.aten

# They give what their first operand holds, or a part of it.
_CARRIERS = (reshard, aten.clone.default, aten.slice_scatter.default, aten.select_scatter.default, aten.diagonal_scatter.default,
             aten.as_strided_scatter.default, aten.index_put.default)  # fmt: skip

_JOINERS = (aten.cat.default, aten.stack.default)


class ValueComparison:
    """Compares every LOCAL value with the GLOBAL one that it is a part of, and copies among ranks; keeps the first difference."""

    def __init__(self, program: Program, local: Program, case: Case, tolerance: float) -> None:
        self.known = {node.name for node in program.graph.nodes}
        self.unwritten = {node.name for node in _unwritten(program)}
        self.seen: set[str] = set()
        self.stepper = Stepper(program, case, origins(local) & self.known)
        self.mesh, self.tolerance = local.mesh, tolerance
        self.scales = Scales()
        self.found: Difference | None = None

    def __call__(self, node: Node, values: Sequence[Any]) -> None:
        name = ORIGIN.get(node)
        if name is None or name not in self.known or name in self.seen or node not in SHARDING:
            return
        self.seen.add(name)
        wanted = self.stepper.value(name)
        if self.found is None and name not in self.unwritten:
            self._compare(node, [_results(value) for value in values], _results(wanted))

    def _compare(self, node: Node, values: list[tuple[Any, ...]], wanted: tuple[Any, ...]) -> None:
        for index, (dims, sharding) in enumerate(zip(DIMS[node], SHARDING[node], strict=True)):
            if not isinstance(wanted[index], torch.Tensor) or self.found is not None:
                continue
            if tuple(wanted[index].shape) != shape_of(dims):
                continue  # what the kernel leaves there is not what its fake says, on one device either: nobody can read it by its shape
            parts = {rank: value[index] for rank, value in enumerate(values)}
            expected = sharding.local_shape(dims, self.mesh)
            if any(tuple(part.shape) != expected for part in parts.values()):
                self.found = difference_at(node, math.inf, f"a rank's part is {list(parts[0].shape)}, not {list(expected)}")
                return
            floor = self.scales.floor_of(node, wanted[index])
            error = error_of(assemble(parts, dims, sharding, self.mesh), wanted[index], floor)
            gap, one, other = replica_difference(parts, sharding, self.mesh)
            if error > self.tolerance:
                self.found = difference_at(node, error)
            elif gap > self.tolerance * max(norm(wanted[index]), floor):
                self.found = difference_at(node, gap, f"ranks {one} and {other} should hold the same")


@dataclass
class Scales:
    """The largest norm so far in each phase: what rounding is measured by where a value is zero by cancellation."""

    largest: dict[str | None, float] = field(default_factory=dict[str | None, float])

    def floor_of(self, node: Node, value: torch.Tensor) -> float:
        phase = PHASE.get(node)
        self.largest[phase] = max(self.largest.get(phase, 0.0), norm(value))
        return floor_of(value.dtype) * self.largest[phase]


def first_renamed(before: Program, after: Program, case: Case, tolerance: float) -> Difference | None:
    names = frozenset(node.name for node in before.graph.nodes if node.op == "call_function")
    shared = names & {node.name for node in after.graph.nodes}
    unwritten = _unwritten(after)
    old, new, scales = Stepper(before, case, shared), Stepper(after, case, shared), Scales()
    for node in after.graph.nodes:
        if node.name not in shared:
            continue
        for value, wanted in zip(_results(new.value(node.name)), _results(old.value(node.name)), strict=False):
            if isinstance(wanted, torch.Tensor) and isinstance(value, torch.Tensor) and node not in unwritten:
                error = error_of(value, wanted, scales.floor_of(node, wanted))
                if error > tolerance:
                    return difference_at(node, error)
    return None


def difference_at(node: Node, error: float, detail: str = "") -> Difference:
    """A difference at `node`, by its GLOBAL name where it has one; who made it is still to be said."""
    return Difference(ORIGIN.get(node) or node.name, _source_of(node), "", error, detail)


def _source_of(node: Node) -> str:
    """The user's line of `node`, or of the first node that needs it: a change of sharding of a parameter has none of its own."""
    front, seen = [node], {node}
    while front:
        for each in front:
            source = SOURCE.get(each)
            if source is not None and source.file:
                return str(source)
        front = [user for each in front for user in each.users if user not in seen]
        seen.update(front)
    return ""


def _results(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _unwritten(program: Program) -> set[Node]:
    """What has numbers that nobody wrote: memory as it came, what shows or moves it, and what was written into parts of it, up to the
    first op that reads it. One memory has others than the next."""
    found = set[Node]()
    for node in program.graph.nodes:
        if node.op == "call_function" and ("empty" in str(node.target) or _carries(node, found)):
            found.add(node)
    return found


def _carries(node: Node, found: set[Node]) -> bool:
    """Whether `node` gives what is in `found`, as it is."""
    if node.target in _JOINERS:
        return not found.isdisjoint(node.all_input_nodes)
    shows = is_view(node) or (isinstance(node.target, OpOverload) and gives_views(node.target))
    return (shows or node.target in _CARRIERS) and bool(node.all_input_nodes) and node.all_input_nodes[0] in found
