"""One rank at work: its schedule read instruction by instruction."""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Protocol

import torch

from autopar.errors import ScheduleError
from autopar.ir.instructions import Add, Copy, Flight, Free, Launch, Pause, Receive, Run, Send, Update, Wait
from autopar.ir.schedule import Schedule, TensorType
from autopar.runtime._torch import is_alone
from autopar.runtime.execute.buckets import Reserved
from autopar.runtime.execute.fragments import CompiledFragments
from autopar.runtime.execute.transport import Transport
from autopar.runtime.offload.copier import Copier, Parked


class Renewal(Protocol):
    """The next version of parameters: there once the ranks of this process that are `missing` have brought their gradients, too."""

    @property
    def missing(self) -> tuple[int, ...]: ...

    def versions(self) -> list[torch.Tensor]: ...

    def wanted_by(self, rank: int) -> str: ...


@dataclass
class RankState:
    """What one rank holds between instructions; it outlives PAUSE, so that saved activations reach the backward.

    `parked` are the buffers that are away from the device, which `copier` copies; `flights` are launched collectives, copies and
    transfers by the name that WAIT gives them; `sums` are the buffers that
    ADD made, the only ones that anything writes into; `position` is the next instruction.
    """

    buffers: dict[str, torch.Tensor]
    flights: dict[str, tuple[Flight, Any]] = field(default_factory=dict)
    parked: dict[str, Parked] = field(default_factory=dict[str, Parked])
    copier: Copier | None = None
    sums: set[str] = field(default_factory=set)
    position: int = 0
    # By name of a LAUNCH to come the memory that its operands are written into; None where they lie anywhere.
    reserved: dict[str, Reserved | None] = field(default_factory=dict[str, Reserved | None])
    # Called with the number of each instruction when it begins, and at the end with that behind the last.
    record: Callable[[int], None] | None = None
    # Called with the number of each instruction when it begins and when it is over.
    watch: Callable[[int, bool], None] | None = None
    # Takes the gradients of an UPDATE, in its order.
    update: Callable[[Update, list[torch.Tensor]], None] | None = None
    # After that, what an UPDATE gives that has versions.
    renewal: Callable[[Update], Renewal] | None = None


@dataclass(frozen=True)
class Blocked:
    """A rank cannot go on before what it waits for at instruction `number` is complete."""

    number: int
    launch: Flight | Update
    handle: Any
    transport: Transport

    def is_ready(self) -> bool:
        return not self.handle.missing if isinstance(self.launch, Update) else self.transport.is_ready(self.handle)


Execution = Generator[Blocked, None, None]


def execute(schedule: Schedule, state: RankState, fragments: CompiledFragments, transport: Transport, end: int | None = None) -> Execution:
    """Run `schedule` from `state.position` up to and including the next PAUSE, or to the `end`, which is that of all where none is given.

    Yields a `Blocked` where a collective or transfer is not complete yet. Call it with grad mode off. Ranks may run
    different schedules. An exception leaves with a note that names the rank and the instruction.
    """
    rank = _Rank(schedule, state, fragments, transport)
    record, end = state.record, len(schedule.instructions) if end is None else end
    while state.position < end:
        number = state.position
        instruction = schedule.instructions[number]
        state.position += 1
        if record is not None:
            record(number)
        try:
            if isinstance(instruction, Pause):
                return
            if state.watch is not None:
                state.watch(number, False)
            if isinstance(instruction, (Wait, Update)):
                yield from rank.blocked(number, instruction)
            _ACTIONS[type(instruction)](rank, instruction)
            if state.watch is not None:
                state.watch(number, True)
        except Exception as error:
            error.add_note(f"on rank {transport.rank}, instruction {number}: {instruction}")
            raise
    if record is not None:
        record(state.position)


@dataclass(frozen=True)
class _Rank:
    schedule: Schedule
    state: RankState
    fragments: CompiledFragments
    transport: Transport

    def flight(self, instruction: Wait) -> tuple[Flight, Any]:
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
        results = self.fragments.run(instruction.fragment, self.read_all(instruction.inputs), self._into(instruction))
        if len(results) != len(instruction.outputs):
            raise ScheduleError(f"fragment {instruction.fragment} gave {len(results)} results where {len(instruction.outputs)} are named")
        self.state.buffers.update(zip(instruction.outputs, results, strict=True))

    def launch(self, instruction: Launch) -> None:
        self._check_new(instruction.name)
        tensors, reserved = self.read_all(instruction.sources), self.state.reserved.pop(instruction.name, None)
        is_spent = len(tensors) == 1 and instruction.sources[0] in self.schedule.spent and self._is_alone(tensors[0])
        handle = self.transport.launch(instruction, tensors, is_spent, reserved)
        self.state.flights[instruction.name] = (instruction, handle)

    def copy(self, instruction: Copy) -> None:
        self._check_new(instruction.name)
        copier = self.state.copier
        if copier is None:
            raise ScheduleError(f"{instruction}: nobody copies in this run")
        if instruction.memory == "device":
            handle = copier.fetch([self.state.parked[name] for name in instruction.sources])
        else:
            names = [f"buffer {name} of rank {self.transport.rank}" for name in instruction.sources]
            handle = copier.park(instruction.memory, self.read_all(instruction.sources), names)
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
        if isinstance(launch, Copy):
            into = self.state.buffers if launch.memory == "device" else self.state.parked
            into.update(zip(launch.targets, handle.wait(), strict=True))
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

    def blocked(self, number: int, instruction: Wait | Update) -> Execution:
        """Until what is waited for is complete; an UPDATE that has versions is taken, and complete once all have brought gradients."""
        launch, handle = self.flight(instruction) if isinstance(instruction, Wait) else (instruction, self.taken(instruction))
        if handle is not None and not isinstance(launch, Copy):  # which no other rank has a part in
            blocked = Blocked(number, launch, handle, self.transport)
            if not blocked.is_ready():
                yield blocked

    def taken(self, instruction: Update) -> Renewal | None:
        if self.state.update is None:
            raise ScheduleError(f"{instruction}: there is no optimizer in this run")
        self.state.update(instruction, [self.read(name) for name in instruction.gradients])
        if not instruction.versions:
            return None
        assert self.state.renewal is not None, "whoever updates knows the versions"
        return self.state.renewal(instruction)

    def update(self, instruction: Update) -> None:
        if instruction.versions:
            assert self.state.renewal is not None
            self.state.buffers.update(zip(instruction.versions, self.state.renewal(instruction).versions(), strict=True))

    def free(self, instruction: Free) -> None:
        buffers, sums, parked = self.state.buffers, self.state.sums, self.state.parked
        for name in instruction.buffers:
            if parked and parked.pop(name, None) is not None:
                continue
            if name not in buffers:
                self.read(name)  # says that it is not there
            del buffers[name]
            sums.discard(name)

    def _into(self, instruction: Run) -> dict[int, torch.Tensor]:
        """By number of a result that may be written where it is told to be: its place in the bucket that alone reads it."""
        found: dict[int, torch.Tensor] = {}
        for number in self.fragments.placeable(instruction.fragment):
            launch, operand = self.schedule.spent.get(instruction.outputs[number], (None, 0))
            if launch is not None:
                reserved = self.state.reserved
                if launch.name not in reserved:
                    reserved[launch.name] = self.transport.reserve(launch, self.schedule.operand_types[launch.name])
                if (place := reserved[launch.name]) is not None:
                    found[number] = place.places[operand]
        return found

    def _is_alone(self, tensor: torch.Tensor) -> bool:
        """Whether a buffer has its memory for itself: no other tensor looks at it, and no other buffer is the same tensor."""
        return is_alone(tensor) and sum(map(operator.is_, repeat(tensor), self.state.buffers.values())) == 1

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
    Copy: _Rank.copy,
    Send: _Rank.send,
    Receive: _Rank.receive,
    Wait: _Rank.wait,
    Add: _Rank.add,
    Update: _Rank.update,
    Free: _Rank.free,
}
