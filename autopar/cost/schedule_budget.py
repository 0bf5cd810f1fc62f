"""Whether what a pass makes of schedules still fits into the memory budget."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property

from autopar.cost.memory import MemoryBudget
from autopar.cost.schedule_memory import peak_bytes_on_processes
from autopar.ir.schedule import Schedule


class ScheduleBudget:
    """What the ranks at each place along `pp` may hold in buffers: the budget less the optimizer's state, or what `schedules`, which have
    no FREEs yet, hold anyway: the search counts what an op needs while it runs, and this does not."""

    def __init__(self, schedules: Sequence[Schedule], budget: MemoryBudget) -> None:
        self._schedules, self._budget = schedules, budget

    def allows(self, schedules: Iterable[Schedule]) -> bool:
        """Whether `schedules`, which have no FREEs yet, fit in. Nothing is walked through where there is no limit."""
        if self._budget.capacity_bytes == math.inf:
            return True
        return all(self._peak_bytes(each) <= limit for each, limit in zip(schedules, self._limits, strict=True))

    @cached_property
    def _limits(self) -> tuple[float, ...]:
        free = (self._budget.capacity_bytes - self._state_bytes(each) for each in self._schedules)
        return tuple(max(limit, self._peak_bytes(each)) for limit, each in zip(free, self._schedules, strict=True))

    def _peak_bytes(self, schedule: Schedule) -> int:
        return peak_bytes_on_processes(schedule, self._budget.over_gloo)

    def _state_bytes(self, schedule: Schedule) -> float:
        named = zip(schedule.signature.inputs, schedule.inputs, strict=True)
        return sum(self._budget.optimizer.state_bytes(item, schedule.bytes_of(name)) for item, name in named if item.kind == "parameter")
