"""One rank at work: its schedule read instruction by instruction."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.errors import ScheduleError
from autopar.ir.instructions import Add, Free, Launch, Pause, Receive, Run, Send, Update, Wait
from autopar.ir.schedule import Schedule, TensorType
from autopar.runtime.execute.fragments import CompiledFragments
from autopar.runtime.execute.transport import Transport

Launched = Launch | Send | Receive


@dataclass
class RankState:
    """What one rank holds between instructions; it outlives PAUSE, so that saved activations reach the backward.

    `flights` are launched collectives and transfers by the name that WAIT gives them; `sums` are the buffers that
    ADD made, the only ones that anything writes into; `position` is the next instruction.
    """

    buffers: dict[str, torch.Tensor]
    flights: dict[str, tuple[Launched, Any]] = field(default_factory=dict)
    sums: set[str] = field(default_factory=set)
    position: int = 0
    # Called with the number of each instruction when it begins and when it is over.
    watch: Callable[[int, bool], None] | None = None
    # Takes the gradients of an UPDATE, in its order.
    update: Callable[[Update, list[torch.Tensor]], None] | None = None


@dataclass(frozen=True)
class Blocked:
    """A rank cannot go on before what it waits for at instruction `number` is complete."""

    number: int
    launch: Launched
    handle: Any
    transport: Transport

    def is_ready(self) -> bool:
        return self.transport.is_ready(self.handle)


Execution = Generator[Blocked, None, None]


def execute(schedule: Schedule, state: RankState, fragments: CompiledFragments, transport: Transport) -> Execution:
    """Run `schedule` from `state.position` up to and including the next PAUSE, or to the end.

    Yields a `Blocked` where a collective or transfer is not complete yet. Call it with grad mode off. Ranks may run
    different schedules. An exception leaves with a note that names the rank and the instruction.
    """
    rank = _Rank(schedule, state, fragments, transport)
    while state.position < len(schedule.instructions):
        number = state.position
        instruction = schedule.instructions[number]
        state.position += 1
        try:
            if isinstance(instruction, Pause):
                return
            if state.watch is not None:
                state.watch(number, False)
            if isinstance(instruction, Wait):
                launch, handle = rank.flight(instruction)
                if not transport.is_ready(handle):
                    yield Blocked(number, launch, handle, transport)
            _ACTIONS[type(instruction)](rank, instruction)
            if state.watch is not None:
                state.watch(number, True)
        except Exception as error:
            error.add_note(f"on rank {transport.rank}, instruction {number}: {instruction}")
            raise


@dataclass(frozen=True)
class _Rank:
    schedule: Schedule
    state: RankState
    fragments: CompiledFragments
    transport: Transport

    def flight(self, instruction: Wait) -> tuple[Launched, Any]:
        if instruction.target not in self.state.flights:
            raise ScheduleError(f"{instruction}: nothing was launched into {instruction.target!r}, or it was waited for before")
        return self.state.flights[instruction.target]

    def read(self, name: str) -> torch.Tensor:
        if name not in self.state.buffers:
            raise ScheduleError(f"buffer {name!r} is read before it is written, or after it was freed")
        return self.state.buffers[name]

    def read_all(self, names: tuple[str, ...]) -> list[torch.Tensor]:
        buffers = self.state.buffers
        try:
            return [buffers[name] for name in names]
        except KeyError:
            return [self.read(name) for name in names]  # says which one

    def run(self, instruction: Run) -> None:
        results = self.fragments.run(instruction.fragment, self.read_all(instruction.inputs))
        if len(results) != len(instruction.outputs):
            raise ScheduleError(f"fragment {instruction.fragment} gave {len(results)} results where {len(instruction.outputs)} are named")
        self.state.buffers.update(zip(instruction.outputs, results, strict=True))

    def launch(self, instruction: Launch) -> None:
        self._check_new(instruction.name)
        handle = self.transport.launch(instruction, self.read_all(instruction.sources))
        self.state.flights[instruction.name] = (instruction, handle)

    def send(self, instruction: Send) -> None:
        self._check_new(instruction.transfer)
        handle = self.transport.send(instruction, self.read_all(instruction.buffers))
        self.state.flights[instruction.transfer] = (instruction, handle)

    def receive(self, instruction: Receive) -> None:
        self._check_new(instruction.transfer)
        handle = self.transport.receive(instruction, [self._layout(name) for name in instruction.buffers])
        self.state.flights[instruction.transfer] = (instruction, handle)

    def wait(self, instruction: Wait) -> None:
        launch, handle = self.state.flights.pop(instruction.target)
        if isinstance(launch, Launch):
            self.state.buffers.update(zip(launch.targets, self.transport.wait(handle), strict=True))
            return
        arrived = self.transport.complete(handle)
        if isinstance(launch, Receive):
            self.state.buffers.update(zip(launch.buffers, arrived, strict=True))

    def add(self, instruction: Add) -> None:
        source, target = self.read(instruction.source), self.state.buffers.get(instruction.target)
        if target is None:
            self.state.buffers[instruction.target] = source.clone(memory_format=torch.contiguous_format)
            self.state.sums.add(instruction.target)
            return
        if instruction.target not in self.state.sums:
            raise ScheduleError(f"{instruction}: buffer {instruction.target!r} was not made by ADD, and others may share its memory")
        if (source.shape, source.dtype) != (target.shape, target.dtype):
            raise ScheduleError(
                f"{instruction}: {instruction.target!r} is {target.dtype} of {tuple(target.shape)}, "
                f"{instruction.source!r} is {source.dtype} of {tuple(source.shape)}"
            )
        target += source

    def update(self, instruction: Update) -> None:
        if self.state.update is None:
            raise ScheduleError(f"{instruction}: there is no optimizer in this run")
        self.state.update(instruction, [self.read(name) for name in instruction.gradients])

    def free(self, instruction: Free) -> None:
        buffers, sums = self.state.buffers, self.state.sums
        for name in instruction.buffers:
            if name not in buffers:
                self.read(name)  # says that it is not there
            del buffers[name]
            sums.discard(name)

    def _check_new(self, name: str) -> None:
        if name in self.state.flights:
            raise ScheduleError(f"{name!r} was launched twice without a wait between")

    def _layout(self, name: str) -> TensorType:
        layout = self.schedule.type_of(name)
        if layout is None:
            raise ScheduleError(f"the schedule has no shape for buffer {name!r}, which is received")
        return layout


_ACTIONS: dict[type, Callable[[_Rank, Any], None]] = {
    Run: _Rank.run,
    Launch: _Rank.launch,
    Send: _Rank.send,
    Receive: _Rank.receive,
    Wait: _Rank.wait,
    Add: _Rank.add,
    Update: _Rank.update,
    Free: _Rank.free,
}
