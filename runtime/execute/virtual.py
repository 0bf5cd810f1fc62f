"""Virtual ranks: every rank of the mesh inside one process and one thread.

Each rank is a generator that yields where it must wait; a round-robin driver resumes whoever can go on.
When nobody can, that is a deadlock, and it is reported at once with what every rank waits for.

    rank 0   launch a ─ wait a ⏸            ▶ a ready
    rank 1                       launch a ─ ┘ wait a ▶
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from autopar.errors import ScheduleError
from autopar.ir.instructions import Channel, Launch, Receive, Send
from autopar.ir.mesh import Mesh
from autopar.ir.schedule import TensorType
from autopar.runtime.execute.buckets import Reserved
from autopar.runtime.execute.interpreter import Blocked, Execution
from autopar.runtime.execute.rendezvous import PointToPoint


@dataclass(eq=False)
class CollectiveRendezvous:
    """The k-th collective on one group: it happens when every member has brought its tensor."""

    members: tuple[int, ...]
    launches: dict[int, Launch] = field(default_factory=dict)
    results: dict[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    _brought: dict[int, Sequence[torch.Tensor]] = field(default_factory=dict)

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.members if rank not in self.launches)

    def join(self, rank: int, launch: Launch, tensors: Sequence[torch.Tensor]) -> None:
        self.launches[rank] = launch
        self._brought[rank] = tensors
        if not self.missing:
            self._compare()
            # By source of the launch what each member brings, and what each gets.
            brought = zip(*(self._brought[member] for member in self.members), strict=True)
            results = zip(*(collect(launch, parts) for parts in brought), strict=True)
            self.results = dict(zip(self.members, results, strict=True))
            self._brought.clear()

    def wanted_by(self, rank: int) -> str:
        """What `rank` launched, and who did not."""
        return f"{self.launches[rank]}: {_ranks(self.missing)} did not launch it"

    def _compare(self) -> None:
        """Raise `ScheduleError` unless all members ask for the same thing."""
        first = self.members[0]
        launch, mine = self.launches[first], self._brought[first]
        for rank in self.members[1:]:
            other, theirs = self.launches[rank], self._brought[rank]
            pairs = (
                ("collective", launch.collective, other.collective),
                ("kind", launch.kind, other.kind),
                ("axes", launch.axes, other.axes),
                ("ranks of a node", launch.node_size, other.node_size),
                ("shape", _told(mine, lambda tensor: tuple(tensor.shape)), _told(theirs, lambda tensor: tuple(tensor.shape))),
                ("dtype", _told(mine, lambda tensor: tensor.dtype), _told(theirs, lambda tensor: tensor.dtype)),
            )
            wrong = [f"{what} {one} on rank {first} and {its} on rank {rank}" for what, one, its in pairs if one != its]
            if wrong:
                raise ScheduleError(
                    f"ranks {first} and {rank} meet in different collectives: {'; '.join(wrong)}\n"
                    f"  rank {first}: {launch}\n  rank {rank}: {other}"
                )


def _told(tensors: Sequence[torch.Tensor], of: Callable[[torch.Tensor], object]) -> object:
    """What a collective's tensors are; of one, what it is."""
    found = [of(tensor) for tensor in tensors]
    return found[0] if len(found) == 1 else found


def collect(launch: Launch, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What each member of a group gets when member i brings `parts[i]`. Results may be shared: nobody writes into them."""
    if launch.collective == "all_reduce":
        total = _reduce(launch.kind, parts)
        return [total] * len(parts)
    if launch.collective == "all_gather":
        gathered = torch.stack(tuple(parts))
        return [gathered] * len(parts)
    if launch.collective == "reduce_scatter":
        nodes = (
            [parts[first : first + launch.node_size] for first in range(0, len(parts), launch.node_size)] if launch.node_size else [parts]
        )
        sums = [[_reduce(launch.kind, [part[index] for part in node]) for node in nodes] for index in range(len(parts))]
        return [_reduce(launch.kind, each) for each in sums]
    return [torch.stack([part[index] for part in parts]) for index in range(len(parts))]


def _reduce(kind: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone(memory_format=torch.contiguous_format)
    for part in parts[1:]:
        if kind == "max":
            torch.maximum(total, part, out=total)
        else:
            total += part
    return total


class Rendezvous:
    """Matches what all ranks launch, in issue order: collectives for each group of ranks, transfers for each channel."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        # Those that some ranks have yet to launch.
        self._collectives: dict[frozenset[int], list[CollectiveRendezvous]] = {}
        self._transfers: dict[Channel, list[PointToPoint]] = {}
        self._counts: dict[Channel, int] = {}

    def launch(self, rank: int, launch: Launch, tensors: Sequence[torch.Tensor]) -> CollectiveRendezvous:
        members = self.mesh.group(rank, launch.axes)
        waiting = self._collectives.setdefault(frozenset(members), [])
        collective = next((collective for collective in waiting if rank not in collective.launches), None)
        if collective is None:
            collective = CollectiveRendezvous(members)
            waiting.append(collective)
        collective.join(rank, launch, tensors)
        if not collective.missing:
            waiting.remove(collective)
        return collective

    def send(self, rank: int, instruction: Send, tensors: Sequence[torch.Tensor]) -> PointToPoint:
        transfer = self._next(instruction.channel(self.mesh, rank), rank)
        transfer.send(instruction, tensors)
        return transfer

    def receive(self, rank: int, instruction: Receive, layouts: Sequence[TensorType]) -> PointToPoint:
        transfer = self._next(instruction.channel(self.mesh, rank), rank)
        transfer.receive(instruction, layouts)
        return transfer

    def _next(self, channel: Channel, rank: int) -> PointToPoint:
        """The first transfer of `channel` that `rank` has not launched; when the other rank has, it is taken off the list."""
        transfers = self._transfers.setdefault(channel, [])
        if transfers and rank in transfers[0].missing:
            return transfers.pop(0)
        number = self._counts.get(channel, 0)
        self._counts[channel] = number + 1
        transfers.append(PointToPoint(channel, number))
        return transfers[-1]

    def check_empty(self) -> None:
        """Raise `ScheduleError` for a collective that only some ranks of its group launched, or a transfer with one end."""
        for waiting in self._collectives.values():
            for collective in waiting:
                rank, launch = next(iter(collective.launches.items()))
                raise ScheduleError(f"rank {rank} launched {launch}, but {_ranks(collective.missing)} never did")
        for channel, transfers in self._transfers.items():
            for transfer in transfers:
                (missing,) = transfer.missing
                rank = next(end for end in channel if end != missing)
                raise ScheduleError(f"rank {rank} launched {transfer.wanted_by(rank)}")


@dataclass(frozen=True)
class VirtualTransport:
    """One virtual rank's end of a `Rendezvous`."""

    rendezvous: Rendezvous
    rank: int

    @property
    def mesh(self) -> Mesh:
        return self.rendezvous.mesh

    def launch(
        self, instruction: Launch, tensors: Sequence[torch.Tensor], is_spent: bool = False, reserved: Reserved | None = None
    ) -> CollectiveRendezvous:
        return self.rendezvous.launch(self.rank, instruction, tensors)

    def reserve(self, instruction: Launch, layouts: Sequence[TensorType | None]) -> Reserved | None:
        return None

    def send(self, instruction: Send, tensors: Sequence[torch.Tensor]) -> PointToPoint:
        return self.rendezvous.send(self.rank, instruction, tensors)

    def receive(self, instruction: Receive, layouts: Sequence[TensorType]) -> PointToPoint:
        return self.rendezvous.receive(self.rank, instruction, layouts)

    def is_ready(self, handle: CollectiveRendezvous | PointToPoint) -> bool:
        return not handle.missing

    def wait(self, handle: CollectiveRendezvous) -> tuple[torch.Tensor, ...]:
        return handle.results.pop(self.rank)

    def bucket_parts(self) -> Mapping[int, int]:
        return {}  # results of a bucket have memory of their own

    def settle(self, is_on: bool) -> None:
        pass

    def kept(self) -> Iterable[torch.Tensor]:
        return ()

    def complete(self, handle: PointToPoint) -> tuple[torch.Tensor, ...]:
        return handle.arrived(self.rank)


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
    return f"  rank {rank} waits at instruction {blocked.number} for {blocked.handle.wanted_by(rank)}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
