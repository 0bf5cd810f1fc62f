"""What the ranks of this process really took: the allocator's events during one step, by rank and instruction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.cost.schedule_memory import schedule_memory
from autopar.ir.instructions import Run
from autopar.reports.memory import MeasuredPeak
from autopar.runtime._torch import AllocatorLog
from autopar.runtime.execute.call import Call
from autopar.runtime.execute.fragments import rank_sizes
from autopar.runtime.execute.interpreter import RankState
from autopar.runtime.execute.random_key import random_key
from autopar.runtime.execute.world import local_of
from autopar.runtime.module.module_state import ModuleState
from autopar.runtime.verify.timeline import bytes_of, tensors_of_trial


@dataclass(frozen=True)
class RankTrace:
    """Bytes of one rank during each instruction, by its number, and the most of them."""

    during_bytes: Mapping[int, int]

    @property
    def peak_bytes(self) -> int:
        return max(self.during_bytes.values(), default=0)

    @property
    def peak_position(self) -> int:
        return max(self.during_bytes, key=lambda number: self.during_bytes[number], default=0)


@dataclass
class _Watch:
    """Marks the instructions of one rank among the allocator's events, and notes what its buffers take before each and after."""

    rank: int
    state: RankState
    log: AllocatorLog
    # Those during which nobody else runs: virtual ranks wait in turn.
    marked: frozenset[int]
    before: dict[int, int] = field(default_factory=dict[int, int])
    after: dict[int, int] = field(default_factory=dict[int, int])
    _span: AbstractContextManager[Any] | None = None

    def __call__(self, number: int, is_over: bool) -> None:
        if not is_over:
            self.before[number] = bytes_of(self.state)
            if number in self.marked:
                self._span = self.log.mark(f"{self.rank} {number}")
                self._span.__enter__()
            return
        if number in self.marked:
            assert self._span is not None
            self._span.__exit__(None, None, None)
        self.after[number] = bytes_of(self.state)


class Tracker:
    """What the ranks of this process take while it is entered and `call` runs, or half of it.

    On a process that is what the allocator says, and the memory of `held`, of buckets and of the call's inputs, which is there before:
    parameters, what an optimizer holds. Virtual ranks share one allocator, and results of collectives: of each that is what its buffers
    lie in, each memory once, and what the allocator says while a fragment of it runs.
    """

    def __init__(self, call: Call, held: Iterable[torch.Tensor] = (), device: str = "cpu") -> None:
        self._call, self._log = call, AllocatorLog(device)
        self._held = [each for each in held if each.device.type == device]  # constants are captured on the CPU
        self._watches = [_Watch(rank, state, self._log, _marked(call, rank)) for rank, state in call.states.items()]
        self._base = 0

    def __enter__(self) -> Tracker:
        kept = (each for transport in self._call.transports for each in transport.kept())
        self._base = _bytes([*self._held, *kept, *(each for watch in self._watches for each in watch.state.buffers.values())])
        for watch in self._watches:
            watch.state.watch = watch
        self._log.__enter__()
        self._settle(True)
        return self

    def __exit__(self, *error: Any) -> None:
        self._settle(False)
        self._log.__exit__(*error)
        for watch in self._watches:
            watch.state.watch = None

    def _settle(self, is_on: bool) -> None:
        for transport in self._call.transports:
            transport.settle(is_on)

    def traces(self) -> dict[int, RankTrace]:
        """By rank, once it is left."""
        inside = _inside(self._log)
        if self._call.world.is_virtual:
            return {watch.rank: _of_virtual(watch, inside) for watch in self._watches}
        (watch,) = self._watches
        return {watch.rank: RankTrace({number: self._base + most for (_, number), (_, most) in inside.items()})}


def measured_peaks(parallel: ModuleState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, MeasuredPeak]:
    """By rank of the mesh the most that forward and backward of such a call took, beside what is predicted of them. Collective."""
    compiled = parallel.captured(args, kwargs)[1].compiled
    traces = tracked_step(parallel, args, kwargs)
    sizes = rank_sizes(compiled, parallel._backend, parallel._model, on_processes=not parallel._world.is_virtual)
    mine: list[tuple[int, MeasuredPeak]] = []
    for rank, trace in traces.items():
        schedule = compiled.schedule_of(rank)
        predicted = schedule_memory(schedule, sizes.of(schedule)).peak_bytes
        mine.append((rank, MeasuredPeak(predicted, trace.peak_bytes, str(schedule.instructions[trace.peak_position]))))
    everyone = mine if parallel._world.is_virtual else [each for found in parallel._world.gather(mine) for each in found]
    return dict(everyone)


def tracked_step(parallel: ModuleState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, RankTrace]:
    """By rank of this process what forward and backward of such a call take. Nothing changes: no gradient is kept, no buffer written."""
    inputs, captured = parallel.captured(args, kwargs, runs=True)
    world, device = parallel._world, parallel._world.device(parallel._model)
    tensors = tensors_of_trial(parallel, captured.compiled)
    leaves = (each for each in inputs.leaves if isinstance(each, torch.Tensor))

    def new_call() -> Call:
        key = random_key(parallel.seed or 0, 0)
        return Call(captured.compiled, captured.fragments, world, tensors, inputs.leaves, key, device)

    @torch.no_grad()
    def step(call: Call) -> None:
        call.forward()
        if call.has_backward and not call.is_over_at_pause:
            call.backward(dict.fromkeys(item.name for item in call.signature.inputs_of("tangent")))

    if not world.is_virtual:
        step(new_call())  # buckets stay from one step to the next
    call = new_call()
    here = (each for name, each in tensors.items() if name not in captured.compiled.stored)
    tracker = Tracker(call, [*here, *leaves, *call.constants.values()], device.type)
    with tracker:
        step(call)
    return tracker.traces()


def _marked(call: Call, rank: int) -> frozenset[int]:
    """The instructions that the allocator is asked about: on virtual ranks those that compute by themselves."""
    kinds = Run if call.world.is_virtual else object  # an update of virtual ranks is one for all
    return frozenset(number for number, each in enumerate(call.schedules[rank].instructions) if isinstance(each, kinds))


def _inside(log: AllocatorLog) -> dict[tuple[int, int], tuple[int, int]]:
    """By rank and instruction: what was taken since the beginning when it began, and the most while it ran."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    total, events = 0, iter(log.events)
    event = next(events, None)
    for name, begin, end in log.marks:
        while event is not None and event[0] < begin:
            total, event = total + event[1], next(events, None)
        first = most = total
        while event is not None and event[0] <= end:
            total, event = total + event[1], next(events, None)
            most = max(most, total)
        rank, number = map(int, name.split())
        found[rank, number] = first, most
    return found


def _of_virtual(watch: _Watch, inside: Mapping[tuple[int, int], tuple[int, int]]) -> RankTrace:
    found: dict[int, int] = {}
    for number, before in watch.before.items():
        first, most = inside.get((watch.rank, number), (0, 0))
        found[number] = max(before + most - first, watch.after.get(number, 0))
    return RankTrace(found)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of the memory that they lie in, each once."""
    storages = (local_of(each).untyped_storage() for each in tensors)
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())
