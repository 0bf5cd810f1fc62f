"""Where the time of a step goes: every instruction of every rank measured, beside what the cost model says."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from autopar.cost.model import CostModel, is_view
from autopar.errors import AutoparError
from autopar.ir.instructions import Launch, Pause, Run, Wait
from autopar.ir.schedule import Schedule
from autopar.ir.units import in_seconds
from autopar.ops.lookup import registered_rule
from autopar.pipeline.exposure import Exposure, Interval, events, exposure, predicted_exposure
from autopar.pipeline.fragment_prices import fragment_seconds, on_paper
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.pipeline.simulate import Event, Seconds, Simulation
from autopar.pipeline.trace import write_trace
from autopar.runtime.execute.call import Call
from autopar.runtime.module.module_state import ModuleState
from autopar.runtime.verify.timeline import call_of

# How many fragments are printed.
_SHOWN = 5
# A WAIT shorter than this found its collective complete: how long that took is not known.
_BLOCKED_SECONDS = 20e-6


@dataclass(frozen=True)
class FragmentTime:
    """A fragment on one rank: how often a step runs it, what it does most of, and its seconds in a step, measured and on paper."""

    name: str
    number: int
    what: str
    seconds: float
    predicted_seconds: float


@dataclass(frozen=True)
class Profile:
    """Steps as they were measured. On virtual ranks one thread works for all, so that their waits are no communication.

    steps      by step and rank the instructions with their seconds from the start of the step
    predicted  a step of this program on paper, at the prices of `seconds`
    cost       where these prices come from
    """

    program: ScheduleProgram
    steps: tuple[Mapping[int, tuple[Interval, ...]], ...]
    is_virtual: bool
    seconds: Seconds | None = None
    predicted: Simulation | None = None
    cost: CostModel | None = None

    @cached_property
    def median(self) -> Mapping[int, tuple[Interval, ...]]:
        """The step of median length."""
        return sorted(self.steps, key=lambda step: max(row[-1].end for row in step.values()))[len(self.steps) // 2]

    @cached_property
    def measured_exposure(self) -> Exposure:
        return exposure([(self.program.schedule_of(rank), row) for rank, row in self.median.items()])

    @cached_property
    def predicted_exposure(self) -> Exposure | None:
        return predicted_exposure(self.program, self.predicted) if self.predicted is not None else None

    def _medians(self, rank: int) -> dict[int, float]:
        """By instruction of a rank its seconds, in the median step for it."""
        rows = zip(*(step[rank] for step in self.steps), strict=True)
        return {row[0].number: statistics.median(each.seconds for each in row) for row in rows}

    @cached_property
    def fragments(self) -> tuple[FragmentTime, ...]:
        """Of the rank on which they take longest, the slowest first."""
        found: dict[str, FragmentTime] = {}
        for rank in self.median:
            schedule, seconds = self.program.schedule_of(rank), dict[str, list[float]]()
            for number, each in self._medians(rank).items():
                instruction = schedule.instructions[number]
                if isinstance(instruction, Run):
                    seconds.setdefault(instruction.fragment, []).append(each)
            for name, row in seconds.items():
                if name not in found or sum(row) > found[name].seconds:
                    price = self.seconds(Run(name, (), ())) if self.seconds is not None else 0.0
                    found[name] = FragmentTime(name, len(row), self._what(name), sum(row), len(row) * price)
        return tuple(sorted(found.values(), key=lambda each: -each.seconds))

    def _what(self, name: str) -> str:
        """The ops of a fragment but for views, the most frequent first."""
        counts: dict[str, int] = {}
        for node in self.program.fragments[name].module.graph.nodes:
            if node.op == "call_function" and not is_view(node):
                packet = str(getattr(node.target, "overloadpacket", node.target)).rsplit(".", 1)[-1]
                counts[packet] = counts.get(packet, 0) + 1
        top = sorted(counts, key=lambda packet: -counts[packet])[:3]
        return ", ".join(f"{packet} ×{counts[packet]}" for packet in top) or "views alone"

    @cached_property
    def classes(self) -> dict[str, tuple[float, float]]:
        """By class of instruction its seconds in a step on all ranks, measured and on paper: fragments with contractions and others,
        collectives by kind and axes: of these only what the ranks waited for, since only then is their end known."""
        if self.seconds is None:
            return {}
        found: dict[str, tuple[float, float]] = {}

        def add(kind: str, measured: float, price: float) -> None:
            one, other = found.get(kind, (0.0, 0.0))
            found[kind] = one + measured, other + price

        for rank in self.median:
            schedule = self.program.schedule_of(rank)
            for number, each in self._medians(rank).items():
                instruction = schedule.instructions[number]
                if isinstance(instruction, Run):
                    add(self._class(instruction.fragment), each, self.seconds(instruction))
        for launch, seconds in () if self.is_virtual else self.flights():
            add(f"{launch.collective} {','.join(launch.axes)}", seconds, self.seconds(launch))
        return found

    def _class(self, name: str) -> str:
        nodes = self.program.fragments[name].module.graph.nodes
        rules = (registered_rule(node) for node in nodes if node.op == "call_function")
        return "contractions" if any(rule is not None and rule.flops for rule in rules) else "other compute"

    def flights(self) -> Iterator[tuple[Launch, float]]:
        """Collectives of the median step and what they took, from the last rank's launch on, or from the end of the one before over the
        same axes: of those that all ranks of a place waited for during most of that time, since when another ended is not known."""
        for place, schedule in enumerate(self.program.places):
            rows = [{each.number: each for each in row} for rank, row in self.median.items() if self.program.place_of(rank) == place]
            launched = {each.name: number for number, each in enumerate(schedule.instructions) if isinstance(each, Launch)}
            over: dict[tuple[str, ...], int] = {}
            for number, each in enumerate(schedule.instructions):
                if not isinstance(each, Wait) or each.target not in launched:
                    continue
                begin = launched[each.target]
                launch = schedule.instructions[begin]
                assert isinstance(launch, Launch)
                before = over.get(launch.axes, begin)
                seconds = min(row[number].end - max(row[begin].begin, row[before].end if before > begin else 0.0) for row in rows)
                if all(row[number].seconds > max(_BLOCKED_SECONDS, seconds / 2) for row in rows):
                    yield launch, seconds
                over[launch.axes] = number

    @property
    def events(self) -> tuple[Event, ...]:
        """The median step."""
        return tuple(event for rank, row in self.median.items() for event in events(rank, self.program.schedule_of(rank), row))

    def write(self, path: str | Path) -> None:
        """Chrome trace JSON, the predicted step below the measured one: open in chrome://tracing or ui.perfetto.dev."""
        timelines: dict[str, Sequence[Event] | Simulation] = {"measured": self.events}
        write_trace(path, timelines | ({"predicted": self.predicted} if self.predicted is not None else {}))

    def __str__(self) -> str:
        measured, predicted = self.measured_exposure, self.predicted_exposure
        about = "virtual ranks take turns in one thread, and their waits are not communication" if self.is_virtual else str(measured)
        lines = [f"measured step: {in_seconds(measured.step_seconds)}, the median of {len(self.steps)}; {about}"]
        if predicted is not None:
            lines.append(f"on paper:      {in_seconds(predicted.step_seconds)}; {predicted}")
        lines.append("slowest fragments, seconds of a step on one rank (on paper, where nothing else runs)")
        for each in self.fragments[:_SHOWN]:
            lines.append(
                f"  {each.name:6} ×{each.number:<4} {in_seconds(each.seconds):>8} ({in_seconds(each.predicted_seconds)})  {each.what}"
            )
        if self.classes:
            lines.append("measured beside the cost model, all ranks together; compute on paper as if no communication ran beside it")
        for kind, (one, other) in sorted(self.classes.items(), key=lambda item: -item[1][0]):
            error = f"{other / one - 1:+.0%}" if one else ""
            lines.append(f"  {kind:24} {in_seconds(one):>8}   on paper {in_seconds(other):>8}   {error}")
        return "\n".join(lines)


def profile(parallel: ModuleState, args: tuple[Any, ...], kwargs: dict[str, Any], steps: int) -> Profile:
    """See `ParallelModule.profile`."""
    if steps < 1:
        raise AutoparError(f"profile(steps={steps}): at least one step is measured")
    rows: list[Mapping[int, tuple[Interval, ...]]] = []
    call, compiled = call_of(parallel, args, kwargs)
    _measured(call)  # fragments are compiled
    for _ in range(steps):
        rows.append(_measured(call_of(parallel, args, kwargs)[0]))
    if compiled.cost is None:
        return Profile(compiled.schedule, tuple(rows), call.world.is_virtual)
    seconds, predicted = fragment_seconds(compiled.schedule, compiled.cost), on_paper(compiled.schedule, compiled.cost)
    return Profile(compiled.schedule, tuple(rows), call.world.is_virtual, seconds, predicted, compiled.cost)


def _measured(call: Call) -> dict[int, tuple[Interval, ...]]:
    """Run `call` and note when each instruction begins: that is when the one before it ends. Collective."""
    begun: dict[int, list[tuple[int, float]]] = {rank: [] for rank in call.states}
    for rank, state in call.states.items():
        state.record = _Noted(begun[rank])
    call.world.gather(None)  # all ranks start now
    start = _now()
    with torch.no_grad():
        call.forward()
        if call.has_backward and not call.is_over_at_pause:
            call.backward(dict.fromkeys(item.name for item in call.signature.inputs_of("tangent")))
    mine = {rank: _intervals(call.schedules[rank], row, start) for rank, row in begun.items()}
    if call.world.is_virtual:
        return mine
    return {rank: row for found in call.world.gather(mine) for rank, row in found.items()}


@dataclass(frozen=True)
class _Noted:
    begun: list[tuple[int, float]]

    def __call__(self, number: int) -> None:
        self.begun.append((number, _now()))


def _intervals(schedule: Schedule, begun: Sequence[tuple[int, float]], start: float) -> tuple[Interval, ...]:
    """The caller's time between forward and backward is left out, and what follows moves up."""
    found: list[Interval] = []
    for (number, begin), (_, end) in pairwise(begun):
        if isinstance(schedule.instructions[number], Pause):
            start += end - begin
        else:
            found.append(Interval(number, begin - start, end - start))
    return tuple(found)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
