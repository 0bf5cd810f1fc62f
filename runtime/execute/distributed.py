"""Real ranks: one process each, over torch.distributed (gloo, NCCL)."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import MeshError, PeerError
from autopar.ir.instructions import Channel, Launch, Receive, Send
from autopar.ir.mesh import Mesh
from autopar.ir.schedule import TensorType
from autopar.runtime._torch import all_gather_flat, has_distributed, reduce_scatter_flat
from autopar.runtime.execute.buckets import BucketMemory


@contextmanager
def naming(rank: int, peers: Sequence[int], what: object) -> Generator[None]:
    """Turn torch's error, which names no rank, into a `PeerError`: `rank` waited for `peers` at `what`."""
    try:
        yield
    except (torch.OutOfMemoryError, PeerError):
        raise
    except RuntimeError as error:
        others = f"rank{'s' if len(peers) > 1 else ''} {', '.join(map(str, peers))}"
        raise PeerError(
            f"rank {rank} got no answer from {others} for {what}: {error}\n"
            f"Look at the output of {others} first: a rank died, is stuck or left early; if it is only slow, raise `timeout`"
        ) from error


@dataclass(frozen=True)
class Group:
    """A process group and, for each member in the order of the axes, its place in it (torch sorts members by rank)."""

    group: dist.ProcessGroup
    size: int
    order: tuple[int, ...]

    @property
    def is_sorted(self) -> bool:
        return self.order == tuple(range(self.size))


class ProcessGroups:
    """The process groups of a mesh: one for each set of ranks that communicates, and one for each channel.

    Creating one is collective: `create` must be called by all ranks with the same axes, `create_channels` with the
    same channels. `timeout`, in seconds, bounds every wait in these groups; None keeps torch's default.
    """

    def __init__(self, device_mesh: DeviceMesh, timeout: float | None = None) -> None:
        self.mesh = Mesh.of(device_mesh)
        self.global_ranks = tuple(int(rank) for rank in device_mesh.mesh.flatten().tolist())
        if not has_distributed():
            raise MeshError("torch.distributed is not initialised: start the script with torchrun, or use autopar.virtual_mesh(...)")
        if dist.get_rank() not in self.global_ranks:
            raise MeshError(
                f"rank {dist.get_rank()} of the world is not on the mesh ({self.mesh}), which has ranks {list(self.global_ranks)}"
            )
        self.rank = self.global_ranks.index(dist.get_rank())
        self.device_type = device_mesh.device_type
        self._timeout = None if timeout is None else timedelta(seconds=timeout)
        self._groups: dict[frozenset[int], dist.ProcessGroup] = {}
        self._channels: dict[Channel, dist.ProcessGroup] = {}
        self.create(self.mesh, [self.mesh.names])

    def create(self, mesh: Mesh, axes_sets: Iterable[tuple[str, ...]]) -> None:
        """Create what is missing of the groups along each of `axes_sets` of `mesh` (this mesh, or it refined)."""
        for axes in sorted(set(axes_sets)):
            for rank in range(mesh.size):
                members = mesh.group(rank, axes)
                if frozenset(members) not in self._groups:
                    # A rank outside the group gets a mark instead; it never asks for the group.
                    self._groups[frozenset(members)] = self._new_group(members, f"a group of ranks along {', '.join(axes)}")

    def create_channels(self, channels: Iterable[Channel]) -> None:
        """Create what is missing of the groups of `channels`, pairs of ranks of the mesh: (sender, receiver)."""
        for channel in sorted(set(channels)):
            if channel not in self._channels:
                what = f"a channel from rank {channel[0]} to rank {channel[1]}"
                # A rank outside the channel gets a mark instead; it never asks for the group.
                self._channels[channel] = self._new_group(channel, what)
                with naming(self.rank, [rank for rank in channel if rank != self.rank], what):
                    self._connect(channel)

    def _new_group(self, members: Sequence[int], what: str) -> Any:
        """All ranks of the world take part, members or not."""
        with self.naming_all(what):
            return dist.new_group([self.global_ranks[member] for member in members], timeout=self._timeout)

    def naming_all(self, what: str) -> AbstractContextManager[None]:
        """While this is entered, torch's errors become a `PeerError`: all other ranks were waited for."""
        return naming(self.rank, [rank for rank in range(self.mesh.size) if rank != self.rank], what)

    def _connect(self, channel: Channel) -> None:
        """Send one byte. NCCL blocks both ranks at their first transfer, so two that sent to each other first would never meet."""
        source, target = channel
        if self.rank == source:
            dist.send(torch.zeros(1, dtype=torch.uint8, device=self.device), self.global_ranks[target], self._channels[channel])
        elif self.rank == target:
            dist.recv(torch.zeros(1, dtype=torch.uint8, device=self.device), self.global_ranks[source], self._channels[channel])

    def channel(self, channel: Channel) -> dist.ProcessGroup:
        """The group of one of this rank's channels. Raises `KeyError` unless it was created."""
        return self._channels[channel]

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors are."""
        kind = self.device_type
        return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)

    def along(self, mesh: Mesh, axes: tuple[str, ...]) -> Group:
        """The group of this rank along `axes`; it must have been created."""
        members = mesh.group(self.rank, axes)
        ranks = sorted(self.global_ranks[member] for member in members)
        order = tuple(ranks.index(self.global_ranks[member]) for member in members)
        return Group(self._groups[frozenset(members)], len(members), order)

    def broadcast(self, tensor: torch.Tensor, mesh: Mesh, axes: tuple[str, ...], root: int) -> torch.Tensor:
        """`tensor` of the rank with index `root` along `axes`, on all of them; it is written into. Collective."""
        if mesh.size_of(axes) > 1:
            members = mesh.group(self.rank, axes)
            tensor = tensor.contiguous()
            with naming(self.rank, [rank for rank in members if rank != self.rank], f"a broadcast from rank {members[root]}"):
                dist.broadcast(tensor, self.global_ranks[members[root]], group=self._groups[frozenset(members)])
        return tensor

    def gather(self, value: Any, what: str = "what every rank has to tell before it goes on") -> list[Any]:
        """Every rank's `value`, in the mesh's order; any picklable object. Collective. `what` it is stands in the error."""
        group = self.along(self.mesh, self.mesh.names)
        values: list[Any] = [None] * group.size
        with self.naming_all(what):
            dist.all_gather_object(values, value, group=group.group)
        return [values[place] for place in group.order]

    def is_equal(self, number: int, what: str) -> bool:
        """Whether every rank has this `number`, of 62 bits at most. Collective."""
        group = self.along(self.mesh, self.mesh.names)
        largest = torch.tensor([number, -number], dtype=torch.int64, device=self.device)
        with self.naming_all(what):
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group.group)
        most, least = largest.tolist()
        return most == -least


@dataclass(frozen=True)
class Flight:
    """One memory under way: `finish` turns what arrived in `arriving` into the results; `source` must live until then."""

    work: dist.Work
    arriving: torch.Tensor
    source: torch.Tensor
    finish: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Launched:
    """A collective, with its one flight, or a transfer, with a flight for each buffer. `peers` are the other ranks."""

    instruction: Launch | Send | Receive
    peers: tuple[int, ...]
    flights: tuple[Flight, ...]


class DistributedTransport:
    """This process's end of the mesh. Waits block; a peer that is lost or late raises `PeerError`."""

    def __init__(self, groups: ProcessGroups, mesh: Mesh) -> None:
        self.mesh = mesh
        self.rank = groups.rank
        self._process_groups = groups
        # With the other ranks of each group.
        self._groups: dict[tuple[str, ...], tuple[Group, tuple[int, ...]]] = {}
        self._buckets = BucketMemory()
        # So long collectives and transfers have kept this rank waiting, since it was made.
        self.waited_seconds = 0.0

    def launch(self, instruction: Launch, tensors: Sequence[torch.Tensor]) -> Launched:
        axes = instruction.axes
        if axes not in self._groups:
            peers = tuple(rank for rank in self.mesh.group(self.rank, axes) if rank != self.rank)
            self._groups[axes] = self._process_groups.along(self.mesh, axes), peers
        group, peers = self._groups[axes]
        with naming(self.rank, peers, instruction):
            if len(tensors) > 1:
                return Launched(instruction, peers, (_START_BUCKET[instruction.collective](group, instruction, tensors, self._buckets),))
            return Launched(instruction, peers, (_START[instruction.collective](group, instruction, *tensors),))

    def send(self, instruction: Send, tensors: Sequence[torch.Tensor]) -> Launched:
        channel = instruction.channel(self.mesh, self.rank)
        flights: list[Flight] = []
        for tensor in tensors:
            carried = _carried(tensor)
            work = self._transfer(dist.isend, instruction, carried, channel, channel[1])
            flights.append(Flight(work, carried, carried, _restore(tensor.dtype, tensor.shape)))
        return Launched(instruction, channel[1:], tuple(flights))

    def receive(self, instruction: Receive, layouts: Sequence[TensorType]) -> Launched:
        channel = instruction.channel(self.mesh, self.rank)
        flights: list[Flight] = []
        for shape, dtype in layouts:
            arriving = torch.empty(math.prod(shape), dtype=_carrier(dtype), device=self._process_groups.device)
            work = self._transfer(dist.irecv, instruction, arriving, channel, channel[0])
            flights.append(Flight(work, arriving, arriving, _restore(dtype, shape)))
        return Launched(instruction, channel[:1], tuple(flights))

    def _transfer(
        self, start: Callable[..., dist.Work | None], instruction: Send | Receive, tensor: torch.Tensor, channel: Channel, peer: int
    ) -> dist.Work:
        groups = self._process_groups
        with naming(self.rank, (peer,), instruction):
            work = start(tensor, groups.global_ranks[peer], groups.channel(channel))
        assert work is not None
        return work

    def is_ready(self, handle: Launched) -> bool:
        return True

    def wait(self, handle: Launched) -> tuple[torch.Tensor, ...]:
        return self._landed(handle)

    def bucket_parts(self) -> Mapping[int, int]:
        return {address: size for bucket in self._buckets.buckets.values() for address, size in bucket.parts.items()}

    def complete(self, handle: Launched) -> tuple[torch.Tensor, ...]:
        landed = self._landed(handle)
        return landed if isinstance(handle.instruction, Receive) else ()

    def _landed(self, handle: Launched) -> tuple[torch.Tensor, ...]:
        # The group's timeout bounds each wait.
        begin = perf_counter()
        with naming(self.rank, handle.peers, handle.instruction):
            for flight in handle.flights:
                flight.work.wait()
        self.waited_seconds += perf_counter() - begin
        return tuple(chain.from_iterable(flight.finish(flight.arriving) for flight in handle.flights))


def _carrier(dtype: torch.dtype) -> torch.dtype:
    """As what values travel: bools as bytes, since not every backend carries them."""
    return torch.uint8 if dtype == torch.bool else dtype


def _carried(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` flat and contiguous, as it travels."""
    return tensor.to(_carrier(tensor.dtype)).contiguous().view(-1)


def _restore(dtype: torch.dtype, shape: Iterable[int]) -> Callable[[torch.Tensor], tuple[torch.Tensor]]:
    """How a result comes back into `dtype` and `shape`."""

    def finish(arrived: torch.Tensor) -> tuple[torch.Tensor]:
        return ((arrived != 0 if dtype == torch.bool else arrived).view(tuple(shape)),)

    return finish


def _to_places(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Entries in the order of the axes → in the order of the process group."""
    if group.is_sorted:
        return tensor
    return tensor[[group.order.index(place) for place in range(group.size)]]


def _from_places(group: Group, finish: Callable[[torch.Tensor], tuple[torch.Tensor]]) -> Callable[[torch.Tensor], tuple[torch.Tensor]]:
    return finish if group.is_sorted else lambda arrived: (finish(arrived)[0][list(group.order)],)


def _all_reduce(group: Group, instruction: Launch, tensor: torch.Tensor) -> Flight:
    arriving = _carried(tensor).clone()
    maximum = instruction.kind == "max" or tensor.dtype == torch.bool
    work = dist.all_reduce(arriving, dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM, group=group.group, async_op=True)
    assert work is not None
    return Flight(work, arriving, arriving, _restore(tensor.dtype, tensor.shape))


def _all_gather(group: Group, instruction: Launch, tensor: torch.Tensor) -> Flight:
    source = _carried(tensor)
    arriving = source.new_empty(group.size * source.numel())
    work = all_gather_flat(arriving, source, group.group)
    return Flight(work, arriving, source, _from_places(group, _restore(tensor.dtype, (group.size, *tensor.shape))))


def _reduce_scatter(group: Group, instruction: Launch, tensor: torch.Tensor) -> Flight:
    assert instruction.kind == "sum", instruction
    source = _carried(_to_places(tensor, group))
    arriving = source.new_empty(source.numel() // group.size)
    return Flight(reduce_scatter_flat(arriving, source, group.group), arriving, source, _restore(tensor.dtype, tensor.shape[1:]))


def _all_to_all(group: Group, instruction: Launch, tensor: torch.Tensor) -> Flight:
    source = _carried(_to_places(tensor, group))
    arriving = torch.empty_like(source)
    work = dist.all_to_all_single(arriving, source, group=group.group, async_op=True)
    assert work is not None
    return Flight(work, arriving, source, _from_places(group, _restore(tensor.dtype, tensor.shape)))


_START: dict[str, Callable[[Group, Launch, torch.Tensor], Flight]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}


def _reduce_bucket(group: Group, instruction: Launch, tensors: Sequence[torch.Tensor], memory: BucketMemory) -> Flight:
    """Copied into one memory, reduced in place, handed out as views."""
    bucket = memory.packed(instruction.name, tensors)
    maximum = dist.ReduceOp.MAX if instruction.kind == "max" else dist.ReduceOp.SUM
    work = dist.all_reduce(bucket.memory, maximum, group=group.group, async_op=True)
    assert work is not None
    return Flight(work, bucket.memory, bucket.memory, bucket.unpacked)


def _gather_bucket(group: Group, instruction: Launch, tensors: Sequence[torch.Tensor], memory: BucketMemory) -> Flight:
    """Copied into one memory, and out of what arrives: a rank's parts lie side by side there, and readers want each tensor's."""
    bucket = memory.packed(instruction.name, tensors)
    arriving = bucket.memory.new_empty(group.size * bucket.memory.numel())
    order = None if group.is_sorted else list(group.order)

    def finish(arrived: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = bucket.rows(arrived, group.size)
        return tuple(each.contiguous() if order is None else each[order] for each in rows)

    return Flight(all_gather_flat(arriving, bucket.memory, group.group), arriving, bucket.memory, finish)


def _scatter_bucket(group: Group, instruction: Launch, tensors: Sequence[torch.Tensor], memory: BucketMemory) -> Flight:
    """Copied into rows for each rank, of which this one's arrives summed, and is handed out as views."""
    assert instruction.kind == "sum", instruction
    bucket = memory.like(instruction.name, [tensor[0] for tensor in tensors])
    source = bucket.memory.new_zeros(group.size * bucket.memory.numel())
    for rows, tensor in zip(bucket.rows(source, group.size), tensors, strict=True):
        rows.copy_(_to_places(tensor, group))
    return Flight(reduce_scatter_flat(bucket.memory, source, group.group), bucket.memory, source, bucket.unpacked)


_START_BUCKET: dict[str, Callable[[Group, Launch, Sequence[torch.Tensor], BucketMemory], Flight]] = {
    "all_reduce": _reduce_bucket,
    "all_gather": _gather_bucket,
    "reduce_scatter": _scatter_bucket,
}
