"""Virtual ranks: every rank of the mesh inside one process and one thread.

Each rank is a generator that yields where it must wait; a round-robin driver resumes whoever can go on.
When nobody can, that is a deadlock, and it is reported at once with what every rank waits for.

    rank 0   launch a ─ wait a ⏸            ▶ a ready
    rank 1                       launch a ─ ┘ wait a ▶
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from autopar.errors import ScheduleError
from autopar.mesh import Mesh
from autopar.runtime.interpreter import Blocked, Execution
from autopar.schedule import Launch


@dataclass(eq=False)
class Meeting:
    """The k-th collective on one group: it happens when every member has brought its tensor."""

    members: tuple[int, ...]
    launches: dict[int, Launch] = field(default_factory=dict)
    results: dict[int, torch.Tensor] = field(default_factory=dict)
    _brought: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.members if rank not in self.launches)

    def join(self, rank: int, launch: Launch, tensor: torch.Tensor) -> None:
        self.launches[rank] = launch
        self._brought[rank] = tensor
        if not self.missing:
            self._compare()
            parts = [self._brought[member] for member in self.members]
            self.results = dict(zip(self.members, collect(launch, parts), strict=True))
            self._brought.clear()

    def _compare(self) -> None:
        """Raise `ScheduleError` unless all members ask for the same thing."""
        first = self.members[0]
        launch, tensor = self.launches[first], self._brought[first]
        for rank in self.members[1:]:
            other, theirs = self.launches[rank], self._brought[rank]
            pairs = (
                ("collective", launch.collective, other.collective),
                ("kind", launch.kind, other.kind),
                ("axes", launch.axes, other.axes),
                ("shape", tuple(tensor.shape), tuple(theirs.shape)),
                ("dtype", tensor.dtype, theirs.dtype),
            )
            wrong = [f"{what} {mine} on rank {first} and {its} on rank {rank}" for what, mine, its in pairs if mine != its]
            if wrong:
                raise ScheduleError(
                    f"ranks {first} and {rank} meet in different collectives: {'; '.join(wrong)}\n"
                    f"  rank {first}: {launch}\n  rank {rank}: {other}"
                )


def collect(launch: Launch, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What each member of a group gets when member i brings `parts[i]`. Results may be shared: nobody writes into them."""
    if launch.collective == "all_reduce":
        total = _reduce(launch.kind, parts)
        return [total] * len(parts)
    if launch.collective == "all_gather":
        gathered = torch.stack(tuple(parts))
        return [gathered] * len(parts)
    if launch.collective == "reduce_scatter":
        return [_reduce(launch.kind, [part[index] for part in parts]) for index in range(len(parts))]
    return [torch.stack([part[index] for part in parts]) for index in range(len(parts))]


def _reduce(kind: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone(memory_format=torch.contiguous_format)
    for part in parts[1:]:
        if kind == "max":
            torch.maximum(total, part, out=total)
        else:
            total += part
    return total


class Switchboard:
    """Matches the launches of all ranks: one channel per group of ranks, in issue order."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._channels: dict[frozenset[int], list[Meeting]] = {}

    def launch(self, rank: int, launch: Launch, tensor: torch.Tensor) -> Meeting:
        members = self.mesh.group(rank, launch.axes)
        channel = self._channels.setdefault(frozenset(members), [])
        meeting = next((meeting for meeting in channel if rank not in meeting.launches), None)
        if meeting is None:
            meeting = Meeting(members)
            channel.append(meeting)
        meeting.join(rank, launch, tensor)
        if not meeting.missing:
            channel.remove(meeting)
        return meeting

    def check_empty(self) -> None:
        """Raise `ScheduleError` for a collective that only some ranks of its group launched."""
        for channel in self._channels.values():
            for meeting in channel:
                rank, launch = next(iter(meeting.launches.items()))
                raise ScheduleError(f"rank {rank} launched {launch}, but {_ranks(meeting.missing)} never did")


@dataclass(frozen=True)
class VirtualTransport:
    """One virtual rank's end of a `Switchboard`."""

    board: Switchboard
    rank: int

    @property
    def mesh(self) -> Mesh:
        return self.board.mesh

    def launch(self, instruction: Launch, tensor: torch.Tensor) -> Meeting:
        return self.board.launch(self.rank, instruction, tensor)

    def is_ready(self, handle: Meeting) -> bool:
        return not handle.missing

    def wait(self, handle: Meeting) -> torch.Tensor:
        return handle.results.pop(self.rank)


def drive(ranks: Sequence[Execution]) -> None:
    """Run the generators of all ranks, in rank order, until each has paused or finished.

    Raises `ScheduleError` when no rank can go on, naming what each waits for.
    """
    waiting: dict[int, Blocked | None] = dict.fromkeys(range(len(ranks)))
    while waiting:
        advanced = False
        for rank, blocked in list(waiting.items()):
            if blocked is not None and not blocked.is_ready():
                continue
            advanced = True
            try:
                waiting[rank] = next(ranks[rank])
            except StopIteration:
                del waiting[rank]
        if not advanced:
            raise ScheduleError(
                "deadlock: no rank can go on\n" + "\n".join(_describe(rank, blocked) for rank, blocked in waiting.items() if blocked)
            )


def _describe(rank: int, blocked: Blocked) -> str:
    missing = blocked.handle.missing if isinstance(blocked.handle, Meeting) else ()
    return f"  rank {rank} waits at instruction {blocked.number} for {blocked.launch}: {_ranks(missing)} did not launch it"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
