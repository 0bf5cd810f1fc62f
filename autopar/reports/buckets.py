"""Which collectives go together, and why so many.

over dp, up to 3.4 MB: 98 collectives in 12, 3 alone
    starts of 32 buckets take 1.76 ms, the last, which nothing hides, 2.46 ms; in 16 of 6.9 MB it would be 1.58 ms more
all_gather over dp, up to 210.0 kB: 48 collectives in 12
    copies of it take as long as a start, 45 µs
8 by node take 1.10 ms on the wire, 4.21 ms as one
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.driver.compiled import Compiled
from autopar.ir.instructions import Launch
from autopar.ir.schedule import Schedule
from autopar.ir.units import in_bytes
from autopar.plans.decisions import BucketSizes, NodeSizes

_GATHER = "all_gather"


def bucket_lines(compiled: Compiled) -> Iterator[str]:
    """How large buckets may be, why, and how many there are; nothing of axes over which none are joined."""
    decisions = [step.decision for step in compiled.schedule_steps if isinstance(step.decision, BucketSizes)]
    reasons = {key: reason for each in decisions for key, reason in each.reasons.items()}
    for key, size in (compiled.plan.buckets if compiled.plan is not None else {}).items():
        *kind, axes = key.split(" ")
        found: list[str] = []
        for place, schedule in enumerate(compiled.schedules):
            launches = [each for each in _launches(schedule, axes) if (each.collective == _GATHER) == (kind == [_GATHER])]
            joined = [each for each in launches if len(each.sources) > 1]
            if joined:
                where = f"stage {place}, " if len(compiled.schedules) > 1 else ""
                number, alone = sum(len(each.sources) for each in joined), len(launches) - len(joined)
                what = " ".join([*kind, "over", axes])
                rest = f", {alone} alone" if alone else ""
                found.append(f"{where}{what}, up to {in_bytes(size)}: {number} collectives in {len(joined)}{rest}")
        yield from found
        if reasons.get(key) and (found or not size):
            yield f"    {reasons[key]}" if found else f"{key}: {reasons[key]}"
    yield from (step.decision.reason for step in compiled.schedule_steps if isinstance(step.decision, NodeSizes) and step.decision.reason)


def _launches(schedule: Schedule, axes: str) -> list[Launch]:
    return [each for each in schedule.instructions if isinstance(each, Launch) and ",".join(each.axes) == axes]
