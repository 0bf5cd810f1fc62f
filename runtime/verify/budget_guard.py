"""The first run of a program under a memory budget is watched: one that takes more raises, and names the fragment."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import cache
from typing import Literal

import torch

from autopar.cost.rank_sizes import RankSizes, with_update
from autopar.errors import MemoryBudgetError
from autopar.ir.instructions import Instruction, Run, Update
from autopar.ir.schedule import Schedule
from autopar.ir.units import in_bytes
from autopar.runtime._torch import AllocatorLog
from autopar.runtime.execute.call import Call
from autopar.runtime.verify.tracked_memory import RankTrace, Tracker

# Numbers beside the values: the step, the scale of a loss, what an op keeps of its arguments.
_SCALARS_BYTES = 4096


# Where the optimizer's state is: among what is held; made by the UPDATEs of the call; or neither, and so counted beforehand.
State = Literal["held", "made", "to come"]


def guard(call: Call, sizes: RankSizes, held: Callable[[], Iterable[torch.Tensor]], device: str, state: Callable[[], State]) -> None:
    """Let `call`, which has not run yet, raise `MemoryBudgetError` on all ranks where one takes more than the budget of `sizes`.

    `held` is what is there besides its buffers: parameters, gradients of earlier calls, the optimizer's `state` where that is held. On
    virtual ranks it is one for all, and where the optimizer is the caller's nobody sees it: that is "to come". Both are asked when the
    call begins to run: the optimizer may be made until then, and some make their state at once. A user who looks with a profiler of
    torch's, of which there can be one, goes unwatched.
    """
    at_first = cache(state)  # the second half makes state, which is none that was there

    @contextmanager
    def watched() -> Generator[None]:
        if AllocatorLog.is_taken() or any(state.watch is not None for state in call.states.values()):
            yield
            return
        begin = at_first()
        tracker = Tracker(call, held(), device)
        with tracker:
            yield
        found = [(rank, *_most(trace, call.schedules[rank], sizes, begin)) for rank, trace in tracker.traces().items()]
        everyone = found if call.world.is_virtual else [each for some in call.world.gather(found) for each in some]
        rank, size, where = max(everyone, key=lambda each: each[1])
        if size > sizes.budget.capacity_bytes + _SCALARS_BYTES:
            raise MemoryBudgetError(
                f"rank {rank} took {in_bytes(size)}, more than memory_budget={in_bytes(sizes.budget.capacity_bytes)}, during {where}. "
                f"More was taken there than was predicted (parallel.memory()): leave a margin, memory_budget of "
                f"{in_bytes(2 * sizes.budget.capacity_bytes - size)}, so that the plan leaves it free, or allow {in_bytes(size)}"
            )

    call.around = watched


def _most(trace: RankTrace, schedule: Schedule, sizes: RankSizes, state: State) -> tuple[float, str]:
    """The most that a rank took, with the state that was not there yet and what the caller passes, and where."""
    whole = sizes.of(with_update(schedule))
    missing = (sizes.given_bytes if sizes.on_processes else 0.0) + (0.0 if state == "held" else whole.held_bytes)
    most, at, known = 0.0, 0, set[str]()
    for number, instruction in enumerate(schedule.instructions):
        if isinstance(instruction, Update) and state == "made":
            missing -= sizes.state_bytes(schedule, {*instruction.parameters} - known)
            known |= {*instruction.parameters}
        size = trace.during_bytes.get(number, 0) + missing
        if size > most:
            most, at = size, number
    return most, _named(schedule, schedule.instructions[at], sizes)


def _named(schedule: Schedule, instruction: Instruction, sizes: RankSizes) -> str:
    where = str(instruction).split(" (")[0]
    fragment = sizes.fragment(schedule, instruction) if isinstance(instruction, Run) else None
    return where if fragment is None else f"{where} (most at {fragment.at.op}, {fragment.at.source})"
