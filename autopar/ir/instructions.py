"""What a rank executes, one line each: instructions over named buffers. They print, and parse back.

RUN f3 (h_1, p_fc_weight) -> (h_2)          compute: a fragment of the LOCAL graph
LAUNCH all_reduce sum tp (h_2) -> h_3       start a collective over the ranks along `tp`
LAUNCH all_reduce sum dp (g_w, g_b) -> (w, b)   a bucket: several at once
LAUNCH all_gather copy dp by 8 (w) -> w_1   by node, of which each has eight neighbours along `dp`
SEND 0F2>1 pp=1 (h_3@2, mask@2)             start sending to the rank at coordinate 1 of `pp`, else placed as this one
RECV 0F2>1 pp=0 (h_3@2, mask@2)             start receiving from the rank at coordinate 0 of `pp`
COPY host (h_1) -> (h_1.host)               start copying to host memory, "file" or back to the "device"; all lie in one memory
WAIT h_3                                    block until what was launched under this name is complete
ADD g_w (g_w@2)                             g_w += g_w@2; the first ADD makes g_w
UPDATE (w, b) by (g_w, g_b)                 the optimizer takes these gradients of these parameters
UPDATE (w) by (g_w) -> (w.v1)               likewise, and w.v1 is a copy of what w is then
FREE h_2 h_1                                drop buffers
PAUSE                                       hand the outputs to the caller, wait for their gradients

Each knows the buffers that it `reads` and `writes`. What a LAUNCH, COPY, SEND or RECV reads is in use, and what it writes is not
there, until the WAIT; a WAIT itself has neither.

A channel is a directed pair of ranks: its k-th SEND meets its k-th RECV. A launch, COPY, SEND or RECV never blocks; a WAIT
blocks until all ends have launched. A name says nothing of itself: what a buffer is stands in the schedule's table
(`autopar.ir.schedule.Buffer`); that names of one microbatch end in its number, `h_3@2`, is for readers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

from autopar.errors import ScheduleError
from autopar.ir.mesh import Mesh

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
# Where a buffer lies.
Memory = Literal["device", "host", "file"]
# From which rank to which.
Channel = tuple[int, int]


class _NoOperands:
    reads: ClassVar[tuple[str, ...]] = ()
    writes: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True)
class Run:
    fragment: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def reads(self) -> tuple[str, ...]:
        return self.inputs

    @property
    def writes(self) -> tuple[str, ...]:
        return self.outputs

    def __str__(self) -> str:
        return f"RUN {self.fragment} ({', '.join(self.inputs)}) -> ({', '.join(self.outputs)})"


@dataclass(frozen=True)
class Launch:
    """Start a collective on the group of `n` ranks along `axes` (the first axis major), in index order.

    Of several buffers of one dtype, a bucket, each comes out as it would alone; WAIT names the first of the `targets`. An all_gather or
    reduce_scatter by `node_size` goes in two, between nodes and within them, which changes how it moves and the order of sums.

    all_reduce      x → x of the same shape; `kind` is "sum" or "max"
    all_gather      x → [n, *x.shape], entry i from rank i of the group
    reduce_scatter  [n, *shape] → shape: the sum over ranks of their entry `own index`
    all_to_all      [n, *shape] → [n, *shape]: entry i of the result is entry `own index` of rank i
    """

    collective: Collective
    kind: Literal["sum", "max", "copy"]
    axes: tuple[str, ...]
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    node_size: int = 0

    @property
    def name(self) -> str:
        """What WAIT calls it."""
        return self.targets[0]

    @property
    def reads(self) -> tuple[str, ...]:
        return self.sources

    @property
    def writes(self) -> tuple[str, ...]:
        return self.targets

    def __str__(self) -> str:
        targets = self.name if len(self.targets) == 1 else f"({', '.join(self.targets)})"
        over = ",".join(self.axes) + (f" by {self.node_size}" if self.node_size else "")
        return f"LAUNCH {self.collective} {self.kind} {over} ({', '.join(self.sources)}) -> {targets}"


@dataclass(frozen=True)
class Copy:
    """Start copying `sources`, which lie in one memory, to one in `memory`; of the two one is the device's.

    They come out as they are, views of one another too, and stay as they are: what copies give has names of its own.
    """

    memory: Memory
    sources: tuple[str, ...]
    targets: tuple[str, ...]

    @property
    def name(self) -> str:
        """What WAIT calls it."""
        return self.targets[0]

    @property
    def reads(self) -> tuple[str, ...]:
        return self.sources

    @property
    def writes(self) -> tuple[str, ...]:
        return self.targets

    def __str__(self) -> str:
        return f"COPY {self.memory} ({', '.join(self.sources)}) -> ({', '.join(self.targets)})"


@dataclass(frozen=True)
class Send:
    """Start sending `buffers` to the rank that differs from this one on `axis` alone, where it has coordinate `peer`.

    The buffers may be freed after the WAIT. `transfer` has no spaces, and is used once on each of the two ranks.
    """

    transfer: str
    axis: str
    peer: int
    buffers: tuple[str, ...]

    def channel(self, mesh: Mesh, rank: int) -> Channel:
        """(rank, receiver) when `rank` launches it. Raises `ScheduleError` when there is no such receiver."""
        return rank, _peer_of(self, mesh, rank)

    @property
    def name(self) -> str:
        """What WAIT calls it."""
        return self.transfer

    @property
    def reads(self) -> tuple[str, ...]:
        return self.buffers

    @property
    def writes(self) -> tuple[str, ...]:
        return ()

    def __str__(self) -> str:
        return f"SEND {self.transfer} {self.axis}={self.peer} ({', '.join(self.buffers)})"


@dataclass(frozen=True)
class Receive:
    """Start receiving `buffers` from the rank that differs from this one on `axis` alone, where it has coordinate `peer`.

    The buffers are there after the WAIT. They are matched with the sender's by position, not by name.
    """

    transfer: str
    axis: str
    peer: int
    buffers: tuple[str, ...]

    def channel(self, mesh: Mesh, rank: int) -> Channel:
        """(sender, rank) when `rank` launches it. Raises `ScheduleError` when there is no such sender."""
        return _peer_of(self, mesh, rank), rank

    @property
    def name(self) -> str:
        """What WAIT calls it."""
        return self.transfer

    @property
    def reads(self) -> tuple[str, ...]:
        return ()

    @property
    def writes(self) -> tuple[str, ...]:
        return self.buffers

    def __str__(self) -> str:
        return f"RECV {self.transfer} {self.axis}={self.peer} ({', '.join(self.buffers)})"


def _peer_of(instruction: Send | Receive, mesh: Mesh, rank: int) -> int:
    coordinates, sizes = mesh.coordinates(rank), dict(mesh.axes)
    axis, peer = instruction.axis, instruction.peer
    if axis not in sizes:
        raise ScheduleError(f"{instruction}: unknown axis {axis!r}; the mesh has {mesh}")
    if not 0 <= peer < sizes[axis]:
        raise ScheduleError(f"{instruction}: no rank at {axis}={peer}; the coordinates on {axis} are 0 to {sizes[axis] - 1}")
    if coordinates[axis] == peer:
        raise ScheduleError(f"{instruction}: rank {rank} itself stands at {axis}={peer}; a transfer goes to another rank")
    return mesh.rank_at({**coordinates, axis: peer})


@dataclass(frozen=True)
class Wait(_NoOperands):
    """Until the collective or copy into `target`, or the transfer of this name, is complete."""

    target: str

    def __str__(self) -> str:
        return f"WAIT {self.target}"


@dataclass(frozen=True)
class Add:
    """target += source. The first into `target` makes it: a contiguous copy that shares memory with nothing.

    No other instruction writes into memory that is there already.
    """

    target: str
    source: str

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.source,)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.target,)

    def __str__(self) -> str:
        return f"ADD {self.target} ({self.source})"


@dataclass(frozen=True)
class Update:
    """The optimizer takes the `gradients` of `parameters`, in their order; neither is read afterwards.

    It updates them at once, or keeps the gradients: until all ranks have agreed on something (a norm, that all are finite), or for
    more calls to add theirs. Where it has `versions` it updates them at once, and these are copies of the updated parameters: what comes
    next computes with them, and may update again.
    """

    parameters: tuple[str, ...]
    gradients: tuple[str, ...]
    versions: tuple[str, ...] = ()

    @property
    def reads(self) -> tuple[str, ...]:
        return self.gradients

    @property
    def writes(self) -> tuple[str, ...]:
        return (*self.parameters, *self.versions)

    def __str__(self) -> str:
        versions = f" -> ({', '.join(self.versions)})" if self.versions else ""
        return f"UPDATE ({', '.join(self.parameters)}) by ({', '.join(self.gradients)}){versions}"


@dataclass(frozen=True)
class Free(_NoOperands):
    buffers: tuple[str, ...]

    def __str__(self) -> str:
        return f"FREE {' '.join(self.buffers)}"


@dataclass(frozen=True)
class Pause(_NoOperands):
    def __str__(self) -> str:
        return "PAUSE"


# What WAIT ends.
Flight = Launch | Copy | Send | Receive
Instruction = Run | Launch | Copy | Send | Receive | Wait | Add | Update | Free | Pause


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(", ") if name)


# How each instruction reads, by its first word, and what the groups of the pattern make.
_FORMS: dict[str, tuple[re.Pattern[str], Callable[..., Instruction]]] = {
    "RUN": (
        re.compile(r"RUN (\S+) \((.*?)\) -> \((.*?)\)$"),
        lambda fragment, inputs, outputs: Run(fragment, _names(inputs), _names(outputs)),
    ),
    "LAUNCH": (
        re.compile(
            r"LAUNCH (all_reduce|all_gather|reduce_scatter|all_to_all) (sum|max|copy) (\S+)(?: by (\d+))? \((.+?)\) -> \(?(.+?)\)?$"
        ),
        lambda collective, kind, axes, node_size, sources, targets: Launch(
            collective, kind, tuple(axes.split(",")), _names(sources), _names(targets), int(node_size or 0)
        ),
    ),
    "COPY": (
        re.compile(r"COPY (device|host|file) \((.+?)\) -> \((.+?)\)$"),
        lambda memory, sources, targets: Copy(memory, _names(sources), _names(targets)),
    ),
    "SEND": (
        re.compile(r"SEND (\S+) (\S+)=(\d+) \((.*?)\)$"),
        lambda transfer, axis, peer, buffers: Send(transfer, axis, int(peer), _names(buffers)),
    ),
    "RECV": (
        re.compile(r"RECV (\S+) (\S+)=(\d+) \((.*?)\)$"),
        lambda transfer, axis, peer, buffers: Receive(transfer, axis, int(peer), _names(buffers)),
    ),
    "WAIT": (re.compile(r"WAIT (\S+)$"), Wait),
    "ADD": (re.compile(r"ADD (\S+) \((\S+)\)$"), Add),
    "UPDATE": (
        re.compile(r"UPDATE \((.+?)\) by \((.+?)\)(?: -> \((.+?)\))?$"),
        lambda parameters, gradients, versions: Update(_names(parameters), _names(gradients), _names(versions or "")),
    ),
    "FREE": (re.compile(r"FREE (.+)$"), lambda buffers: Free(tuple(buffers.split(" ")))),
    "PAUSE": (re.compile(r"PAUSE$"), Pause),
}


def parse(text: str) -> tuple[Instruction, ...]:
    """Read back what `str(schedule)` printed. Raises `ScheduleError` naming the first line that is no instruction."""
    instructions: list[Instruction] = []
    for number, line in enumerate(text.strip().splitlines(), 1):
        line = line.strip()
        pattern, build = _FORMS.get(line.split(" ", 1)[0], (None, None))
        match = pattern.match(line) if pattern else None
        if match is None or build is None:
            raise ScheduleError(f"line {number} is no instruction: {line!r}")
        instructions.append(build(*match.groups()))
    return tuple(instructions)
