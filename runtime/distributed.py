"""Real ranks: one process each, over torch.distributed (gloo, NCCL)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import MeshError
from autopar.mesh import Mesh
from autopar.runtime._torch import all_gather_flat, has_distributed, reduce_scatter_flat
from autopar.schedule import Launch


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
    """The process groups of a mesh: one for each set of ranks that communicates.

    Creating one is collective: `create` must be called by all ranks with the same axes. `timeout`, in
    seconds, bounds every wait in these groups; None keeps torch's default.
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
        self._timeout = None if timeout is None else timedelta(seconds=timeout)
        self._groups: dict[frozenset[int], dist.ProcessGroup] = {}
        self.create(self.mesh, [self.mesh.names])

    def create(self, mesh: Mesh, axes_sets: Iterable[tuple[str, ...]]) -> None:
        """Create what is missing of the groups along each of `axes_sets` of `mesh` (this mesh, or it refined)."""
        for axes in sorted(set(axes_sets)):
            for rank in range(mesh.size):
                members = mesh.group(rank, axes)
                if frozenset(members) not in self._groups:
                    ranks = [self.global_ranks[member] for member in members]
                    group = dist.new_group(ranks, timeout=self._timeout)
                    # A rank outside the group gets a mark instead; it never asks for the group.
                    self._groups[frozenset(members)] = group  # type: ignore[assignment]

    def along(self, mesh: Mesh, axes: tuple[str, ...]) -> Group:
        """The group of this rank along `axes`; it must have been created."""
        members = mesh.group(self.rank, axes)
        ranks = sorted(self.global_ranks[member] for member in members)
        order = tuple(ranks.index(self.global_ranks[member]) for member in members)
        return Group(self._groups[frozenset(members)], len(members), order)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, in the mesh's order; any picklable object. Collective."""
        group = self.along(self.mesh, self.mesh.names)
        values: list[Any] = [None] * group.size
        dist.all_gather_object(values, value, group=group.group)
        return [values[place] for place in group.order]


@dataclass(frozen=True)
class Flight:
    """A launched collective: `finish` turns what arrived in `arriving` into the result; `source` must live until then."""

    work: dist.Work
    arriving: torch.Tensor
    source: torch.Tensor
    finish: Callable[[torch.Tensor], torch.Tensor]


class DistributedTransport:
    """This process's end of the mesh. Waits block; a peer that is lost or late raises torch's own error."""

    def __init__(self, groups: ProcessGroups, mesh: Mesh) -> None:
        self.mesh = mesh
        self.rank = groups.rank
        self._process_groups = groups
        self._groups: dict[tuple[str, ...], Group] = {}

    def launch(self, instruction: Launch, tensor: torch.Tensor) -> Flight:
        if instruction.axes not in self._groups:
            self._groups[instruction.axes] = self._process_groups.along(self.mesh, instruction.axes)
        return _START[instruction.collective](self._groups[instruction.axes], instruction, tensor)

    def is_ready(self, handle: Flight) -> bool:
        return True

    def wait(self, handle: Flight) -> torch.Tensor:
        handle.work.wait()
        return handle.finish(handle.arriving)


def _carried(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` flat and contiguous; bools travel as bytes, since not every backend carries them."""
    tensor = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor
    return tensor.contiguous().view(-1)


def _restore(tensor: torch.Tensor, shape: Iterable[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    """How a result comes back into the dtype of `tensor` and into `shape`."""

    def finish(arrived: torch.Tensor) -> torch.Tensor:
        return (arrived != 0 if tensor.dtype == torch.bool else arrived).view(tuple(shape))

    return finish


def _to_places(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Entries in the order of the axes → in the order of the process group."""
    if group.is_sorted:
        return tensor
    return tensor[[group.order.index(place) for place in range(group.size)]]


def _from_places(group: Group, finish: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return finish if group.is_sorted else lambda arrived: finish(arrived)[list(group.order)]


def _all_reduce(group: Group, instruction: Launch, tensor: torch.Tensor) -> Flight:
    arriving = _carried(tensor).clone()
    maximum = instruction.kind == "max" or tensor.dtype == torch.bool
    work = dist.all_reduce(arriving, dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM, group=group.group, async_op=True)
    assert work is not None
    return Flight(work, arriving, arriving, _restore(tensor, tensor.shape))


def _all_gather(group: Group, instruction: Launch, tensor: torch.Tensor) -> Flight:
    source = _carried(tensor)
    arriving = source.new_empty(group.size * source.numel())
    work = all_gather_flat(arriving, source, group.group)
    return Flight(work, arriving, source, _from_places(group, _restore(tensor, (group.size, *tensor.shape))))


def _reduce_scatter(group: Group, instruction: Launch, tensor: torch.Tensor) -> Flight:
    assert instruction.kind == "sum", instruction
    source = _carried(_to_places(tensor, group))
    arriving = source.new_empty(source.numel() // group.size)
    return Flight(reduce_scatter_flat(arriving, source, group.group), arriving, source, _restore(tensor, tensor.shape[1:]))


def _all_to_all(group: Group, instruction: Launch, tensor: torch.Tensor) -> Flight:
    source = _carried(_to_places(tensor, group))
    arriving = torch.empty_like(source)
    work = dist.all_to_all_single(arriving, source, group=group.group, async_op=True)
    assert work is not None
    return Flight(work, arriving, source, _from_places(group, _restore(tensor, tensor.shape)))


_START: dict[str, Callable[[Group, Launch, torch.Tensor], Flight]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}
