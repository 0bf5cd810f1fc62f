"""Collectives and transfers of real ranks: one process each, over torch.distributed (gloo, NCCL)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from time import perf_counter
from typing import Literal

import torch
import torch.distributed as dist

from autopar.cost.memory_walk import PAIRED_BYTES
from autopar.ir.instructions import Channel, Launch, Receive, Send
from autopar.ir.mesh import Mesh
from autopar.ir.schedule import TensorType
from autopar.runtime._torch import all_gather_flat, copy_all, reduce_scatter_flat
from autopar.runtime.execute.buckets import Bucket, BucketMemory, Layout, Reserved
from autopar.runtime.execute.paired import add, swap
from autopar.runtime.execute.process_groups import Group, ProcessGroups, naming, speaks_gloo
from autopar.runtime.execute.settled_work import SettledWork, Work


@dataclass(frozen=True)
class Flight:
    """One memory that travels once it is told to `start`: `finish` turns what arrived in `arriving` into the results; `source` must live
    until then."""

    start: Callable[[], Work]
    arriving: torch.Tensor
    source: torch.Tensor
    finish: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


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
        self._groups: dict[tuple[str, ...], tuple[Group, tuple[int, ...]]] = {}
        self._buckets = BucketMemory()
        # For how long collectives and transfers have kept this rank waiting, since it was made.
        self.waited_seconds = 0.0

    def launch(
        self, instruction: Launch, tensors: Sequence[torch.Tensor], is_spent: bool = False, reserved: Reserved | None = None
    ) -> Launched:
        axes = instruction.axes
        if axes not in self._groups:
            peers = tuple(rank for rank in self.mesh.group(self.rank, axes) if rank != self.rank)
            self._groups[axes] = self._process_groups.along(self.mesh, axes), peers
        group, peers = self._groups[axes]
        with naming(self.rank, peers, instruction):
            return self._start(instruction, peers, [self._flight(group, instruction, tensors, is_spent, reserved)])

    def _flight(
        self, group: Group, instruction: Launch, tensors: Sequence[torch.Tensor], is_spent: bool, reserved: Reserved | None
    ) -> Flight:
        if reserved is not None:
            reserved.bucket.pack(tensors, reserved.places)
            return _reduce_bucket(group, instruction, reserved.bucket, lambda _: reserved.places)
        if len(tensors) > 1:
            return _BUCKET_FLIGHTS[instruction.collective](group, instruction, tensors, self._buckets)
        if is_spent and instruction.collective == "all_reduce":
            return _reduce_in_place(group, instruction, _carried(*tensors), *tensors)
        return _FLIGHTS[instruction.collective](group, instruction, *tensors)

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
            carried = _carried(tensor)
            start = partial(self._transfer, dist.isend, instruction, carried, channel, channel[1])
            flights.append(Flight(start, carried, carried, _restore(tensor.dtype, tensor.shape)))
        return self._start(instruction, channel[1:], flights)

    def receive(self, instruction: Receive, layouts: Sequence[TensorType]) -> Launched:
        channel = instruction.channel(self.mesh, self.rank)
        flights: list[Flight] = []
        for shape, dtype in layouts:
            arriving = torch.empty(math.prod(shape), dtype=_carrier(dtype), device=self._process_groups.device)
            start = partial(self._transfer, dist.irecv, instruction, arriving, channel, channel[0])
            flights.append(Flight(start, arriving, arriving, _restore(dtype, shape)))
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


def _carrier(dtype: torch.dtype) -> torch.dtype:
    """As what values travel: bools as bytes, since not every backend carries them."""
    return torch.uint8 if dtype == torch.bool else dtype


def _carried(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` flat and contiguous, as it travels: bytes alone, so what is read conjugated or negated is so in memory."""
    return tensor.to(_carrier(tensor.dtype)).resolve_conj().resolve_neg().contiguous().view(-1)


def _restore(dtype: torch.dtype, shape: Iterable[int]) -> Callable[[torch.Tensor], tuple[torch.Tensor]]:
    """How a result comes back into `dtype` and `shape`."""

    def finish(arrived: torch.Tensor) -> tuple[torch.Tensor]:
        return ((arrived != 0 if dtype == torch.bool else arrived).view(tuple(shape)),)

    return finish


def _to_places(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Entries in the order of the axes → in the order of the process group."""
    if group.is_sorted:
        return tensor
    return _taken(tensor, [group.order.index(place) for place in range(group.size)])


def _from_places(group: Group, finish: Callable[[torch.Tensor], tuple[torch.Tensor]]) -> Callable[[torch.Tensor], tuple[torch.Tensor]]:
    return finish if group.is_sorted else lambda arrived: (_taken(finish(arrived)[0], group.order),)


def _taken(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """`tensor[order]` without an index in memory, which on a GPU would be copied there, and the host wait for that."""
    return torch.stack([tensor[place] for place in order])


def _reduce(memory: torch.Tensor, maximum: bool, group: Group) -> Work:
    work = dist.all_reduce(memory, dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM, group=group.group, async_op=True)
    assert work is not None
    return work


def _exchange(arriving: torch.Tensor, source: torch.Tensor, group: Group) -> Work:
    work = dist.all_to_all_single(arriving, source, group=group.group, async_op=True)
    assert work is not None
    return work


def _all_reduce(group: Group, instruction: Launch, tensor: torch.Tensor) -> Flight:
    return _reduce_in_place(group, instruction, _carried(tensor).clone(), tensor)


def _reduce_in_place(group: Group, instruction: Launch, arriving: torch.Tensor, tensor: torch.Tensor) -> Flight:
    """`arriving` is `tensor` as it travels, and the results are put in its place."""
    maximum = instruction.kind == "max" or tensor.dtype == torch.bool
    return Flight(partial(_reduce, arriving, maximum, group), arriving, arriving, _restore(tensor.dtype, tensor.shape))


def _all_gather(group: Group, instruction: Launch, tensor: torch.Tensor) -> Flight:
    source = _carried(tensor)
    arriving = source.new_empty(group.size * source.numel())
    own = arriving.view(group.size, -1)[group.place]
    own.copy_(source)
    return _gather_in_place(group, arriving, own, _from_places(group, _restore(tensor.dtype, (group.size, *tensor.shape))))


def _gather_in_place(
    group: Group, arriving: torch.Tensor, own: torch.Tensor, finish: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
) -> Flight:
    """Every rank's row of `arriving`, of which its `own` is there."""
    if group.is_gloo and arriving.nbytes >= PAIRED_BYTES:
        return Flight(partial(swap, group.group, [own] * group.size, arriving.view(group.size, -1).unbind()), arriving, arriving, finish)
    return Flight(partial(all_gather_flat, arriving, own, group.group), arriving, arriving, finish)


def _reduce_scatter(group: Group, instruction: Launch, tensor: torch.Tensor) -> Flight:
    assert instruction.kind == "sum", instruction
    source = _carried(_to_places(tensor, group))
    total = source.new_empty(source.numel() // group.size)
    return _scatter(group, source, total, _restore(tensor.dtype, tensor.shape[1:]))


def _scatter(group: Group, source: torch.Tensor, total: torch.Tensor, finish: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]) -> Flight:
    """The sum of every rank's row for this one of `source`, in `total`."""
    if not group.is_gloo:
        return Flight(partial(reduce_scatter_flat, total, source, group.group), total, source, finish)
    rows = source.view(group.size, -1).unbind()
    if source.nbytes < PAIRED_BYTES:
        arriving = torch.empty_like(source)
        parts = arriving.view(group.size, -1).unbind()
        return Flight(partial(_exchange, arriving, source, group), arriving, source, lambda _: finish(add(parts, total)))
    others = source.new_empty(group.size - 1, total.numel())
    parts = [*others[: group.place], rows[group.place], *others[group.place :]]
    return Flight(partial(swap, group.group, rows, parts), others, source, lambda _: finish(add(parts, total)))


def _all_to_all(group: Group, instruction: Launch, tensor: torch.Tensor) -> Flight:
    source = _carried(_to_places(tensor, group))
    arriving = torch.empty_like(source)
    return Flight(partial(_exchange, arriving, source, group), arriving, source, _from_places(group, _restore(tensor.dtype, tensor.shape)))


_FLIGHTS: dict[str, Callable[[Group, Launch, torch.Tensor], Flight]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}


def _pack_and_reduce(group: Group, instruction: Launch, tensors: Sequence[torch.Tensor], memory: BucketMemory) -> Flight:
    """Copied into one memory, reduced in place, handed out as views."""
    bucket = memory.packed(instruction.name, tensors)
    return _reduce_bucket(group, instruction, bucket, bucket.layout.unpacked)


def _reduce_bucket(group: Group, instruction: Launch, bucket: Bucket, finish: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]) -> Flight:
    return Flight(partial(_reduce, bucket.memory, instruction.kind == "max", group), bucket.memory, bucket.memory, finish)


def _gather_bucket(group: Group, instruction: Launch, tensors: Sequence[torch.Tensor], memory: BucketMemory) -> Flight:
    """Copied into this rank's row of what arrives, and out of it: a rank's parts lie side by side there, and readers want each tensor's."""
    layout = Layout.of(tuple(tensor.shape for tensor in tensors), tensors[0].dtype)
    arriving = layout.memory(tensors[0], group.size)
    own = arriving.view(group.size, -1)[group.place]
    copy_all(layout.unpacked(own), tensors)

    def finish(arrived: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = layout.rows(arrived, group.size)
        return tuple(each.contiguous() if group.is_sorted else _taken(each, group.order) for each in rows)

    return _gather_in_place(group, arriving, own, finish)


def _scatter_bucket(group: Group, instruction: Launch, tensors: Sequence[torch.Tensor], memory: BucketMemory) -> Flight:
    """Copied into rows for each rank, of which this one's arrives summed, and is handed out as views."""
    assert instruction.kind == "sum", instruction
    bucket = memory.like(instruction.name, [tensor[0] for tensor in tensors])
    source = bucket.layout.memory(bucket.memory, group.size)
    copy_all(bucket.layout.rows(source, group.size), [_to_places(tensor, group) for tensor in tensors])
    return _scatter(group, source, bucket.memory, bucket.layout.unpacked)


def measurable(
    collective: Literal["all_gather", "reduce_scatter"], whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup
) -> Callable[[], object]:
    """What ranks of a CPU do for one between `whole`, flat, and each one's `part` of it, begun and waited for, for measurements."""
    members = Group(group, dist.get_world_size(group), tuple(range(dist.get_world_size(group))), speaks_gloo(group))

    def run() -> object:
        if collective == "all_gather":
            flight = _gather_in_place(members, whole, whole.view(members.size, -1)[members.place], lambda arrived: (arrived,))
        else:
            flight = _scatter(members, whole, part, lambda arrived: (arrived,))
        flight.start().wait()
        return flight.finish(flight.arriving)

    return run


_BUCKET_FLIGHTS: dict[str, Callable[[Group, Launch, Sequence[torch.Tensor], BucketMemory], Flight]] = {
    "all_reduce": _pack_and_reduce,
    "all_gather": _gather_bucket,
    "reduce_scatter": _scatter_bucket,
}
