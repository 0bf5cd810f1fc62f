"""What a step of a pipeline really did: when every action and wait began and ended on each rank, and what was held meanwhile."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from autopar.cost.schedule_memory import peak_bytes
from autopar.driver.compiled import Compiled
from autopar.ir.instructions import Copy, Pause, Run, Wait
from autopar.ir.schedule import Schedule
from autopar.pipeline.report import StepOnPaper
from autopar.pipeline.simulate import Event, Simulation
from autopar.pipeline.trace import write_trace
from autopar.runtime.execute.call import Call
from autopar.runtime.execute.interpreter import RankState
from autopar.runtime.execute.random_key import random_key
from autopar.runtime.module.module_state import ModuleState

_MIB = 2**20


@dataclass(frozen=True)
class Timeline:
    """One measured step; times in seconds from its start, on all ranks, memory in bytes of tensors by rank.

    On virtual ranks one thread works for all of them in turn. `predicted` is the same step on paper, `predicted_bytes` what the
    schedules say of the memory (see `autopar.cost.schedule_memory`).
    """

    events: tuple[Event, ...]
    peak_bytes: Mapping[int, int]
    peak_live_microbatches: Mapping[int, int]
    predicted_bytes: Mapping[int, int]
    predicted: Simulation | None = None

    @property
    def step_seconds(self) -> float:
        return max((event.end_seconds for event in self.events), default=0.0)

    @property
    def bubble_rate(self) -> float:
        """The share of the longest span of a rank, from its first action to the end of its last, that ranks do not compute."""
        rows = [[e for e in self.events if e.rank == rank and e.stream == "compute"] for rank in self.peak_bytes]
        span = max((row[-1].end_seconds - row[0].start_seconds for row in rows if row), default=0.0)
        busy = sum(event.end_seconds - event.start_seconds for row in rows for event in row)
        return 1 - busy / (len(rows) * span) if span else 0.0

    def write(self, path: str | Path) -> None:
        """Chrome trace JSON, the predicted step below the measured one: open in chrome://tracing or ui.perfetto.dev."""
        timelines: dict[str, Sequence[Event] | Simulation] = {"measured": self.events}
        write_trace(path, timelines | ({"predicted": self.predicted} if self.predicted is not None else {}))

    def __str__(self) -> str:
        lines = [f"measured step: {1e3 * self.step_seconds:.2f} ms, ranks idle {self.bubble_rate:.1%} of it"]
        if self.predicted is not None:
            lines.append(f"predicted:     {1e3 * self.predicted.step_seconds:.2f} ms, ranks idle {self.predicted.bubble_rate:.1%} of it")
        for rank, num_bytes in self.peak_bytes.items():
            predicted, live = self.predicted_bytes[rank], self.peak_live_microbatches[rank]
            lines.append(f"  rank {rank}: at most {num_bytes / _MIB:.2f} MiB (predicted {predicted / _MIB:.2f}), {live} live microbatches")
        return "\n".join(lines)


@dataclass
class Recorder:
    """Watches one rank: `state.watch = Recorder(...)`. It costs time of its own: bytes are counted after every instruction.

    A microbatch is live on a stage while its rank holds something that the stage's forward made of it.
    """

    rank: int
    schedule: Schedule
    state: RankState
    events: list[Event] = field(default_factory=list[Event])
    peak_bytes: int = 0
    peak_live: int = 0
    _begun: dict[int, float] = field(default_factory=dict[int, float])
    _made: dict[str, str] = field(default_factory=dict[str, str])
    _spans: dict[int, str] = field(default_factory=dict[int, str])
    _ends: dict[int, int] = field(default_factory=dict[int, int])

    def __post_init__(self) -> None:
        self._kept = {self._value(name) for name in self.schedule.outputs}
        for number, span in enumerate(self.schedule.spans):
            if span.begin == span.end:
                continue  # the first stage has nobody to send gradients to
            self._spans |= dict.fromkeys(range(span.begin, span.end), span.action)
            # The caller's time between forward and backward is none of theirs.
            self._ends[span.end - 1 - isinstance(self.schedule.instructions[span.end - 1], Pause)] = number

    def _value(self, name: str) -> str:
        return self.schedule.buffers[name].value

    def __call__(self, number: int, is_over: bool) -> None:
        now = _now()
        if not is_over:
            self._begun[number] = now
            return
        instruction = self.schedule.instructions[number]
        if isinstance(instruction, Wait) and number not in self._spans:
            self.events.append(Event(self.rank, "wait", str(instruction), self._begun[number], now))
        action = self._spans.get(number, "")
        if isinstance(instruction, Run) and "F" in action:
            self._made |= {name: action for name in instruction.outputs if self._value(name) not in self._kept}
        self.peak_bytes = max(self.peak_bytes, bytes_of(self.state))
        if number in self._ends:
            span = self.schedule.spans[self._ends[number]]
            self.events.append(Event(self.rank, "compute", span.action, self._begun[span.begin], now))
            live = {action for name, action in self._made.items() if name in self.state.buffers}
            self.peak_live = max(self.peak_live, len(live))


def call_of(parallel: ModuleState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, Compiled]:
    """A call that has not run, and changes nothing of the module when it does."""
    inputs, captured = parallel.captured(args, kwargs, runs=True)
    compiled, world = captured.compiled, parallel._world
    tensors = tensors_of_trial(parallel, compiled)
    key = random_key(parallel.seed or 0, 0)
    return Call(compiled, captured.fragments, world, tensors, inputs.leaves, key, world.device(parallel._model)), compiled


def tensors_of_trial(parallel: ModuleState, compiled: Compiled) -> dict[str, torch.Tensor]:
    """The module's parameters and buffers by name, and copies of those that a call writes."""
    written = {item.name for item in compiled.signature.outputs_of("buffer")}
    named = (*parallel.named_parameters(), *parallel.named_buffers())
    return {name: tensor.detach().clone() if name in written else tensor for name, tensor in named}


def timeline(parallel: ModuleState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Timeline:
    """See `ParallelModule.timeline`."""
    call, compiled = call_of(parallel, args, kwargs)
    with torch.no_grad():
        found = measured(call)
    predicted = {rank: peak_bytes(compiled.schedule_of(rank)) for rank in found.peak_bytes}
    return replace(found, predicted=_predicted(compiled), predicted_bytes=predicted)


def _predicted(compiled: Compiled) -> Simulation | None:
    if compiled.cost is None:
        return None
    return StepOnPaper(compiled.program, compiled.cost, compiled.order).simulation


def measured(call: Call) -> Timeline:
    """Run `call`, which has not run yet, and watch it: a backward that waits for its gradients gets zeros. Collective."""
    recorders = [Recorder(rank, call.schedules[rank], state) for rank, state in call.states.items()]
    for recorder in recorders:
        recorder.state.watch = recorder
    call.world.gather(None)  # all ranks start now
    start = _now()
    call.forward()
    if call.has_backward and not call.is_over_at_pause:
        call.backward(dict.fromkeys(item.name for item in call.signature.inputs_of("tangent")))
    mine = [([_since(start, event) for event in each.events], each.rank, each.peak_bytes, each.peak_live) for each in recorders]
    everyone = mine if call.world.is_virtual else [each for found in call.world.gather(mine) for each in found]
    return Timeline(
        tuple(event for events, *_ in everyone for event in events),
        {rank: num_bytes for _, rank, num_bytes, _ in everyone},
        {rank: live for _, rank, _, live in everyone},
        {},
    )


def _since(start: float, event: Event) -> Event:
    return replace(event, start_seconds=event.start_seconds - start, end_seconds=event.end_seconds - start)


def bytes_of(state: RankState) -> int:
    """Bytes of all memory on the device that a rank's buffers lie in, each counted once, those included that are being copied there."""
    coming = (each for launched, handle in state.flights.values() if isinstance(launched, Copy) for each in handle.tensors)
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in chain(state.buffers.values(), coming)}
    return sum(storages.values())


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
