"""What one collective of real ranks moves, and in which memory: packed on the way out, handed out as views or in order on the way in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from autopar.cost.memory_walk import PAIRED_BYTES
from autopar.ir.instructions import Launch
from autopar.runtime._torch import all_gather_flat, copy_all, reduce_scatter_flat
from autopar.runtime.execute.buckets import Bucket, BucketMemory, Layout, Reserved
from autopar.runtime.execute.by_node import ByNode
from autopar.runtime.execute.paired import add, swap
from autopar.runtime.execute.process_groups import Group, speaks_gloo
from autopar.runtime.execute.settled_work import Work

# Among whom a collective goes.
Members = Group | ByNode


@dataclass(frozen=True)
class Flight:
    """One memory that travels once it is told to `start`: `finish` turns what arrived in `arriving` into the results; `source` must live
    until then."""

    start: Callable[[], Work]
    arriving: torch.Tensor
    source: torch.Tensor
    finish: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


def flight_of(
    group: Members, instruction: Launch, tensors: Sequence[torch.Tensor], memory: BucketMemory, is_spent: bool, reserved: Reserved | None
) -> Flight:
    """Of a collective of `tensors`, a bucket in `memory`; `is_spent` and `reserved` as `Transport.launch` has them."""
    if isinstance(group, Group) and reserved is not None:
        reserved.bucket.pack(tensors, reserved.places)
        return _reduce_bucket(group, instruction, reserved.bucket, lambda _: reserved.places)
    if len(tensors) > 1:
        return _BUCKET_FLIGHTS[instruction.collective](group, instruction, tensors, memory)
    if isinstance(group, Group) and is_spent and instruction.collective == "all_reduce":
        return _reduce_in_place(group, instruction, carried(*tensors), *tensors)
    return _FLIGHTS[instruction.collective](group, instruction, *tensors)


def carrier(dtype: torch.dtype) -> torch.dtype:
    """As what values travel: bools as bytes, since not every backend carries them."""
    return torch.uint8 if dtype == torch.bool else dtype


def carried(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` flat and contiguous, as it travels: bytes alone, so what is read conjugated or negated is so in memory."""
    return tensor.to(carrier(tensor.dtype)).resolve_conj().resolve_neg().contiguous().view(-1)


def restore(dtype: torch.dtype, shape: Iterable[int]) -> Callable[[torch.Tensor], tuple[torch.Tensor]]:
    """How a result comes back into `dtype` and `shape`."""

    def finish(arrived: torch.Tensor) -> tuple[torch.Tensor]:
        return ((arrived != 0 if dtype == torch.bool else arrived).view(tuple(shape)),)

    return finish


def _to_places(tensor: torch.Tensor, group: Members) -> torch.Tensor:
    """Entries in the order of the axes → as they lie in what travels."""
    if isinstance(group, ByNode):
        return group.in_ranks(tensor).transpose(0, 1).flatten(0, 1)
    if group.is_sorted:
        return tensor
    return _taken(tensor, [group.order.index(place) for place in range(group.size)])


def _in_order(tensor: torch.Tensor, group: Members) -> torch.Tensor:
    """Entries as they lie in what travels → in the order of the axes."""
    if isinstance(group, ByNode):
        return group.by_rank(tensor).flatten(0, 1)
    return tensor if group.is_sorted else _taken(tensor, group.order)


def _from_places(group: Members, finish: Callable[[torch.Tensor], tuple[torch.Tensor]]) -> Callable[[torch.Tensor], tuple[torch.Tensor]]:
    return lambda arrived: (_in_order(finish(arrived)[0], group),)


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
    return _reduce_in_place(group, instruction, carried(tensor).clone(), tensor)


def _reduce_in_place(group: Group, instruction: Launch, arriving: torch.Tensor, tensor: torch.Tensor) -> Flight:
    """`arriving` is `tensor` as it travels, and the results are put in its place."""
    maximum = instruction.kind == "max" or tensor.dtype == torch.bool
    return Flight(partial(_reduce, arriving, maximum, group), arriving, arriving, restore(tensor.dtype, tensor.shape))


def _all_gather(group: Members, instruction: Launch, tensor: torch.Tensor) -> Flight:
    source = carried(tensor)
    arriving = source.new_empty(group.size * source.numel())
    own = arriving.view(group.size, -1)[group.place]
    own.copy_(source)
    return _gather_in_place(group, arriving, own, _from_places(group, restore(tensor.dtype, (group.size, *tensor.shape))))


def _gather_in_place(
    group: Members, arriving: torch.Tensor, own: torch.Tensor, finish: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
) -> Flight:
    """Every rank's row of `arriving`, of which its `own` is there."""
    if isinstance(group, ByNode):
        block = arriving.view(group.within.size, -1)[group.within.place]
        between = _gather_in_place(group.across, block, own, _as_it_is)
        return _in_turn(group, between, _gather_in_place(group.within, arriving, block, finish))
    if group.is_gloo and arriving.nbytes >= PAIRED_BYTES:
        return Flight(partial(swap, group.group, [own] * group.size, arriving.view(group.size, -1).unbind()), arriving, arriving, finish)
    return Flight(partial(all_gather_flat, arriving, own, group.group), arriving, arriving, finish)


def _in_turn(group: ByNode, first: Flight, second: Flight) -> Flight:
    """`second`, of what `first` brings."""

    def then() -> Work:
        first.finish(first.arriving)
        return second.start()

    return Flight(partial(group.begun, first.start, then), second.arriving, first.source, second.finish)


def _as_it_is(arrived: torch.Tensor) -> tuple[torch.Tensor]:
    return (arrived,)


def _reduce_scatter(group: Members, instruction: Launch, tensor: torch.Tensor) -> Flight:
    assert instruction.kind == "sum", instruction
    source = carried(_to_places(tensor, group))
    total = source.new_empty(source.numel() // group.size)
    return _scatter(group, source, total, restore(tensor.dtype, tensor.shape[1:]))


def _scatter(
    group: Members, source: torch.Tensor, total: torch.Tensor, finish: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
) -> Flight:
    """The sum of every rank's row for this one of `source`, in `total`."""
    if isinstance(group, ByNode):
        node = source.new_empty(group.across.size * total.numel())
        return _in_turn(group, _scatter(group.within, source, node, _as_it_is), _scatter(group.across, node, total, finish))
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
    source = carried(_to_places(tensor, group))
    arriving = torch.empty_like(source)
    return Flight(partial(_exchange, arriving, source, group), arriving, source, _from_places(group, restore(tensor.dtype, tensor.shape)))


_FLIGHTS: dict[str, Callable[[Any, Launch, torch.Tensor], Flight]] = {
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


def _gather_bucket(group: Members, instruction: Launch, tensors: Sequence[torch.Tensor], memory: BucketMemory) -> Flight:
    """Copied into this rank's row of what arrives, and out of it: a rank's parts lie side by side there, and readers want each tensor's."""
    layout = Layout.of(tuple(tensor.shape for tensor in tensors), tensors[0].dtype)
    arriving = layout.memory(tensors[0], group.size)
    own = arriving.view(group.size, -1)[group.place]
    copy_all(layout.unpacked(own), tensors)

    def finish(arrived: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(_in_order(each, group).contiguous() for each in layout.rows(arrived, group.size))

    return _gather_in_place(group, arriving, own, finish)


def _scatter_bucket(group: Members, instruction: Launch, tensors: Sequence[torch.Tensor], memory: BucketMemory) -> Flight:
    """Copied into rows for each rank, of which this one's arrives summed, and is handed out as views."""
    assert instruction.kind == "sum", instruction
    bucket = memory.like(instruction.name, [tensor[0] for tensor in tensors])
    source = bucket.layout.memory(bucket.memory, group.size)
    rows = bucket.layout.rows(source, group.size)
    if isinstance(group, ByNode):
        copy_all([group.by_rank(each) for each in rows], [group.in_ranks(tensor) for tensor in tensors])
    else:
        copy_all(rows, [_to_places(tensor, group) for tensor in tensors])
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


_BUCKET_FLIGHTS: dict[str, Callable[[Any, Launch, Sequence[torch.Tensor], BucketMemory], Flight]] = {
    "all_reduce": _pack_and_reduce,
    "all_gather": _gather_bucket,
    "reduce_scatter": _scatter_bucket,
}
