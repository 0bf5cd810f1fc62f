"""What the search and the placement of stages decided, with what is known of the alternatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from autopar.ir.sharding import Strategy
from autopar.ir.units import in_bytes
from autopar.partition.penalties import FairRunnersUp
from autopar.partition.sharding_problem import ShardingProblem
from autopar.partition.solver.search import Solution
from autopar.pipeline.placement import StagePlacement


@dataclass(frozen=True)
class RunnerUp:
    """The next-best strategy of a node, and the seconds a step gains when all `num_nodes` nodes like it take it."""

    strategy: Strategy
    extra_seconds: float
    num_nodes: int


@dataclass(frozen=True)
class ShardingDecision:
    """A strategy for every input and call, by node name, what the step costs with them, and how that was found.

    `cost_seconds` adds up one rank's ops, changes of sharding and optimizer update, without overlap. `fixed` names the nodes
    that had been decided beforehand, `dropped` the `save` nodes of which the budget wants their value computed again. Of `num_microbatches`
    seconds are those of one. Of a pipeline seconds and bytes are those
    of one rank at each of its `num_places` together. `limit_bytes` is what the user allows, where that is not what the search was given.
    """

    strategies: Mapping[str, Strategy]
    reasons: Mapping[str, str]
    solution: Solution
    sharding_problem: ShardingProblem
    fixed: frozenset[str] = frozenset()
    num_microbatches: int = 1
    num_places: int = 1
    dropped: frozenset[str] = frozenset()
    limit_bytes: float | None = None

    @property
    def budget_bytes(self) -> float:
        return self.sharding_problem.problem.capacity_bytes if self.limit_bytes is None else self.limit_bytes

    @property
    def per(self) -> str:
        """What seconds are counted by."""
        return "a step" if self.num_microbatches == 1 else "a microbatch"

    @property
    def cost_seconds(self) -> float:
        return self.solution.seconds

    @property
    def lower_bound_seconds(self) -> float:
        return self.solution.lower_bound_seconds

    @property
    def gap(self) -> float:
        return self.solution.gap

    def runner_up(self, node: str) -> RunnerUp | None:
        """What else the node named `node` could do, everything else as it is; None where it has no choice."""
        index = self.sharding_problem.index[node]
        found = self.solution.runner_up(index) if self.num_microbatches == 1 else self._apart.of(index)
        return found and RunnerUp(self.sharding_problem.strategies[index][found.pick], found.extra_seconds, found.num_nodes)

    def cheapest(self, node: str, is_wanted: Callable[[Strategy], bool]) -> RunnerUp | None:
        """The best of the other strategies of a node that are wanted, everything else as it is; None where there is none."""
        index = self.sharding_problem.index[node]
        strategies = self.sharding_problem.strategies[index]
        found = self.solution.cheapest(index, lambda pick: is_wanted(strategies[pick]))
        return found and RunnerUp(strategies[found.pick], found.extra_seconds, found.num_nodes)

    @cached_property
    def _apart(self) -> FairRunnersUp:
        return FairRunnersUp(self.solution)

    def __str__(self) -> str:
        found = self.solution
        known = f"at most {100 * found.gap:.2f} % above the best" if math.isfinite(found.gap) else "nothing proved of the best"
        stopped = ", stopped by search_timeout" if found.is_timed_out else ""
        return (
            f"{len(self.strategies)} nodes in {found.num_classes} classes, {found.num_variables} variables: "
            f"{1e3 * found.seconds:.3f} ms {self.per}, {known}, found in {found.search_seconds:.2f} s{stopped}"
        )


@dataclass(frozen=True)
class StageDecision:
    """`stages` are by name of a forward node; those that every stage computes for itself have none.

    `cuts` names the first op of each stage but the first, `reason` says who cut there, if cost did not. `place` gives the
    placement with stages that begin at other units.
    """

    placement: StagePlacement
    stages: Mapping[str, int]
    cuts: tuple[str, ...] = ()
    reason: str = ""
    place: Callable[[tuple[int, ...]], StagePlacement] | None = field(default=None, repr=False, compare=False)

    @cached_property
    def next_best(self) -> StagePlacement | None:
        """The best placement with one cut moved by one unit; None where none can be moved, or moving it does not fit."""
        found: list[StagePlacement] = []
        starts, num_units = self.placement.starts, len(self.placement.stage_of)
        for stage in range(1, len(starts)):
            for start in (starts[stage] - 1, starts[stage] + 1):
                moved = (*starts[:stage], start, *starts[stage + 1 :], num_units)
                if self.place is not None and moved[stage - 1] < start < moved[stage + 1]:
                    found.append(self.place(moved[:-1]))
        fitting = [each for each in found if all(stage.bytes <= stage.capacity_bytes for stage in each.stages)]
        return min(fitting, key=lambda each: each.slowest_seconds, default=None)

    @property
    def reasons(self) -> dict[str, str]:
        """By stage where it begins, and why there."""
        slowest = f"by cost, the slowest stage {1e6 * self.placement.slowest_seconds:.1f} µs a microbatch"
        stages = enumerate(self.placement.stages)
        return {f"stage {number}": f"from {stage.first_name} on: {self.reason or slowest}" for number, stage in stages if number}

    def __str__(self) -> str:
        return str(self.placement)


# What DistributedDataParallel fills: where links cost nothing, and so do buckets.
USUAL_BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class BucketSizes:
    """How many bytes collectives that go together may have in all: by the axes of reductions ("dp", or "dp,cp"), and of gathers
    ("all_gather dp"), with 0 where these stay as they are. `reasons` say why so many, by the same names.

    `together` are buckets chosen by hand, of any size: those reductions go together, and no others, whose results are named together.
    """

    bytes: Mapping[str, int]
    reasons: Mapping[str, str] = field(default_factory=dict[str, str])
    together: tuple[frozenset[str], ...] | None = None

    def __str__(self) -> str:
        return "; ".join(f"over {axes} up to {in_bytes(size)}" for axes, size in self.bytes.items()) or "nothing to join"


@dataclass(frozen=True)
class NodeSizes:
    """By the name of a collective how many neighbours of its group are on a node, where it goes by node. And why."""

    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    reason: str = ""

    def __str__(self) -> str:
        return self.reason or "none is quicker so"


@dataclass(frozen=True)
class Chunks:
    """Into how many pieces collectives and the products beside them are cut, by the names of the collectives in a plan; what is missing
    stays whole. `reasons` say why so many, or why none, by the same names, `reason` why nothing was looked at."""

    numbers: Mapping[str, int] = field(default_factory=dict[str, int])
    reasons: Mapping[str, str] = field(default_factory=dict[str, str])
    reason: str = ""

    def __str__(self) -> str:
        return self.reason or f"{len(self.numbers)} of {len(self.reasons)} collectives beside products in pieces"
