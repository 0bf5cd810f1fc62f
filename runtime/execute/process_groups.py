"""Groups and channels of processes over torch.distributed (gloo, NCCL), and errors that name who does not answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import InputError, MeshError, PeerError
from autopar.ir.instructions import Channel
from autopar.ir.mesh import Mesh
from autopar.runtime._torch import has_distributed
from autopar.runtime.execute.group_cache import agree, distrust, known_or_made, number_of_module
from autopar.runtime.execute.host_group import ApartError, host_group
from autopar.runtime.execute.recorder import noted

T = TypeVar("T")


@contextmanager
def naming(rank: int, peers: Sequence[int], what: object) -> Generator[None]:
    """Turn torch's error, which names no rank, into a `PeerError`: `rank` waited for `peers` at `what`."""
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError, PeerError):  # what a kernel broke is no peer's fault
        raise
    except RuntimeError as error:
        distrust()
        others = f"rank{'s' if len(peers) > 1 else ''} {', '.join(map(str, peers))}"
        text = (
            f"rank {rank} got no answer from {others} for {what}: {error}\n"
            f"Look at the output of {others} first: a rank died, is stuck, left early, or does not make this call, which is for "
            "all (saving, evaluation and backward are, too); if it is only slow, raise `timeout`. This run cannot go on: start it again, "
            "from a checkpoint"
        )
        raise noted(PeerError(text)) from error


@dataclass(frozen=True)
class Group:
    """A process group and, for each member in the order of the axes, its place in it (torch sorts members by rank)."""

    group: dist.ProcessGroup
    size: int
    order: tuple[int, ...]
    is_gloo: bool = False

    @property
    def place(self) -> int:
        """This rank's place in the process group."""
        return dist.get_rank(self.group)

    @property
    def is_sorted(self) -> bool:
        return self.order == tuple(range(self.size))


def nodes_of(members: tuple[int, ...], rank: int, node_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of a group of ranks, of which so many neighbours are on a node, those that stand as `rank` does on each, and those on its own."""
    node, place = divmod(members.index(rank), node_size)
    return members[place::node_size], members[node * node_size : (node + 1) * node_size]


def speaks_gloo(group: dist.ProcessGroup) -> bool:
    """Whether tensors of a CPU go over gloo in it."""
    return "cpu:gloo" in dist.get_backend_config(group)


class ProcessGroups:
    """The process groups of a mesh: one for each set of ranks that communicates, and one for each channel. Those of equal ranks and
    timeout are shared by all modules; see `group_cache`.

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
        self.device_type = kind = device_mesh.device_type
        # Where this rank's tensors are: each thread has a current device of its own, so it is asked for here, once.
        self.device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        # Whether waits last until tensors are let go of, while memory is measured.
        self.are_settled = False
        self._timeout = None if timeout is None else timedelta(seconds=timeout)
        self._groups: dict[frozenset[int], dist.ProcessGroup] = {}
        self._channels: dict[Channel, dist.ProcessGroup] = {}
        self.create(self.mesh, [self.mesh.names])
        key = "host", tuple(sorted(self.global_ranks)), self._timeout
        everyone = self.along(self.mesh, self.mesh.names)
        with self.naming_all("the group by which ranks speak"):
            make = partial(host_group, everyone.group, sorted(self.global_ranks), self.device, self._timeout)
            self._host = known_or_made(key, make)
        # Of all that have process groups.
        self.number = number_of_module(lambda number: self.maxima([number], "the number of modules")[0])

    def create(self, mesh: Mesh, axes_sets: Iterable[tuple[str, ...]], by_node: Iterable[tuple[tuple[str, ...], int]] = ()) -> None:
        """Create what is missing of the groups along each of `axes_sets` of `mesh` (this mesh, or it refined), and of those `by_node`:
        axes, and how many neighbours along them are on a node."""
        wanted: dict[frozenset[int], str] = {}
        for axes in sorted(set(axes_sets)):
            for rank in range(mesh.size):
                wanted.setdefault(frozenset(mesh.group(rank, axes)), f"a group of ranks along {', '.join(axes)}")
        for axes, node_size in sorted(set(by_node)):
            for rank in range(mesh.size):
                for members in nodes_of(mesh.group(rank, axes), rank, node_size):
                    wanted.setdefault(frozenset(members), f"a group of ranks along {', '.join(axes)} by {node_size}")
        missing = {members: what for members, what in wanted.items() if members not in self._groups}
        self._agree(missing)
        for members, what in missing.items():
            # A rank outside the group gets a mark instead; it never asks for the group.
            key = "group", self._global(sorted(members)), self._timeout
            self._groups[members] = known_or_made(key, partial(self._new_group, sorted(members), what))

    def create_channels(self, channels: Iterable[Channel]) -> None:
        """Create what is missing of the groups of `channels`, pairs of ranks of the mesh: (sender, receiver)."""
        missing = [channel for channel in sorted(set(channels)) if channel not in self._channels]
        self._agree(missing)
        for channel in missing:
            self._channels[channel] = known_or_made(("channel", self._global(channel), self._timeout), partial(self._new_channel, channel))

    def _global(self, members: Iterable[int]) -> tuple[int, ...]:
        """The ranks of the world that ranks of this mesh are."""
        return tuple(self.global_ranks[member] for member in members)

    def _agree(self, missing: Collection[object]) -> None:
        """Before what is `missing`, on all ranks alike, is looked for among what is known."""
        if missing:
            with self.naming_all("an agreement on process groups"):
                agree(self.device)

    def _new_channel(self, channel: Channel) -> Any:
        what = f"a channel from rank {channel[0]} to rank {channel[1]}"
        # A rank outside the channel gets a mark instead; it never asks for the group.
        group = self._new_group(channel, what)
        with naming(self.rank, [rank for rank in channel if rank != self.rank], what):
            self._connect(channel, group)
        return group

    def _new_group(self, members: Sequence[int], what: str) -> Any:
        """All ranks of the world take part, members or not."""
        with self.naming_all(what):
            return dist.new_group(list(self._global(members)), timeout=self._timeout)

    def naming_all(self, what: str) -> AbstractContextManager[None]:
        """While this is entered, torch's errors become a `PeerError`: all other ranks were waited for."""
        return naming(self.rank, [rank for rank in range(self.mesh.size) if rank != self.rank], what)

    def _connect(self, channel: Channel, group: Any) -> None:
        """Send one byte. NCCL blocks both ranks at their first transfer, so two that sent to each other first would never meet."""
        source, target = channel
        if self.rank == source:
            dist.send(torch.zeros(1, dtype=torch.uint8, device=self.device), self.global_ranks[target], group)
        elif self.rank == target:
            dist.recv(torch.zeros(1, dtype=torch.uint8, device=self.device), self.global_ranks[source], group)

    def channel(self, channel: Channel) -> dist.ProcessGroup:
        """The group of one of this rank's channels. Raises `KeyError` unless it was created."""
        return self._channels[channel]

    def along(self, mesh: Mesh, axes: tuple[str, ...]) -> Group:
        """The group of this rank along `axes`; it must have been created."""
        return self._of(mesh.group(self.rank, axes))

    def by_node(self, mesh: Mesh, axes: tuple[str, ...], node_size: int) -> tuple[Group, Group]:
        """Of this rank's group along `axes`, of which so many neighbours are on a node, those that stand alike on each, and those on its
        own; they must have been created."""
        across, within = nodes_of(mesh.group(self.rank, axes), self.rank, node_size)
        return self._of(across), self._of(within)

    def _of(self, members: tuple[int, ...]) -> Group:
        ranks = sorted(self.global_ranks[member] for member in members)
        order = tuple(ranks.index(self.global_ranks[member]) for member in members)
        group = self._groups[frozenset(members)]
        return Group(group, len(members), order, self.device_type == "cpu" and speaks_gloo(group))

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
        return self._in_order(self._spoken(what, lambda: self._host.gather(value, what)))

    def is_equal(self, number: int, what: str, place: str = "") -> bool:
        """Whether every rank has this `number`, of 62 bits at most. Collective. `place` is what `what` is in an error, with more of it."""
        most, least = self.maxima([number, -number], what, place)
        return most == -least

    def expect_equal(self, number: int, what: str, place: str = "") -> None:
        """See `World.expect_equal`."""
        self._spoken(what, lambda: self._host.expect(number, what, place))

    @property
    def is_expecting(self) -> bool:
        return bool(self._host.expected)

    def hear(self) -> None:
        self._spoken(self._host.expected, self._host.hear)

    def give_up(self) -> None:
        self._host.give_up()

    def maxima(self, numbers: Sequence[int], what: str, place: str = "") -> list[int]:
        """Of each number the largest that a rank has. Collective: at every step, so by the host, which waits for no device."""
        return self._spoken(what, lambda: self._host.maxima(numbers, what, place))

    def _in_order(self, values: list[T]) -> list[T]:
        """What ranks have, in the mesh's order."""
        return [values[place] for place in self.along(self.mesh, self.mesh.names).order]

    def _spoken(self, what: str, speak: Callable[[], T]) -> T:
        """What ranks say to each other by `speak`. Raises `InputError` on all where they are not at the same thing."""
        try:
            with self.naming_all(what):
                return speak()
        except ApartError as apart:
            ranks: dict[str, list[int]] = {}
            for rank, place in enumerate(self._in_order([*apart.places])):
                ranks.setdefault(place, []).append(rank)
        found = "".join(f"\n  rank{'s' * (len(at) > 1)} {', '.join(map(str, at))}: {place}" for place, at in ranks.items())
        error = InputError(
            f"ranks are not at the same place of the training loop:{found}\nEvery rank makes each call, those that evaluate among them, "
            "and each backward, where a stage trains nothing, too. One that would leave something out by what it alone sees (`if not "
            "math.isfinite(loss): continue`) asks the others first, by torch.distributed.all_reduce, so that all leave it out, or none"
        )
        error.is_told = True
        raise error
