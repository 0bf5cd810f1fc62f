"""One case of the GPU benchmark: where it runs, what it gives back, and how long a call takes there."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Row = dict[str, Any]
WARM_UP_CALLS, CALLS, FEW_CALLS = 5, 25, 3
# What is written between calls: four times an H200's level-2 cache, and long enough for the host to launch what comes next.
COLD_BYTES = 1 << 28
BACKWARD = "backward"
AGAIN = ", again"


@dataclass(frozen=True)
class Place:
    """A device, "cuda" or "cpu"; `tiny` shapes show that the cases run and nothing else."""

    device: str
    tiny: bool = False

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def draw(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, device=self.device).to(dtype)

    def finish(self) -> None:
        """Wait for the device. Raises what it has failed with, now or before."""
        if self.on_gpu:
            torch.cuda.synchronize()


@dataclass(frozen=True)
class Case:
    """`run(only_compile)` gives rows. With `only_compile`, which runs beside other cases, nothing is timed and there are no rows."""

    part: str
    name: str
    run: Callable[[bool], list[Row]]


@dataclass(frozen=True)
class Work:
    """What a call has to do at least: floating-point operations or bytes, of the forward and of the backward."""

    unit: str
    forward: float
    backward: float

    def rate(self, direction: str, seconds: float) -> float:
        """TFLOP/s or GB/s."""
        amount = self.backward if direction == BACKWARD else self.forward
        return amount / seconds / (1e12 if self.unit == "TFLOP/s" else 1e9)


def seconds_of(place: Place, call: Callable[[Any], Any], prepare: Callable[[], Any] = lambda: None) -> float:
    """The median of `call(prepare())`, of which `prepare` is not timed; on a GPU by its own clock, the level-2 cache cold.

    Not by Triton's do_bench, which prepares nothing: what torch.compile made goes backward once only for each forward.
    """
    if not place.on_gpu:
        return statistics.median(_host_seconds(call, prepare()) for _ in range(FEW_CALLS))
    cold = torch.empty(COLD_BYTES, dtype=torch.uint8, device=place.device)
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    for _ in range(WARM_UP_CALLS + CALLS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        prepared = prepare()
        cold.zero_()
        begin.record()
        call(prepared)
        end.record()
        events.append((begin, end))
    place.finish()
    return statistics.median(begin.elapsed_time(end) / 1e3 for begin, end in events[WARM_UP_CALLS:])


def _host_seconds(call: Callable[[Any], Any], prepared: Any) -> float:
    start = time.perf_counter()
    call(prepared)
    return time.perf_counter() - start


# What a contestant is called with, by its name; None where the place has none.
Contestants = Mapping[str, Callable[..., Tensor] | None]


def race(place: Place, case: Row, contestants: Contestants, operands: tuple[Tensor, ...], work: Work, only_compile: bool) -> list[Row]:
    """Two rows a contestant, forward and backward, and two more of the first that is not ours, timed again: what differs is noise.

    Gradients are those of the operands that require them.
    """
    rows: list[Row] = []
    there = [name for name, function in contestants.items() if function is not None]
    again = there[1:2]
    for name, function in contestants.items():
        if function is None:
            rows += [case | {"who": name, "direction": "both", "absent": "needs a GPU"}]
            continue
        rows += _timed(place, case | {"who": name}, function, operands, work, only_compile)
    for name in again:
        function = contestants[name]
        assert function is not None
        rows += [] if only_compile else _timed(place, case | {"who": f"{name}{AGAIN}"}, function, operands, work, False)
    return [] if only_compile else rows


def _timed(
    place: Place, case: Row, function: Callable[..., Tensor], operands: tuple[Tensor, ...], work: Work, only_compile: bool
) -> list[Row]:
    """One contestant, whose failure is a row."""
    rows: list[Row] = []
    wanted = [operand for operand in operands if operand.requires_grad]
    try:
        arriving = torch.randn_like(function(*operands))
        calls: dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]] = {
            "forward": (lambda _: function(*operands), lambda: None),
            BACKWARD: (lambda out: torch.autograd.grad(out, wanted, arriving), lambda: function(*operands)),
        }
        for direction, (call, prepare) in calls.items():
            call(prepare())
            place.finish()
            if only_compile:
                continue
            seconds = seconds_of(place, call, prepare)
            rows.append(case | {"direction": direction, "ms": seconds * 1e3, work.unit: work.rate(direction, seconds)})
    except Exception as error:  # one contestant that fails must not hide the others
        place.finish()  # what a kernel has left broken is the case's failure
        rows.append(case | {"direction": "both", "error": first_line(error)})
    return rows


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:300]}"
