"""One rank at work: its schedule read instruction by instruction."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.errors import ScheduleError
from autopar.runtime.fragments import CompiledFragments
from autopar.runtime.transport import Transport
from autopar.schedule import Free, Instruction, Launch, Pause, Run, Schedule, Wait


@dataclass
class RankState:
    """What one rank holds between instructions; it outlives PAUSE, so that saved activations reach the backward.

    `flights` are launched collectives by target buffer; `position` is the next instruction.
    """

    buffers: dict[str, torch.Tensor]
    flights: dict[str, tuple[Launch, Any]] = field(default_factory=dict)
    position: int = 0


@dataclass(frozen=True)
class Blocked:
    """A rank cannot go on before the collective that it waits for at instruction `number` is complete."""

    number: int
    launch: Launch
    handle: Any
    transport: Transport

    def is_ready(self) -> bool:
        return self.transport.is_ready(self.handle)


Execution = Generator[Blocked, None, None]


def execute(schedule: Schedule, state: RankState, fragments: CompiledFragments, transport: Transport) -> Execution:
    """Run `schedule` from `state.position` up to and including the next PAUSE, or to the end.

    Yields a `Blocked` where a collective is not complete yet. Call it with grad mode off. An exception
    leaves with a note that names the rank and the instruction.
    """
    while state.position < len(schedule.instructions):
        number = state.position
        instruction = schedule.instructions[number]
        state.position += 1
        try:
            if isinstance(instruction, Pause):
                return
            if isinstance(instruction, Wait):
                launch, handle = _flight(instruction, state)
                if not transport.is_ready(handle):
                    yield Blocked(number, launch, handle, transport)
            _ACTIONS[type(instruction)](instruction, state, fragments, transport)
        except Exception as error:
            error.add_note(f"on rank {transport.rank}, instruction {number}: {instruction}")
            raise


def _flight(instruction: Wait, state: RankState) -> tuple[Launch, Any]:
    if instruction.target not in state.flights:
        raise ScheduleError(f"{instruction}: nothing was launched into {instruction.target!r}, or it was waited for before")
    return state.flights[instruction.target]


def _read(name: str, state: RankState) -> torch.Tensor:
    if name not in state.buffers:
        raise ScheduleError(f"buffer {name!r} is read before it is written, or after it was freed")
    return state.buffers[name]


def _run(instruction: Run, state: RankState, fragments: CompiledFragments, transport: Transport) -> None:
    inputs = [_read(name, state) for name in instruction.inputs]
    results = fragments.run(instruction.fragment, inputs)
    if len(results) != len(instruction.outputs):
        raise ScheduleError(f"fragment {instruction.fragment} gave {len(results)} results where {len(instruction.outputs)} are named")
    state.buffers.update(zip(instruction.outputs, results, strict=True))


def _launch(instruction: Launch, state: RankState, fragments: CompiledFragments, transport: Transport) -> None:
    if instruction.target in state.flights:
        raise ScheduleError(f"{instruction.target!r} was launched twice without a wait between")
    state.flights[instruction.target] = (instruction, transport.launch(instruction, _read(instruction.source, state)))


def _wait(instruction: Wait, state: RankState, fragments: CompiledFragments, transport: Transport) -> None:
    _, handle = state.flights.pop(instruction.target)
    state.buffers[instruction.target] = transport.wait(handle)


def _free(instruction: Free, state: RankState, fragments: CompiledFragments, transport: Transport) -> None:
    for name in instruction.buffers:
        _read(name, state)
        del state.buffers[name]


_ACTIONS: dict[type[Instruction], Callable[..., None]] = {Run: _run, Launch: _launch, Wait: _wait, Free: _free}
