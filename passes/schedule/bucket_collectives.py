"""Joins small collectives to buckets, so that their latency is paid once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from autopar.cost.hardware.cluster import Cluster
from autopar.cost.memory import MemoryBudget
from autopar.cost.model import CostModel
from autopar.cost.schedule_budget import ScheduleBudget
from autopar.errors import ScheduleError
from autopar.ir.instructions import Instruction, Launch, Run, Wait
from autopar.ir.keys import CHUNK
from autopar.ir.schedule import Schedule
from autopar.ir.units import in_bytes
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.plans.decisions import USUAL_BUCKET_BYTES, BucketSizes

# All that is reduced is tried in 1, 2, 4, … 2^10 buckets.
MOST_DOUBLINGS = 10


@dataclass(frozen=True)
class BucketCollectives:
    """Join reductions of one kind, group, dtype and microbatch, in the order in which their operands become ready, to buckets.

    Each is delayed until the last operand of its bucket is there, by at most half of the fragments that it could hide behind: buckets
    get smaller towards the end of the backward, and one that is waited for at once joins only what is launched beside it. Source of the
    idea: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020, section 3.2.

    In k buckets, all that is reduced over some axes takes k starts, and nothing hides the last of them, a k-th of the bytes: the best k
    is decided. What is hidden takes its share of the device from what computes (`Link.busy`), so that hiding saves the rest alone. Where
    memory has no room for so large buckets they are halved.

    Reads: a `ScheduleProgram` with its results in their places. Writes: LAUNCHes of several buffers, their one WAIT.
    Ensures: the same values, before their first reader; all ranks launch in one order.
    """

    cluster: Cluster
    planned: Mapping[str, int] | None = None
    budget: MemoryBudget = field(default_factory=MemoryBudget)
    name: str = "bucket collectives"

    def decide(self, program: ScheduleProgram) -> BucketSizes:
        """By the axes of collectives how many bytes a bucket may have; those of a plan where it knows."""
        totals, pieces = dict[tuple[str, ...], int](), _pieces(program)
        for schedule in program.places:
            here: dict[tuple[str, ...], int] = {}
            for each in _launches(schedule, pieces):
                here[each.launch.axes] = here.get(each.launch.axes, 0) + each.num_bytes
            totals |= {axes: max(total, totals.get(axes, 0)) for axes, total in here.items()}
        cost, planned = CostModel(self.cluster, program.mesh), self.planned or {}
        found: dict[str, int] = {}
        reasons: dict[str, str] = {}
        for axes, total in totals.items():
            key = ",".join(axes)
            found[key], reasons[key] = (planned[key], "as planned") if key in planned else _best(cost, axes, total)
        return self._fitting(program, BucketSizes(found, reasons))

    def apply(self, program: ScheduleProgram, decision: BucketSizes) -> ScheduleProgram:
        """Join what fits into the sizes of `decision`, or what stands together there. Raises `ScheduleError` for what cannot."""
        pieces = _pieces(program)
        if decision.together is not None:
            return _joined(program, [_chosen(schedule, decision.together, pieces) for schedule in program.places])
        parts = [list(_buckets(_launches(schedule, pieces), decision.bytes)) for schedule in program.places]
        return _joined(program, parts)

    def written(self, program: ScheduleProgram, decision: BucketSizes) -> dict[str, int]:
        return dict(decision.bytes)

    def read(self, program: ScheduleProgram, value: Mapping[str, int]) -> BucketSizes:
        return BucketSizes(dict(value))

    def _fitting(self, program: ScheduleProgram, wanted: BucketSizes) -> BucketSizes:
        budget, found = ScheduleBudget(program.places, self.budget), wanted
        while any(found.bytes.values()) and not budget.allows(self.apply(program, found).places):
            smaller = {axes: size // 2 for axes, size in found.bytes.items()}
            found = BucketSizes(smaller, {axes: f"{in_bytes(size)} do not fit into the budget" for axes, size in wanted.bytes.items()})
        return found


def _best(cost: CostModel, axes: tuple[str, ...], total: int) -> tuple[int, str]:
    """How large buckets over `axes` should be, of `total` bytes in all, and why."""
    start = cost.collective("all_reduce", axes, 0, 0).seconds
    all_at_once = cost.collective("all_reduce", axes, total, total).seconds - start
    if start <= 0 or all_at_once <= 0:
        return USUAL_BUCKET_BYTES, "links cost nothing here: as large as DistributedDataParallel's"
    busy = cost.busy(axes)
    seconds = {2**n: 2**n * start + (1 - busy) * all_at_once / 2**n for n in range(MOST_DOUBLINGS + 1)}
    best, second = sorted(seconds, key=seconds.__getitem__)[:2]
    why = f"starts of {best} buckets take {1e3 * best * start:.2f} ms, the last, which nothing hides, {1e3 * all_at_once / best:.2f} ms"
    why += f", of which hiding it would save {1 - busy:.0%}" if busy else ""
    other = f"in {second} of {in_bytes(total / second)} it would be {1e3 * (seconds[second] - seconds[best]):.2f} ms more"
    return math.ceil(total / best), f"{why}; {other}"


@dataclass(frozen=True)
class _Member:
    """A collective that may join a bucket: where it is launched and waited for, and how many fragments run before each."""

    launch: Launch
    num_bytes: int
    dtype: object
    microbatch: int | None
    begin: int
    end: int
    runs_before: int
    runs_until: int

    @property
    def kind(self) -> tuple[object, ...]:
        """Members of a bucket are of one; in a bucket of two microbatches one would wait for the other's operand."""
        return self.launch.collective, self.launch.kind, self.launch.axes, self.dtype, self.microbatch

    @property
    def latest(self) -> int:
        """How many fragments may have run when it is launched."""
        return self.runs_before + (self.runs_until - self.runs_before) // 2


def _pieces(program: ScheduleProgram) -> frozenset[str]:
    """The values of which each is a piece of another: they were cut so as to be reduced one after another."""
    nodes = program.cut.program.graph.nodes if program.cut is not None else ()
    return frozenset(node.name for node in nodes if node in CHUNK)


def _launches(schedule: Schedule, pieces: frozenset[str]) -> Iterator[_Member]:
    """The reductions that could join a bucket, in their order; none of `pieces`."""
    waits, runs = dict[str, tuple[int, int]](), 0
    for position, each in enumerate(schedule.instructions):
        runs += isinstance(each, Run)
        if isinstance(each, Wait):
            waits.setdefault(each.target, (position, runs))
    runs = 0
    for position, each in enumerate(schedule.instructions):
        runs += isinstance(each, Run)
        if isinstance(each, Launch) and each.collective in ("all_reduce", "reduce_scatter") and len(each.sources) == 1:
            made = schedule.buffers.get(each.name)  # a pass of somebody's own may launch what is no value
            tensor_type = schedule.type_of(each.sources[0]) if made is None or made.value not in pieces else None
            if tensor_type is not None and tensor_type[1] != torch.bool and each.name in waits:
                end, runs_until = waits[each.name]
                num_bytes, microbatch = schedule.bytes_of(each.sources[0]), schedule.buffers[each.sources[0]].microbatch
                yield _Member(each, num_bytes, tensor_type[1], microbatch, position, end, runs, runs_until)


@dataclass
class _Open:
    """A bucket that more may join."""

    members: list[_Member] = field(default_factory=list[_Member])

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self.members)

    def takes(self, other: _Member, limit: int) -> bool:
        is_early = all(other.begin < each.end and other.runs_before <= each.latest for each in self.members)
        return is_early and self.num_bytes + other.num_bytes <= limit


def _chosen(schedule: Schedule, together: Iterable[frozenset[str]], pieces: frozenset[str]) -> list[list[_Member]]:
    """The members of each bucket that was chosen by hand, as far as they are on this rank."""
    members = {each.launch.name: each for each in _launches(schedule, pieces)}
    found = [[each for name, each in members.items() if name in names] for names in together]
    for bucket in found:
        kinds, soonest = {each.kind for each in bucket}, min((each.end for each in bucket), default=0)
        late = [each for each in bucket if each.begin > soonest]
        if late or len(kinds) > 1:
            differ = f"they are of {len(kinds)} kinds, axes, dtypes or microbatches"
            why = f"{late[0].launch} begins behind the first WAIT of them" if late else differ
            raise ScheduleError(f"these cannot go together: {', '.join(each.launch.name for each in bucket)}; {why}")
    return found


def _joined(program: ScheduleProgram, buckets: Sequence[Sequence[Sequence[_Member]]]) -> ScheduleProgram:
    """`program` with what stands together in `buckets`, by rank, joined, where two do."""
    if not any(len(bucket) > 1 for parts in buckets for bucket in parts):
        return program
    return program.with_places([_bucketed(schedule, parts) for schedule, parts in zip(program.places, buckets, strict=True)])


def _bucketed(schedule: Schedule, buckets: Iterable[Sequence[_Member]]) -> Schedule:
    groups: dict[int, Sequence[Instruction]] = {}
    for bucket in buckets:
        if len(bucket) == 1:
            continue
        first, last = bucket[0].launch, bucket[-1]
        sources = tuple(name for each in bucket for name in each.launch.sources)
        targets = tuple(name for each in bucket for name in each.launch.targets)
        for each in bucket:
            groups[each.begin] = groups[each.end] = ()
        groups[last.begin] = [replace(first, sources=sources, targets=targets)]
        groups[min(each.end for each in bucket)] = [Wait(first.name)]
    return schedule.regrouped([groups.get(position, (each,)) for position, each in enumerate(schedule.instructions)])


def _buckets(members: Iterable[_Member], limits: Mapping[str, int]) -> Iterator[list[_Member]]:
    """In the order in which they begin."""
    opened: dict[object, _Open] = {}
    closed: list[_Open] = []
    for member in members:
        bucket = opened.get(member.kind)
        if bucket is None or not bucket.takes(member, limits.get(",".join(member.launch.axes), 0)):
            bucket = opened[member.kind] = _Open()
            closed.append(bucket)
        bucket.members.append(member)
    yield from (each.members for each in closed)
