"""What each rank of a pipeline does, communication included: one level below the grid of actions, one above fragments.

    1RECV_F0<0@0         launch a receive: what stage 0's forward of microbatch 0 made for stage 1, from rank 0
    WAIT 1RECV_F0<0@0    go on once it is there
    1F0                  compute
    1SEND_F0>2@2         launch a send: what stage 1's forward made for stage 2, to rank 2
    WAIT 1SEND_F0>2@2    go on once it is out; its buffer may go
    1REDUCE_GRAD         launch the reduction of stage 1's parameter gradients over the replicas: its last backward is done

`SEND_B` and `RECV_B` carry gradients: `2SEND_B0>1@1` is what stage 2's backward (B, or I where it is halved) made for stage 1.

A launch never blocks; a WAIT blocks until both ends have launched (rendezvous). A channel is a directed pair of ranks: its
k-th send meets its k-th receive. Buffers: a receive's lives from its launch to the end of the action that reads it; a
send's from the end of the action that makes it to its WAIT; what a forward saves from its start to the end of B, or in
part of I and in part of W.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from autopar.errors import ScheduleError
from autopar.pipeline.actions import Action, Edge, Kind, PipelineSchedule, chain, check_edges, parse_action

Direction = Literal["F", "B"]
# From which rank to which.
Channel = tuple[int, int]


class Transfer(NamedTuple):
    """One value on its way: F is an activation from the earlier stage to the later, B a gradient on the way back."""

    source: int
    target: int
    direction: Direction
    microbatch: int

    @property
    def makers(self) -> tuple[Action, ...]:
        """The actions that may make it; one of them does."""
        kinds: tuple[Kind, ...] = ("F",) if self.direction == "F" else ("B", "I")
        return tuple(Action(self.source, kind, self.microbatch) for kind in kinds)

    @property
    def readers(self) -> tuple[Action, ...]:
        """The actions that may read it; one of them does."""
        kinds: tuple[Kind, ...] = ("F",) if self.direction == "F" else ("B", "I")
        return tuple(Action(self.target, kind, self.microbatch) for kind in kinds)


class Compute(NamedTuple):
    action: Action

    def __str__(self) -> str:
        return str(self.action)


class Send(NamedTuple):
    transfer: Transfer
    peer: int

    @property
    def stage(self) -> int:
        """The stage at this rank's end."""
        return self.transfer.source

    @property
    def peer_stage(self) -> int:
        return self.transfer.target

    def channel(self, rank: int) -> Channel:
        """The channel of this send when `rank` launches it."""
        return rank, self.peer

    def __str__(self) -> str:
        source, target, direction, microbatch = self.transfer
        return f"{source}SEND_{direction}{microbatch}>{target}@{self.peer}"


class Receive(NamedTuple):
    transfer: Transfer
    peer: int

    @property
    def stage(self) -> int:
        """The stage at this rank's end."""
        return self.transfer.target

    @property
    def peer_stage(self) -> int:
        return self.transfer.source

    def channel(self, rank: int) -> Channel:
        """The channel of this receive when `rank` launches it."""
        return self.peer, rank

    def __str__(self) -> str:
        source, target, direction, microbatch = self.transfer
        return f"{target}RECV_{direction}{microbatch}<{source}@{self.peer}"


class Wait(NamedTuple):
    """Until `launched` is complete."""

    launched: Send | Receive

    def __str__(self) -> str:
        return f"WAIT {self.launched}"


class ReduceGradients(NamedTuple):
    stage: int

    def __str__(self) -> str:
        return f"{self.stage}REDUCE_GRAD"


PipelineInstruction = Compute | Send | Receive | Wait | ReduceGradients


@dataclass(frozen=True)
class PipelineProgram:
    """The instructions of every rank. `stages`, `num_microbatches` and `edges` say what they must add up to."""

    name: str
    stages: tuple[int, ...]
    num_microbatches: int
    edges: tuple[Edge, ...]
    ranks: tuple[tuple[PipelineInstruction, ...], ...]

    def __str__(self) -> str:
        blocks = ["\n".join([f"rank {rank}", *(f"    {each}" for each in row)]) for rank, row in enumerate(self.ranks)]
        return "\n".join(blocks)

    @property
    def schedule(self) -> PipelineSchedule:
        """The actions alone."""
        orders = tuple(tuple(each.action for each in row if isinstance(each, Compute)) for row in self.ranks)
        return PipelineSchedule(self.name, self.stages, self.num_microbatches, orders)


_TRANSFER = re.compile(r"(\d+)(SEND|RECV)_([FB])(\d+)([<>])(\d+)@(\d+)$")
_REDUCE = re.compile(r"(\d+)REDUCE_GRAD$")


def parse_instruction(text: str) -> PipelineInstruction:
    """Read back one printed instruction. Raises `ScheduleError`."""
    if text.startswith("WAIT "):
        launched = parse_instruction(text.removeprefix("WAIT "))
        if not isinstance(launched, (Send, Receive)):
            raise ScheduleError(f"{text!r} waits for something that is neither a send nor a receive")
        return Wait(launched)
    reduce = _REDUCE.match(text)
    if reduce:
        return ReduceGradients(int(reduce.group(1)))
    match = _TRANSFER.match(text)
    if match is None:
        return Compute(parse_action(text))
    own, word, direction, microbatch, arrow, other, peer = match.groups()
    if (word == "SEND") != (arrow == ">"):
        raise ScheduleError(f"{text!r}: a send goes > to a stage, a receive comes < from one")
    ends = (int(own), int(other)) if word == "SEND" else (int(other), int(own))
    transfer = Transfer(*ends, direction, int(microbatch))  # type: ignore[arg-type]
    return Send(transfer, int(peer)) if word == "SEND" else Receive(transfer, int(peer))


def parse_program(text: str, schedule: PipelineSchedule, edges: Sequence[Edge] | None = None) -> PipelineProgram:
    """Read back a printed program; `schedule` gives what its text does not say: name, stages, number of microbatches.

    Raises `ScheduleError` naming the first line that is no instruction.
    """
    ranks: list[list[PipelineInstruction]] = [[] for _ in schedule.orders]
    row: list[PipelineInstruction] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        word = line.strip()
        try:
            if word.startswith("rank "):
                row = ranks[int(word.removeprefix("rank "))]
            elif word:
                if row is None:
                    raise ScheduleError("an instruction before the first line `rank N`")
                row.append(parse_instruction(word))
        except (ScheduleError, ValueError, IndexError) as error:
            raise ScheduleError(f"line {number}, {word!r}: {error}") from None
    edges = chain(schedule.num_stages) if edges is None else tuple(edges)
    check_edges(edges, schedule.num_stages)
    return PipelineProgram(schedule.name, schedule.stages, schedule.num_microbatches, edges, tuple(map(tuple, ranks)))


def sends_of(action: Action, edges: Sequence[Edge]) -> Iterator[Transfer]:
    """What `action` makes for other stages."""
    if action.kind == "F":
        yield from (Transfer(action.stage, edge.target, "F", action.microbatch) for edge in edges if edge.source == action.stage)
    elif action.kind != "W":
        for edge in edges:
            if edge.target == action.stage and edge.has_gradient:
                yield Transfer(action.stage, edge.source, "B", action.microbatch)


def receives_of(action: Action, edges: Sequence[Edge]) -> Iterator[Transfer]:
    """What `action` reads from other stages."""
    if action.kind == "F":
        yield from (Transfer(edge.source, action.stage, "F", action.microbatch) for edge in edges if edge.target == action.stage)
    elif action.kind != "W":
        for edge in edges:
            if edge.source == action.stage and edge.has_gradient:
                yield Transfer(edge.target, action.stage, "B", action.microbatch)
