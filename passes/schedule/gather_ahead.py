"""Parts of parameters are gathered ahead of their readers, several at once, as far as memory allows.

RUN f0 (w, …)                                          LAUNCH all_gather copy dp (w, v) -> (w_1, v_1)
LAUNCH all_gather copy dp (w) -> w_1                   WAIT w_1
WAIT w_1                                               LAUNCH all_gather copy dp (u) -> u_1      the next bucket
RUN f1 (w_1, …)                                   →    RUN f1 (w_1, …)
LAUNCH all_gather copy dp (v) -> v_1                   RUN f2 (v_1, …)
WAIT v_1                                               WAIT u_1
RUN f2 (v_1, …)                                        RUN f3 (u_1, …)
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.cost.hardware.cluster import Cluster
from autopar.cost.memory import MemoryBudget
from autopar.cost.model import CostModel
from autopar.cost.schedule_budget import ScheduleBudget
from autopar.ir.instructions import Instruction, Launch, Pause, Run, Wait
from autopar.ir.lifetimes import touched
from autopar.ir.schedule import Schedule
from autopar.ir.units import in_bytes
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.plans.decisions import USUAL_BUCKET_BYTES, BucketSizes

# What is gathered in a bucket is copied out of it: read once, written once, and its parts into it.
COPIES = 3
KIND = "all_gather "


@dataclass(frozen=True)
class GatherAhead:
    """Join gathers of what lies on a rank from the start, parameters, to buckets, and start each when the one before it has arrived.

    A bucket is as large as the copies into and out of it take no longer than the starts that it saves. Of two buckets at a time, whose
    memory the budget may not have: then they are halved until they fit, or all is left as it is.

    Reads: a `ScheduleProgram` with its results in their places. Writes: LAUNCHes, of several buffers, earlier, with what computes their
    operands; their WAITs. Ensures: what is gathered is there before its first reader, within the budget.
    """

    cluster: Cluster
    planned: Mapping[str, int] | None = None
    budget: MemoryBudget = field(default_factory=MemoryBudget)
    name: str = "gather ahead"

    def decide(self, program: ScheduleProgram) -> BucketSizes:
        """By axes ("all_gather dp") how many bytes may be gathered at once; with 0 nothing is moved."""
        found: dict[str, int] = {}
        reasons: dict[str, str] = {}
        cost, planned = CostModel(self.cluster, program.mesh), self.planned or {}
        for axes in dict.fromkeys(each.launch.axes for schedule in program.places for each in _gathers(schedule)):
            key = KIND + ",".join(axes)
            if key in planned:
                found[key], reasons[key] = planned[key], "as planned"
                continue
            wanted = _wanted_bytes(cost, axes)
            found[key] = self._fitting(program, found, key, wanted)
            start = cost.collective("all_gather", axes, 0, 0).seconds
            reasons[key] = f"copies of it take as long as a start, {1e6 * start:.0f} µs" if start else "starts cost nothing here"
            if found[key] < wanted:
                less = "nothing is gathered ahead" if not found[key] else "less is gathered at once"
                reasons[key] = f"{in_bytes(wanted)} do not fit into the budget: {less}"
        return BucketSizes(found, reasons)

    def apply(self, program: ScheduleProgram, decision: BucketSizes) -> ScheduleProgram:
        places = [_gathered_ahead(schedule, decision.bytes) for schedule in program.places]
        if all(new is old for new, old in zip(places, program.places, strict=True)):
            return program
        return program.with_places(places)

    def written(self, program: ScheduleProgram, decision: BucketSizes) -> dict[str, int]:
        return dict(decision.bytes)

    def read(self, program: ScheduleProgram, value: Mapping[str, int]) -> BucketSizes:
        return BucketSizes(dict(value))

    def _fitting(self, program: ScheduleProgram, found: Mapping[str, int], key: str, size: int) -> int:
        """The most bytes up to `size` with which every rank stays within the budget; 0 where there are none."""
        smallest = min(each.num_bytes for schedule in program.places for each in _gathers(schedule))
        before = [_gathered_ahead(schedule, found) for schedule in program.places]
        budget = ScheduleBudget(before, self.budget)
        while size >= smallest:
            if budget.allows(_gathered_ahead(each, {key: size}) for each in before):
                return size
            size //= 2
        return 0


def _wanted_bytes(cost: CostModel, axes: tuple[str, ...]) -> int:
    start, copies = cost.collective("all_gather", axes, 0, 0).seconds, COPIES * cost.memory_seconds(1)
    return math.ceil(start / copies) if start and copies else USUAL_BUCKET_BYTES


@dataclass(frozen=True)
class _Gather:
    """A collective that may start earlier: where what computes its operand stands, if anything does, and where it begins and ends."""

    launch: Launch
    run: int | None
    begin: int
    end: int
    num_bytes: int
    # Another dtype, or the other side of a PAUSE or of an action: another bucket.
    kind: tuple[object, ...]


def _gathers(schedule: Schedule) -> Iterator[_Gather]:
    """In the order in which they are waited for."""
    instructions = schedule.instructions
    given, makers, readers, waits = set(schedule.inputs), dict[str, int](), dict[str, int](), dict[str, int]()
    for position, each in enumerate(instructions):
        for name in touched(each):
            readers[name] = readers.get(name, 0) + 1
        if isinstance(each, Run):
            makers |= dict.fromkeys(each.outputs, position)
        elif isinstance(each, Wait):
            waits.setdefault(each.target, position)
    edges = sorted({n for n, each in enumerate(instructions) if isinstance(each, Pause)} | {each.begin for each in schedule.spans})
    found: list[_Gather] = []
    for position, each in enumerate(instructions):
        if not isinstance(each, Launch) or (each.collective, len(each.sources)) != ("all_gather", 1) or each.name not in waits:
            continue
        source, end, part = each.sources[0], waits[each.name], bisect_right(edges, position)
        tensor_type = schedule.type_of(source)
        run = makers.get(source)
        first = position if run is None else run
        # A fragment that computes this operand from what is given, and nothing else, goes where its collective goes.
        maker = instructions[first]
        is_own = isinstance(maker, Run) and maker.outputs == (source,) and readers[source] == 2 and given.issuperset(maker.inputs)
        is_within = bisect_right(edges, first) == part == bisect_right(edges, end)
        if tensor_type is not None and is_within and (source in given or is_own):
            size = schedule.bytes_of(each.name)
            found.append(_Gather(each, run if is_own else None, position, end, size, (each.axes, tensor_type[1], part)))
    return iter(sorted(found, key=lambda each: each.end))


def _gathered_ahead(schedule: Schedule, limits: Mapping[str, int]) -> Schedule:
    groups: dict[int, list[Instruction]] = {}
    ahead: dict[int, list[Instruction]] = {}
    last: dict[object, int] = {}
    for bucket in _buckets(_gathers(schedule), limits):
        first = bucket[0]
        launch = replace(
            first.launch,
            sources=tuple(each.launch.sources[0] for each in bucket),
            targets=tuple(each.launch.targets[0] for each in bucket),
        )
        runs = [schedule.instructions[each.run] for each in bucket if each.run is not None]
        for each in bucket:
            groups |= {position: [] for position in (each.run, each.begin, each.end) if position is not None}
        groups[first.end] = [Wait(launch.name)]
        # What is launched earlier already stays there.
        earliest = min(each.begin for each in bucket)
        ahead.setdefault(min(earliest, last.get(first.kind, earliest)), []).extend([*runs, launch])
        last[first.kind] = first.end
    if not groups:
        return schedule
    written: list[Sequence[Instruction]] = []
    for position, each in enumerate(schedule.instructions):
        kept, moved = groups.get(position, [each]), ahead.get(position, [])
        written.append([*kept, *moved] if kept else moved)
    return schedule.regrouped(written)


def _buckets(gathers: Iterable[_Gather], limits: Mapping[str, int]) -> Iterator[list[_Gather]]:
    """Neighbours of one kind up to the limit of their axes; one alone may be larger. Of axes without a limit none."""
    opened: dict[object, list[_Gather]] = {}
    for each in gathers:
        limit = limits.get(KIND + ",".join(each.launch.axes), 0)
        if not limit:
            continue
        bucket = opened.setdefault(each.kind, [])
        if bucket and sum(other.num_bytes for other in bucket) + each.num_bytes > limit:
            yield bucket
            bucket = opened[each.kind] = []
        bucket.append(each)
    yield from (bucket for bucket in opened.values() if bucket)
