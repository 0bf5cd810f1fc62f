"""Joins small collectives to buckets, so that their latency is paid once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.cost.hardware.cluster import Cluster
from autopar.cost.model import CostModel
from autopar.ir.instructions import Instruction, Launch, Run, Wait
from autopar.ir.schedule import Schedule
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.plans.decisions import BucketSizes

# A bucket is so large that what its collective costs whatever its size is this share of the time that its bytes take.
LATENCY_SHARE = 0.02
# Where links cost nothing, and so do buckets: what DistributedDataParallel fills.
USUAL_BYTES = 25 * 2**20
# However slow the start of a collective is, so many buckets: the first is to be on its way while the backward goes on. None is cut so
# small for this that its start takes longer than its bytes.
MIN_BUCKETS = 8


@dataclass(frozen=True)
class BucketCollectives:
    """Join all-reduces of one group and dtype, in the order in which their operands become ready, to buckets.

    Each is delayed until the last operand of its bucket is there, by at most half of the fragments that it could hide behind: buckets
    get smaller towards the end of the backward, and one that is waited for at once joins only what is launched beside it. Source of the
    idea: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020, section 3.2.

    Reads: a `ScheduleProgram` with its results in their places. Writes: LAUNCHes of several buffers, their one WAIT.
    """

    cluster: Cluster
    planned: Mapping[str, int] | None = None
    name: str = "bucket collectives"

    def decide(self, program: ScheduleProgram) -> BucketSizes:
        """By the axes of collectives how many bytes a bucket may have; those of a plan where it knows."""
        totals: dict[tuple[str, ...], int] = {}
        for schedule in program.places:
            here: dict[tuple[str, ...], int] = {}
            for each in _launches(schedule):
                here[each.launch.axes] = here.get(each.launch.axes, 0) + each.num_bytes
            totals |= {axes: max(total, totals.get(axes, 0)) for axes, total in here.items()}
        cost, planned = CostModel(self.cluster, program.mesh), self.planned or {}
        found = {",".join(axes): planned.get(",".join(axes)) or _bucket_bytes(cost, axes, total) for axes, total in totals.items()}
        return BucketSizes(found)

    def apply(self, program: ScheduleProgram, decision: BucketSizes) -> ScheduleProgram:
        places = [_bucketed(schedule, decision.bytes) for schedule in program.places]
        if all(new is old for new, old in zip(places, program.places, strict=True)):
            return program
        return program.with_places(places)

    def written(self, program: ScheduleProgram, decision: BucketSizes) -> dict[str, int]:
        return dict(decision.bytes)

    def read(self, program: ScheduleProgram, value: Mapping[str, int]) -> BucketSizes:
        return BucketSizes(dict(value))


def _bucket_bytes(cost: CostModel, axes: tuple[str, ...], total: int) -> int:
    empty = cost.collective("all_reduce", axes, 0, 0).seconds
    large = cost.collective("all_reduce", axes, USUAL_BYTES, USUAL_BYTES).seconds
    seconds_per_byte = (large - empty) / USUAL_BYTES
    enough = empty / (LATENCY_SHARE * seconds_per_byte) if seconds_per_byte > 0 and empty > 0 else USUAL_BYTES
    return math.ceil(min(enough, max(total / MIN_BUCKETS, LATENCY_SHARE * enough)))


@dataclass(frozen=True)
class _Member:
    """A collective that may join a bucket: where it is launched and waited for, and how many fragments run before each."""

    launch: Launch
    num_bytes: int
    dtype: object
    begin: int
    end: int
    runs_before: int
    runs_until: int

    @property
    def latest(self) -> int:
        """How many fragments may have run when it is launched."""
        return self.runs_before + (self.runs_until - self.runs_before) // 2


def _launches(schedule: Schedule) -> Iterator[_Member]:
    """The all-reduces that could join a bucket, in their order."""
    waits, runs = dict[str, tuple[int, int]](), 0
    for position, each in enumerate(schedule.instructions):
        runs += isinstance(each, Run)
        if isinstance(each, Wait):
            waits.setdefault(each.target, (position, runs))
    runs = 0
    for position, each in enumerate(schedule.instructions):
        runs += isinstance(each, Run)
        if isinstance(each, Launch) and (each.collective, each.kind, len(each.sources)) == ("all_reduce", "sum", 1):
            tensor_type = schedule.type_of(each.sources[0])
            if tensor_type is not None and tensor_type[1].is_floating_point and each.name in waits:
                end, runs_until = waits[each.name]
                yield _Member(each, math.prod(tensor_type[0]) * tensor_type[1].itemsize, tensor_type[1], position, end, runs, runs_until)


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


def _bucketed(schedule: Schedule, limits: Mapping[str, int]) -> Schedule:
    groups: dict[int, Sequence[Instruction]] = {}
    for bucket in _buckets(_launches(schedule), limits):
        first, last = bucket[0].launch, bucket[-1]
        sources = tuple(name for each in bucket for name in each.launch.sources)
        targets = tuple(name for each in bucket for name in each.launch.targets)
        for each in bucket:
            groups[each.begin] = groups[each.end] = ()
        groups[last.begin] = [replace(first, sources=sources, targets=targets)]
        groups[min(each.end for each in bucket)] = [Wait(first.name)]
    if not groups:
        return schedule
    return schedule.regrouped([groups.get(position, (each,)) for position, each in enumerate(schedule.instructions)])


def _buckets(members: Iterable[_Member], limits: Mapping[str, int]) -> Iterator[list[_Member]]:
    """Those of two members and more."""
    opened: dict[object, _Open] = {}
    closed: list[_Open] = []
    for member in members:
        kind = member.launch.axes, member.dtype
        bucket = opened.get(kind)
        if bucket is None or not bucket.takes(member, limits.get(",".join(member.launch.axes), 0)):
            bucket = opened[kind] = _Open()
            closed.append(bucket)
        bucket.members.append(member)
    yield from (each.members for each in closed if len(each.members) > 1)
