"""What other pins would change: a step's seconds, memory, communication and the plan, without another capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from autopar.driver.compiled import Compiled
from autopar.errors import AutoparError, PlanError, ScheduleError, UnmatchedPinError
from autopar.ir.program import Program
from autopar.ir.units import in_bytes, in_seconds
from autopar.pipeline.report import StepOnPaper
from autopar.plans.diff import PlanDiff
from autopar.plans.plan import Plan
from autopar.plans.styles import UserPins
from autopar.reports.communication import sent
from autopar.reports.summary import cost_of, memory, places_of, seconds


@dataclass(frozen=True)
class Prices:
    """What a plan costs: seconds of a step (the optimizer's update included), its parts, bytes that a rank holds and sends.

    The parts are of the slowest rank, nothing overlapped; the seconds are of the step, with its waits.

    parts          compute, memory traffic and communication by axis, in seconds; nothing overlapped
    memory         bytes of parameters, gradients, buffers, saved activations
    communication  bytes sent in a step, by axes and collective ("tp all_gather")
    """

    seconds: float
    parts: Mapping[str, float]
    memory: Mapping[str, float]
    communication: Mapping[str, float]


@dataclass(frozen=True)
class WhatIf:
    """`prices` with the other pins, against those `now`; where they cannot be kept `refusal` says why, and there is no plan."""

    now: Prices
    prices: Prices | None = None
    plan: Plan | None = None
    refusal: str = ""
    diff: PlanDiff = field(default_factory=lambda: PlanDiff((), ()))

    @property
    def is_kept(self) -> bool:
        return self.prices is not None

    @property
    def seconds(self) -> float:
        """Of a step with the other pins; infinite when they are refused."""
        return self.prices.seconds if self.prices is not None else float("inf")

    @property
    def seconds_now(self) -> float:
        return self.now.seconds

    @property
    def memory(self) -> Mapping[str, float]:
        return self.prices.memory if self.prices is not None else {}

    @property
    def memory_now(self) -> Mapping[str, float]:
        return self.now.memory

    @property
    def communication(self) -> Mapping[str, float]:
        return self.prices.communication if self.prices is not None else {}

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        if self.prices is None:
            yield f"refused: {self.refusal}"
            return
        added = self.seconds - self.seconds_now
        share = f", {100 * added / self.seconds_now:+.1f} %" if self.seconds_now > 0 else ""
        yield (
            f"a step takes {in_seconds(self.seconds)}, now {in_seconds(self.seconds_now)} ({in_seconds(added, sign=True)}{share}), before "
            "collectives are joined and hidden, as explain() counts them"
        )
        yield from (f"  {line}" for line in _table(self.now.parts, self.prices.parts, in_seconds))
        yield "bytes a rank holds"
        yield from (f"  {line}" for line in _table(self.now.memory, self.prices.memory, in_bytes))
        yield "bytes a rank sends in a step"
        yield from (f"  {line}" for line in _table(self.now.communication, self.prices.communication, in_bytes))
        yield f"what changes: {self.diff}"


def what_if(compiled: Compiled, pins: UserPins | Plan | None) -> WhatIf:
    """The plan that `compile` would find with `pins` in place of those it was given: `{}` frees everything.

    Pins as in `compile`. Other calls that were captured before are not looked at. Raises `AutoparError` for a program that
    nobody searched, and `UnmatchedPinError` for a pin that names nothing; what else cannot be kept is an answer.
    """
    if compiled.decide_again is None or compiled.search is None or compiled.plan is None:
        raise AutoparError("this program was not made by autopar.compile: there is nothing to decide again")
    now = _prices(compiled.program, compiled)
    try:
        program, plan = compiled.decide_again(pins)
    except UnmatchedPinError:
        raise
    except (PlanError, ScheduleError) as refusal:
        return WhatIf(now, refusal=str(refusal))
    # Pins choose no kernels.
    plan = replace(plan, kernels=compiled.plan.kernels)
    as_joined = replace(plan, buckets=compiled.plan.buckets, chunks=compiled.plan.chunks)  # which are decided when schedules are written
    return WhatIf(now, _prices(program, compiled), plan, diff=compiled.plan.diff(as_joined))


def _prices(program: Program, compiled: Compiled) -> Prices:
    cost, places, order = cost_of(compiled), places_of(compiled), program.order
    step_seconds = StepOnPaper(program, cost, order).seconds
    time = seconds(program, cost, places)
    communication: dict[str, float] = {}
    for (axes, _, collective), row in sent(program, cost, places).items():
        name = f"{axes} {collective}"
        communication[name] = communication.get(name, 0.0) + row.bytes
    parts = {"compute": time["compute"], "memory traffic": time["memory"]}
    parts |= {f"communication {axes}": value for axes, value in time["communication"].items()}
    return Prices(step_seconds, parts, memory(program, cost, order), communication)


def _table(now: Mapping[str, float], then: Mapping[str, float], written: Callable[[float], str]) -> Iterator[str]:
    """`saved activations  1.2 MB → 0.6 MB`, what is nothing before and after left out."""
    names = [name for name in dict.fromkeys((*now, *then)) if now.get(name) or then.get(name)]
    width = max(map(len, names), default=0)
    for name in names:
        old, new = written(now.get(name, 0.0)), written(then.get(name, 0.0))
        yield f"{name.replace('_', ' '):<{width}}  {old if old == new else f'{old} → {new}'}"
