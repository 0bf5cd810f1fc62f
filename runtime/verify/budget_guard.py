"""The first run of a program under a memory budget is watched: one that takes more raises, and names the fragment."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager

import torch

from autopar.cost.rank_sizes import RankSizes, with_update
from autopar.errors import MemoryBudgetError
from autopar.ir.instructions import Run
from autopar.ir.schedule import Schedule
from autopar.ir.units import in_bytes
from autopar.runtime._torch import AllocatorLog
from autopar.runtime.execute.call import Call
from autopar.runtime.verify.tracked_memory import RankTrace, Tracker

# Numbers beside the values: the step, the scale of a loss, what an op keeps of its arguments.
_SCALARS_BYTES = 4096


def guard(call: Call, sizes: RankSizes, held: Callable[[], Iterable[torch.Tensor]], device: str, counts_state: bool) -> None:
    """Let `call`, which has not run yet, raise `MemoryBudgetError` on all ranks where one takes more than the budget of `sizes`.

    `held` is what is there besides its buffers: parameters, gradients of earlier calls, the state of the optimizer. What that will be is
    counted beforehand where it `counts_state`: on virtual ranks, whose state is one for all, and where the optimizer is the caller's. A
    user who looks with a profiler of torch's, of which there can be one, goes unwatched.
    """

    @contextmanager
    def watched() -> Generator[None]:
        if AllocatorLog.is_taken() or any(state.watch is not None for state in call.states.values()):
            yield
            return
        tracker = Tracker(call, held(), device)
        with tracker:
            yield
        found = [(rank, *_beyond(trace, call.schedules[rank], sizes, counts_state)) for rank, trace in tracker.traces().items()]
        everyone = found if call.world.is_virtual else [each for some in call.world.gather(found) for each in some]
        rank, size, where = max(everyone, key=lambda each: each[1])
        if size > sizes.budget.capacity_bytes + _SCALARS_BYTES:
            raise MemoryBudgetError(
                f"rank {rank} took {in_bytes(size)}, more than memory_budget={in_bytes(sizes.budget.capacity_bytes)}, during {where}. "
                f"More was taken there than was predicted (parallel.memory()): leave a margin, memory_budget of "
                f"{in_bytes(2 * sizes.budget.capacity_bytes - size)}, so that the plan leaves it free, or allow {in_bytes(size)}"
            )

    call.around = watched


def _beyond(trace: RankTrace, schedule: Schedule, sizes: RankSizes, counts_state: bool) -> tuple[float, str]:
    """The most that a rank took, and where."""
    state = sizes.of(with_update(schedule)).held_bytes if counts_state else 0.0
    instruction = schedule.instructions[trace.peak_position]
    where = str(instruction).split(" (")[0]
    fragment = sizes.fragment(schedule, instruction) if isinstance(instruction, Run) else None
    return trace.peak_bytes + state, where if fragment is None else f"{where} (most at {fragment.at.op}, {fragment.at.source})"
