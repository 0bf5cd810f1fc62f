"""When the ranks of a pipeline are through: as `autopar.pipeline.simulate`, without events and bytes, for schedules of 60,000 actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.errors import ScheduleError
from autopar.ir.actions import Action, PipelineSchedule


@dataclass(frozen=True)
class Times:
    """Per rank, seconds of work, and from the start of its first action to the end of its last one."""

    busy_seconds: tuple[float, ...]
    span_seconds: tuple[float, ...]
    step_seconds: float


def times(schedule: PipelineSchedule, seconds: Sequence[dict[str, float]], send_seconds: Sequence[float]) -> Times:
    """`seconds` by stage and kind of action; `send_seconds` from each stage to the next, either way.

    An action starts once its rank is free and what it waits for has arrived: sends block nobody, and do not wait for each other.
    Raises `ScheduleError` for an order in which ranks wait for each other for ever.
    """
    places, last = schedule.stages, len(schedule.stages) - 1
    ended: dict[tuple[int, str, int], float] = {}
    at, free = [0] * len(schedule.orders), [0.0] * len(schedule.orders)
    begun: list[float | None] = [None] * len(schedule.orders)
    busy = [0.0] * len(schedule.orders)
    waiting: dict[tuple[int, str, int], list[int]] = {}
    ready = list(range(len(schedule.orders)))

    def arrival(action: Action) -> tuple[tuple[int, str, int] | None, float]:
        """What another stage must have done, and how long it takes to come here."""
        stage, kind, microbatch = action
        if kind == "F" and stage > 0:
            key, edge = (stage - 1, "F", microbatch), stage - 1
        elif kind in "BI" and stage < last:
            key, edge = (stage + 1, "B", microbatch), stage
        elif kind in "BI":
            return (stage, "F", microbatch), 0.0
        else:
            return None, 0.0
        return key, send_seconds[edge] if places[edge] != places[edge + 1] else 0.0

    while ready:
        rank = ready.pop()
        order = schedule.orders[rank]
        while at[rank] < len(order):
            action = order[at[rank]]
            key, delay = arrival(action)
            if key is not None and key not in ended:
                waiting.setdefault(key, []).append(rank)
                break
            start = max(free[rank], ended[key] + delay if key is not None else 0.0)
            spent = seconds[action.stage][action.kind]
            if begun[rank] is None:
                begun[rank] = start
            free[rank], busy[rank] = start + spent, busy[rank] + spent
            done = (action.stage, "B" if action.kind == "I" else action.kind, action.microbatch)
            ended[done] = free[rank]
            at[rank] += 1
            ready += waiting.pop(done, ())
    if any(at[rank] < len(order) for rank, order in enumerate(schedule.orders)):
        raise ScheduleError("the pipeline never ends, nobody can advance; check_pipeline says why")
    spans = tuple(end - (start or 0.0) for end, start in zip(free, begun, strict=True))
    return Times(tuple(busy), spans, max(free))
