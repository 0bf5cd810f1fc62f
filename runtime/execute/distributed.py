"""Collectives and transfers of real ranks: one process each, over torch.distributed (gloo, NCCL)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from time import perf_counter

import torch
import torch.distributed as dist

from autopar.ir.instructions import Channel, Launch, Receive, Send
from autopar.ir.mesh import Mesh
from autopar.ir.schedule import TensorType
from autopar.runtime.execute.buckets import BucketMemory, Reserved
from autopar.runtime.execute.by_node import ByNode
from autopar.runtime.execute.flights import Flight, Members, carried, carrier, flight_of, restore
from autopar.runtime.execute.process_groups import ProcessGroups, naming
from autopar.runtime.execute.settled_work import SettledWork, Work


@dataclass(frozen=True)
class Launched:
    """A collective, with its one flight, or a transfer, with a flight for each buffer. `peers` are the other ranks."""

    instruction: Launch | Send | Receive
    peers: tuple[int, ...]
    flights: tuple[Flight, ...]
    works: tuple[Work, ...]


class DistributedTransport:
    """This process's end of the mesh. Waits block; a peer that is lost or late raises `PeerError`."""

    def __init__(self, groups: ProcessGroups, mesh: Mesh) -> None:
        self.mesh = mesh
        self.rank = groups.rank
        self._process_groups = groups
        # With the other ranks of each group.
        self._groups: dict[tuple[tuple[str, ...], int], tuple[Members, tuple[int, ...]]] = {}
        self._buckets = BucketMemory()
        # For how long collectives and transfers have kept this rank waiting, since it was made.
        self.waited_seconds = 0.0

    def launch(
        self, instruction: Launch, tensors: Sequence[torch.Tensor], is_spent: bool = False, reserved: Reserved | None = None
    ) -> Launched:
        key = instruction.axes, instruction.node_size
        if key not in self._groups:
            peers = tuple(rank for rank in self.mesh.group(self.rank, instruction.axes) if rank != self.rank)
            self._groups[key] = self._members(*key), peers
        group, peers = self._groups[key]
        with naming(self.rank, peers, instruction):
            return self._start(instruction, peers, [flight_of(group, instruction, tensors, self._buckets, is_spent, reserved)])

    def _members(self, axes: tuple[str, ...], node_size: int) -> Members:
        group = self._process_groups.along(self.mesh, axes)
        if not node_size or not group.is_sorted:  # of ranks in another order it would have to be known which rows are whose
            return group
        stream = torch.cuda.Stream(self._process_groups.device) if self._process_groups.device_type == "cuda" else None
        return ByNode(*self._process_groups.by_node(self.mesh, axes, node_size), stream)

    def _start(self, instruction: Launch | Send | Receive, peers: tuple[int, ...], flights: Sequence[Flight]) -> Launched:
        if self._process_groups.are_settled:
            works: list[Work] = [SettledWork(each.start, each.arriving, each.source) for each in flights]
        else:
            works = [each.start() for each in flights]
        return Launched(instruction, peers, tuple(flights), tuple(works))

    def reserve(self, instruction: Launch, layouts: Sequence[TensorType | None]) -> Reserved | None:
        """Of a bucket that is reduced where it lies. One operand alone may lie anywhere."""
        known = [each for each in layouts if each is not None]
        is_bucket = instruction.collective == "all_reduce" and len(layouts) == len(known) > 1
        return self._buckets.reserved(instruction.name, known, self._process_groups.device) if is_bucket else None

    def send(self, instruction: Send, tensors: Sequence[torch.Tensor]) -> Launched:
        channel = instruction.channel(self.mesh, self.rank)
        flights: list[Flight] = []
        for tensor in tensors:
            moving = carried(tensor)
            start = partial(self._transfer, dist.isend, instruction, moving, channel, channel[1])
            flights.append(Flight(start, moving, moving, restore(tensor.dtype, tensor.shape)))
        return self._start(instruction, channel[1:], flights)

    def receive(self, instruction: Receive, layouts: Sequence[TensorType]) -> Launched:
        channel = instruction.channel(self.mesh, self.rank)
        flights: list[Flight] = []
        for shape, dtype in layouts:
            arriving = torch.empty(math.prod(shape), dtype=carrier(dtype), device=self._process_groups.device)
            start = partial(self._transfer, dist.irecv, instruction, arriving, channel, channel[0])
            flights.append(Flight(start, arriving, arriving, restore(dtype, shape)))
        return self._start(instruction, channel[:1], flights)

    def _transfer(
        self, start: Callable[..., dist.Work | None], instruction: Send | Receive, tensor: torch.Tensor, channel: Channel, peer: int
    ) -> dist.Work:
        groups = self._process_groups
        with naming(self.rank, (peer,), instruction):
            work = start(tensor, groups.global_ranks[peer], groups.channel(channel))
        assert work is not None
        return work

    def settle(self, is_on: bool) -> None:
        # Gloo's threads alone let go late; what streams of a device use, its allocator knows.
        self._process_groups.are_settled = is_on and self._process_groups.device_type == "cpu"

    def is_ready(self, handle: Launched) -> bool:
        return True

    def wait(self, handle: Launched) -> tuple[torch.Tensor, ...]:
        return self._landed(handle)

    def bucket_parts(self) -> Mapping[int, int]:
        return self._buckets.parts

    def kept(self) -> Iterable[torch.Tensor]:
        return (bucket.memory for bucket in self._buckets.buckets.values())

    def complete(self, handle: Launched) -> tuple[torch.Tensor, ...]:
        landed = self._landed(handle)
        return landed if isinstance(handle.instruction, Receive) else ()

    def _landed(self, handle: Launched) -> tuple[torch.Tensor, ...]:
        # The group's timeout bounds each wait.
        begin = perf_counter()
        with naming(self.rank, handle.peers, handle.instruction):
            for work in handle.works:
                work.wait()
        self.waited_seconds += perf_counter() - begin
        return tuple(chain.from_iterable(flight.finish(flight.arriving) for flight in handle.flights))
