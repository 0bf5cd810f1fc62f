"""What the runtime itself takes of a step, without what fragments compute: Python, and torch's own part of handing over gradients."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from autopar.runtime.execute.fragments import CompiledFragments
from autopar.runtime.module.parallel_module import ParallelModule

# One in so many parameters is in the smaller of two optimizers that are compared.
_FEW = 4


class RecordedFragments(CompiledFragments):
    """Gives back, run by run, what the fragments gave in one step."""

    def __init__(self, fragments: CompiledFragments) -> None:
        self._real = fragments
        self._results: list[tuple[torch.Tensor, ...]] = []
        self._left: deque[tuple[torch.Tensor, ...]] | None = None

    def run(self, name: str, inputs: Sequence[torch.Tensor], into: Mapping[int, torch.Tensor] | None = None) -> tuple[torch.Tensor, ...]:
        if self._left is not None:
            return self._left.popleft()
        self._results.append(self._real.run(name, inputs))
        return self._results[-1]

    def placeable(self, name: str) -> Sequence[int]:
        return ()

    def rewind(self) -> None:
        """Begin again, with tensors that nobody else holds: what autograd cannot take over as a gradient it copies."""
        self._left = deque(tuple(each.detach() for each in results) for results in self._results)


class Timer:
    """CPU seconds that this thread spends in a function, call by call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self.seconds = function, 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = time.thread_time()
        try:
            return self._function(*args, **kwargs)
        finally:
            self.seconds += time.thread_time() - start

    def taken(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


@dataclass(frozen=True)
class RuntimeSeconds:
    """Of one step: all of it, and of that its instructions and the guard of the model."""

    step: float
    instructions: float
    guard: float
    num_instructions: int
    num_parameters: int

    @property
    def instruction_seconds(self) -> float:
        """One instruction."""
        return self.instructions / self.num_instructions

    @property
    def parameter_seconds(self) -> float:
        """What there is beside instructions, of one parameter."""
        return (self.step - self.instructions) / self.num_parameters


def runtime_seconds(
    parallel: ParallelModule, batch: dict[str, Any], repeats: int, choose: Callable[[Sequence[float]], float] = median
) -> RuntimeSeconds:
    """Forward and backward of `parallel` with fragments that compute nothing: CPU time of this thread, `choose` of all steps. Collective.

    Afterwards the module computes as before."""
    parameters = list(parallel.parameters())
    _, captured = parallel.captured((), batch)
    real = captured.fragments
    recorded = captured.fragments = RecordedFragments(real)

    def step() -> None:
        parallel(**batch).backward()
        for parameter in parameters:
            parameter.grad = None

    step()
    world, guard = parallel._world, parallel._guard
    whole, instructions, guarding = Timer(step), Timer(world.run), Timer(guard.state)
    world.run, guard.state = instructions, guarding
    found: list[tuple[float, ...]] = []
    for _ in range(repeats):
        recorded.rewind()
        whole()
        found.append((whole.taken(), instructions.taken(), guarding.taken()))
    del world.run, guard.state
    captured.fragments = real
    total, executing, in_guard = map(choose, zip(*found, strict=True))
    return RuntimeSeconds(total, executing, in_guard, len(parallel.compiled.schedule_of(0).instructions), len(parameters))


def update_seconds(parallel: nn.Module, repeats: int) -> float:
    """What a fused AdamW takes for one more of the parameters of `parallel`, which are small; they are changed."""
    parameters = list(parallel.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    few = parameters[: len(parameters) // _FEW]
    timers = [Timer(torch.optim.AdamW(each, fused=True).step) for each in (few, parameters)]
    found: list[tuple[float, ...]] = []
    for _ in range(repeats):
        for timer in timers:
            timer()
        found.append(tuple(timer.taken() for timer in timers))
    less, more = map(median, zip(*found, strict=True))
    return max(more - less, 0.0) / (len(parameters) - len(few))
