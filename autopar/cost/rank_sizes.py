"""What schedules do not say of memory: what fragments and updates take within themselves, and what an optimizer holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from torch.fx import GraphModule

from autopar.cost.fragment_memory import FragmentMemory, fragment_memory
from autopar.cost.memory import MemoryBudget
from autopar.cost.rank_memory import Sizes
from autopar.cost.update_memory import gathered_update_bytes, update_bytes
from autopar.ir.instructions import Memory, Run, Update
from autopar.ir.schedule import Schedule


@dataclass(frozen=True)
class RankSizes:
    """What schedules do not say of memory: fragments by their graphs, in the form in which they run, updates by their optimizer.

    A parameter that an update gathers has its parts on `stage_ranks` ranks. On processes the caller's own tensors, of which a call has
    copies, take `given_bytes`, and the model's own buffers, of which it has copies, too, `buffer_bytes`.
    """

    budget: MemoryBudget
    form: Callable[[GraphModule], GraphModule] = lambda module: module
    device: str = "cpu"
    on_processes: bool = True
    stage_ranks: int = 1
    given_bytes: float = 0.0
    buffer_bytes: float = 0.0

    def of(self, schedule: Schedule) -> Sizes:
        optimizer, is_updated = self.budget.optimizer, any(isinstance(each, Update) for each in schedule.instructions)
        gathered = self._gathered(schedule)
        state = self.state_bytes(schedule, schedule.inputs) if is_updated else 0.0

        def working_bytes(instruction: Run | Update) -> float:
            if isinstance(instruction, Update):
                parts = [schedule.bytes_of(name) for name in instruction.parameters if name not in gathered]
                wholes = ((gathered[name], schedule.bytes_of(name)) for name in instruction.parameters if name in gathered)
                alone = [
                    gathered_update_bytes(optimizer, whole, self.stage_ranks * part, self.device, self.budget.over_gloo)
                    for whole, part in wholes
                ]
                return max(update_bytes(optimizer, parts, self.device), *alone, 0.0)
            found = self.fragment(schedule, instruction)
            return found.temporary_bytes if found is not None else 0.0

        named = zip(schedule.signature.inputs, schedule.inputs, strict=True)
        away = sum(optimizer.away_bytes(item, schedule.bytes_of(name)) for item, name in named) if is_updated else 0.0
        parked: dict[Memory, float] = {} if optimizer.away is None else {optimizer.away: away}
        given = self.given_bytes + self.buffer_bytes if self.on_processes else 0.0
        arrival = "launch" if self.on_processes else "wait"
        taken = self._taken_bytes(schedule) if self.on_processes else 0.0
        return Sizes(schedule.bytes_of, working_bytes, state, given, taken, arrival, self.budget.over_gloo, parked)

    def state_bytes(self, schedule: Schedule, names: Collection[str]) -> float:
        """What the optimizer holds on the device of those of the schedule's inputs that are among `names`."""
        gathered, named = self._gathered(schedule), zip(schedule.signature.inputs, schedule.inputs, strict=True)
        sizes = ((item, gathered.get(name, schedule.bytes_of(name))) for item, name in named if name in names)
        return float(sum(self.budget.optimizer.state_bytes(item, size) for item, size in sizes))

    def _gathered(self, schedule: Schedule) -> dict[str, float]:
        """The bytes, whole, of the parameters that updates gather, by buffer."""
        named = zip(schedule.signature.inputs, schedule.inputs, strict=True)
        chosen = ((name, item) for item, name in named if self.on_processes and self.budget.optimizer.is_gathered(item))
        return {name: float(math.prod(item.shape) * item.dtype.itemsize) for name, item in chosen}

    def _taken_bytes(self, schedule: Schedule) -> float:
        taken = (buffers for (kind, _), buffers in schedule.left.items() if kind in ("loss", "output"))
        return float(sum(schedule.bytes_of(name) for buffers in taken for name in buffers))

    def fragment(self, schedule: Schedule, instruction: Run) -> FragmentMemory | None:
        known = schedule.fragments.get(instruction.fragment)
        return None if known is None else fragment_memory(known.module, self.form)


def with_update(schedule: Schedule) -> Schedule:
    """A plain step with the update that the caller's optimizer makes behind it, of all parameters together."""
    fed = {name: buffers for (kind, name), buffers in schedule.fed.items() if kind == "parameter"}
    pairs = [(fed[name][0], buffers[0]) for (kind, name), buffers in schedule.left.items() if kind == "gradient" and name in fed]
    if not pairs or any(isinstance(each, Update) for each in schedule.instructions):
        return schedule
    return schedule.appended([Update(tuple(one for one, _ in pairs), tuple(other for _, other in pairs))])
