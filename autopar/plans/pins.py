"""What the user fixes by hand: parameters, and what modules return, by name or pattern, one entry per dim.

    pins={"transformer.h.*.mlp.c_fc.weight": (None, "tp"),      dim 1 over tp
          "transformer.wte.weight": ("tp", None),               dim 0 over tp
          "lm_head.weight": (("dp", "tp"), None),               dim 0 over dp and tp, dp major
          "*.bias": (),                                         on every rank
          "transformer.h.*.mlp": (None, "tp", ...)}             the output of a module: dim 1 over tp

A later pattern overrides an earlier one; `...` stands for the dims between. On a dim of several atoms (a fused qkv dim is
3 × heads × head size) an axis splits the first atom that it divides. A pattern that matches a parameter speaks of
parameters (`*` stands for any text), else of modules (`*` stands for one part of a path, a leading one for any parents).
An output stays split over the batch as everything is; that needs no pin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import EllipsisType

from torch.fx import Node

from autopar.errors import PlanError, UnmatchedPinError
from autopar.ir.freedom import Freedom
from autopar.ir.keys import BATCH, DIMS, SOURCE
from autopar.ir.markers import pinned
from autopar.ir.mesh import Mesh
from autopar.ir.offload import Offload
from autopar.ir.pattern import matches_module, matches_name, near_names
from autopar.ir.precision import MixedPrecision
from autopar.ir.program import Program
from autopar.ir.sharding import Dims, Sharding, Strategy
from autopar.ir.source import module_calls
from autopar.ir.zero import ZeRO
from autopar.ops.strategies import strategies_of
from autopar.plans.plan import DimPin, Pins, Plan, PlannedInput


@dataclass(frozen=True)
class ResolvedPins:
    """Pins on a program: parameters as a plan, and the strategy of each `pinned` node that was asked for, by node name."""

    plan: Plan
    outputs: Mapping[str, Strategy] = field(default_factory=dict[str, Strategy])


def resolve(pins: Pins | Plan, program: Program) -> ResolvedPins:
    """`pins` on `program`, which has atoms and `pinned` nodes; a plan is taken for its parameters' pins.

    Raises `PlanError` naming every pin that cannot be kept: a pattern that nothing matches, an unknown axis, one used twice,
    another number of dims, sizes that do not divide, or an axis that may not split the batch.
    """
    if isinstance(pins, Plan):
        return ResolvedPins(pins.pins())
    resolver = _Resolver(program)
    for pattern, pin in pins.items():
        resolver.add(pattern, pin)
    if resolver.problems:
        lines = "\n".join(f"  {problem}" for problem in resolver.problems)
        kind = UnmatchedPinError if resolver.has_unmatched else PlanError
        raise kind(f"pins that cannot be kept:\n{lines}\npin another dim, or drop the pin")
    plan = Plan(program.mesh, resolver.found, reasons={name: "pinned by the user" for name in resolver.found})
    return ResolvedPins(plan, resolver.outputs)


class _Resolver:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.parameters = {item.name: DIMS[node][0] for item, node in program.named_inputs() if item.kind == "parameter"}
        self.marked: dict[str, list[Node]] = {}
        for node in program.graph.nodes:
            if node.target is pinned:
                self.marked.setdefault(SOURCE[node].module, []).append(node)
        self.found: dict[str, PlannedInput] = {}
        self.outputs: dict[str, Strategy] = {}
        self.problems: list[str] = []
        self.has_unmatched = False

    def add(self, pattern: str, pin: Sequence[DimPin]) -> None:
        names = [pattern] if pattern in self.parameters else [name for name in self.parameters if matches_name(name, pattern)]
        for name in names:
            sharding = _sharding(pin, self.parameters[name], self.program.mesh)
            if isinstance(sharding, str):
                self.problems.append(f"{name!r} {_written(pin)}: {sharding}")
            else:
                self.found[name] = PlannedInput(self.parameters[name], sharding)
        if not names and not self._is_of_written(pattern, pin):
            self._add_modules(pattern, pin)

    def _is_of_written(self, pattern: str, pin: Sequence[DimPin]) -> bool:
        """Whether `pattern` names parameters that forward writes, which lie whole whatever is pinned."""
        names = [item.name for item in self.program.signature.written_parameters if matches_name(item.name, pattern)]
        if names and any(pin):
            self.problems.append(f"{names[0]!r} {_written(pin)}: forward writes into it, and what forward writes lies whole on each rank")
        return bool(names)

    def _add_modules(self, pattern: str, pin: Sequence[DimPin]) -> None:
        modules = [module for module in self.marked if matches_module(module, pattern)]
        if not modules:
            self.has_unmatched = True
            parameters, paths = near_names(pattern, self.parameters), near_names(pattern, _modules(self.program))
            self.problems.append(f"{pattern!r} matches no parameter; there are {parameters}; and no module that runs; there are {paths}")
        for module in modules:
            for node in self.marked[module]:
                strategy = _strategy(pin, node, self.program)
                if isinstance(strategy, str):
                    self.problems.append(f"the output of {module!r} {_written(pin)}: {strategy}")
                else:
                    self.outputs[node.name] = strategy


def _modules(program: Program) -> Iterator[str]:
    return (path for node in program.graph.nodes if node.op == "call_function" for path in module_calls(node))


def _written(pin: Sequence[DimPin]) -> str:
    return f"({', '.join('...' if entry is ... else repr(entry) for entry in pin)}{',' if len(pin) == 1 else ''})"


def _strategy(pin: Sequence[DimPin], node: Node, program: Program) -> Strategy | str:
    """The strategy of a `pinned` node in which its value lies as `pin` says, or why there is none.

    Axes of the batch that the pin does not name split the batch, as they do everywhere.
    """
    mesh, freedom, dims = program.mesh, program.freedom, DIMS[node][0]
    wanted = _sharding(pin, dims, mesh)
    if isinstance(wanted, str):
        return wanted
    implied = {axis for axis in mesh.names if freedom.is_batch(axis)} - set(wanted.axes)
    for strategy in strategies_of(node, mesh, freedom):
        lies = strategy.results[0]
        if not lies.unreduced and tuple(tuple(axis for axis in split if axis not in implied) for split in lies.splits) == wanted.splits:
            return strategy
    on_batch = [axis for position in BATCH[node][0] for axis in wanted.splits[position] if not freedom.is_batch(axis)]
    if on_batch and not freedom.is_flexible(on_batch[0]):
        allowed = tuple(dict.fromkeys((*freedom.batch, *freedom.flexible, on_batch[0])))
        return f"axis {on_batch[0]!r} may not split the batch; let it with pins={{'batch': {allowed}}}"
    return f"{wanted.describe(dims)} cannot be had: {', '.join(freedom.batch)} splits the batch, and the batch alone"


def _sharding(pin: Sequence[DimPin], dims: Dims, mesh: Mesh) -> Sharding | str:
    """The sharding that `pin` means for a value of `dims`, or why there is none."""
    entries = _entries(pin, len(dims))
    if entries is None:
        return f"{len(pin)} entries for {len(dims)} dims"
    splits: list[tuple[str, ...]] = []
    used: list[str] = []
    for dim, entry in zip(dims, entries, strict=True):
        axes = [entry] if isinstance(entry, str) else list(entry or ())
        parts = [part for axis in axes for part in (mesh.parts(axis) or (axis,))]
        unknown = [axis for axis in parts if axis not in mesh.names]
        if unknown:
            return f"axis {unknown[0]!r} is not on the mesh ({mesh})"
        placed = _place(parts, dim, mesh)
        if placed is None:
            sizes = " × ".join(map(str, dim)) or "1"
            return f"a dim of {sizes} does not divide over {'·'.join(axes)} = {mesh.size_of(parts)}"
        splits += placed
        used += parts
    twice = [axis for axis in used if used.count(axis) > 1]
    return f"axis {twice[0]!r} is used twice" if twice else Sharding(tuple(splits))


def _entries(pin: Sequence[DimPin], num_dims: int) -> list[str | Sequence[str] | None] | None:
    """One entry for each dim: an empty pin splits none, `...` as many as are missing. None where the numbers do not fit."""
    given = list(pin) or [...]
    if ... in given:
        index = given.index(...)
        given[index : index + 1] = [None] * (num_dims - len(given) + 1)
    entries = [entry for entry in given if not isinstance(entry, EllipsisType)]
    return entries if len(given) == len(entries) == num_dims else None


def _place(axes: Sequence[str], dim: Sequence[int], mesh: Mesh) -> list[tuple[str, ...]] | None:
    """Axes on the atoms of one dim, each on the first that it divides; None when one divides none."""
    splits: list[tuple[str, ...]] = [()] * len(dim)
    for axis in axes:
        for index, atom in enumerate(dim):
            if atom % (mesh.size_of(splits[index]) * mesh.size_of([axis])) == 0:
                splits[index] += (axis,)
                break
        else:
            return None
    return splits


def without_batch(pins: Pins | Plan | None) -> Pins | Plan | None:
    """The pins that say how something lies."""
    return pins if pins is None or isinstance(pins, Plan) else {name: pin for name, pin in pins.items() if name != "batch"}


def freedom_of(pins: Pins | Plan | None, plan: Plan | None, mesh: Mesh, has_budget: bool, zero: ZeRO | None = None) -> Freedom:
    """What the axes may split: as the plan was made with, else as the pins, the budget and `zero` have it. Raises `PlanError`."""
    zero = zero and zero.on(mesh)
    if plan is not None:
        theirs = plan.freedom.zero or ("parameters in parts as its budget had it" if plan.freedom.shards_parameters else "no ZeRO at all")
        is_none = zero is not None and zero.level == 0 and not plan.freedom.shards_parameters
        if zero not in (None, plan.freedom.zero) and not is_none:
            raise PlanError(f"zero= asks for {zero}, and the plan was made with {theirs}; leave one of them out")
        return plan.freedom
    axes = tuple(str(axis) for axis in pins.get("batch", ("dp",))) if isinstance(pins, Mapping) else ("dp",)
    unknown = [axis for axis in axes if not mesh.parts(axis)]
    if unknown and axes != ("dp",):
        raise PlanError(f'pins["batch"] names the axis {unknown[0]!r}, which is not on the mesh ({mesh})')
    in_parts = has_budget if zero is None else zero.level > 0
    asked = zero if zero is not None and zero.level > 0 else None
    return Freedom(flexible=tuple(axis for axis in axes if axis != "dp"), shards_parameters=in_parts, zero=asked)


def precision_of(asked: str | MixedPrecision | None, plan: Plan | None) -> MixedPrecision | None:
    """What was asked for, which a plan must not contradict, or the plan's. Raises `PlanError`."""
    precision = MixedPrecision.of(asked)
    if plan is None or precision in (None, plan.precision):
        return precision if plan is None else plan.precision
    theirs = plan.precision or "no precision= at all"
    raise PlanError(f"precision= asks for what {precision}, and the plan was made for: {theirs}; leave one of them out")


def offload_of(asked: str | Offload | None, plan: Plan | None) -> Offload | None:
    """What was asked for, else what the plan has. Raises `AutoparError` for what is unknown, `PlanError` for a plan that lacks a folder."""
    offload = Offload.of(asked)
    if offload is not None or plan is None or (plan.offloaded is None and plan.stored is None):
        return offload
    activations = plan.offloaded.memory if plan.offloaded is not None else None
    if "file" in (activations, plan.stored):
        what = "activations" if activations == "file" else "parameters"
        raise PlanError(
            f"the plan keeps {what} in files, and says nothing of where: pass "
            f'offload=autopar.Offload({what}="file", folder=...), or "host" in place of "file" for memory'
        )
    return Offload(activations="host" if activations else None, parameters=plan.stored)
