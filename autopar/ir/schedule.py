"""What a rank executes: a tuple of instructions over named buffers. Prints, parses, hashes.

RUN f3 (h_1, p_fc_weight) -> (h_2)          compute: a fragment of the LOCAL graph
LAUNCH all_reduce sum tp (h_2) -> h_3       start a collective over the ranks along `tp`
SEND 0F2>1 pp=1 (h_3@2, mask@2)             start sending to the rank at coordinate 1 of `pp`, else placed as this one
RECV 0F2>1 pp=0 (h_3@2, mask@2)             start receiving from the rank at coordinate 0 of `pp`
WAIT h_3                                    block until what was launched under this name is complete
ADD g_w (g_w@2)                             g_w += g_w@2; the first ADD makes g_w
FREE h_2 h_1                                drop buffers
PAUSE                                       hand the outputs to the caller, wait for their gradients

A channel is a directed pair of ranks: its k-th SEND meets its k-th RECV. A launch, SEND or RECV never blocks; a WAIT
blocks until all ends have launched. In `h_3@2`, 2 is the microbatch.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch.fx import GraphModule

from autopar.errors import ScheduleError
from autopar.ir.mesh import Mesh
from autopar.ir.program import Input, Output, Signature

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
# From which rank to which.
Channel = tuple[int, int]
# Shape and dtype of a buffer.
Layout = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Run:
    fragment: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __str__(self) -> str:
        return f"RUN {self.fragment} ({', '.join(self.inputs)}) -> ({', '.join(self.outputs)})"


@dataclass(frozen=True)
class Launch:
    """Start a collective on the group of `n` ranks along `axes` (the first axis major), in index order.

    all_reduce      x → x of the same shape; `kind` is "sum" or "max"
    all_gather      x → [n, *x.shape], entry i from rank i of the group
    reduce_scatter  [n, *shape] → shape: the sum over ranks of their entry `own index`
    all_to_all      [n, *shape] → [n, *shape]: entry i of the result is entry `own index` of rank i
    """

    collective: Collective
    kind: Literal["sum", "max", "copy"]
    axes: tuple[str, ...]
    source: str
    target: str

    def __str__(self) -> str:
        return f"LAUNCH {self.collective} {self.kind} {','.join(self.axes)} ({self.source}) -> {self.target}"


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
class Wait:
    """Until the collective into `target`, or the transfer of this name, is complete."""

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

    def __str__(self) -> str:
        return f"ADD {self.target} ({self.source})"


@dataclass(frozen=True)
class Free:
    buffers: tuple[str, ...]

    def __str__(self) -> str:
        return f"FREE {' '.join(self.buffers)}"


@dataclass(frozen=True)
class Pause:
    def __str__(self) -> str:
        return "PAUSE"


Instruction = Run | Launch | Send | Receive | Wait | Add | Free | Pause


@dataclass(frozen=True)
class Fragment:
    """A piece of the LOCAL graph between two cuts, compiled once however often it runs.

    `module` takes its inputs in order and returns a tuple.
    """

    name: str
    module: GraphModule
    num_uses: int = 1


class Span(NamedTuple):
    """The instructions from `begin` up to `end` are those of a pipeline action, `2F0`."""

    action: str
    begin: int
    end: int


@dataclass(frozen=True)
class Schedule:
    """The instructions of one rank, or of all that run the same ones, and the fragments they run.

    On a dp × tp mesh there is one schedule for all ranks, with pipeline stages one for the ranks of each. Buffers
    named in `inputs` are there before the first instruction, in the order of `signature.inputs`; those in `outputs`
    are left at the end (loss and user outputs: at PAUSE), in the order of `signature.outputs`. What differs from microbatch
    to microbatch is listed once for each, and only what the rank has to do with is listed.
    Tangents are there after PAUSE only, or from the start where there is none. `shapes` has what is known of buffers: those
    that RECV fills must be there, since nothing else says how large they are. `spans` are the actions of a pipeline, in order.
    """

    instructions: tuple[Instruction, ...]
    fragments: dict[str, Fragment]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    signature: Signature
    shapes: dict[str, Layout] = field(default_factory=dict)
    spans: tuple[Span, ...] = ()

    def __str__(self) -> str:
        return "\n".join(str(instruction) for instruction in self.instructions)

    def shape_of(self, buffer: str) -> Layout | None:
        """Shape and dtype of `buffer`, None where unknown. `h@2` has those of `h` unless `shapes` names it."""
        return self.shapes.get(buffer) or self.shapes.get(buffer.partition("@")[0])

    def channels(self, mesh: Mesh, rank: int) -> frozenset[Channel]:
        """The channels that `rank` uses when it runs this. Raises `ScheduleError` for a peer that is not on `mesh`."""
        return frozenset(each.channel(mesh, rank) for each in self.instructions if isinstance(each, (Send, Receive)))

    @cached_property
    def fed(self) -> Mapping[tuple[str, str], tuple[str, ...]]:
        """By kind and name of an input the buffers it is in: one, or one a microbatch where it differs among them."""
        return _by_item(self.signature.inputs, self.inputs)

    @cached_property
    def left(self) -> Mapping[tuple[str, str], tuple[str, ...]]:
        """Likewise of an output."""
        return _by_item(self.signature.outputs, self.outputs)

    @property
    def fingerprint(self) -> str:
        """Equal on two ranks exactly when they would run the same program."""
        code = "\n".join(f"{name}:{fragment.module.code}" for name, fragment in sorted(self.fragments.items()))
        return hashlib.sha256(f"{self}\n{code}".encode()).hexdigest()


def _by_item(items: Sequence[Input | Output], buffers: Sequence[str]) -> dict[tuple[str, str], tuple[str, ...]]:
    found: dict[tuple[str, str], tuple[str, ...]] = {}
    for item, buffer in zip(items, buffers, strict=True):
        found[item.kind, item.name] = (*found.get((item.kind, item.name), ()), buffer)
    return found


def microbatch_of(buffer: str) -> int:
    """The microbatch that `h@2` belongs to; 0 for what there is one of in a step."""
    return int(buffer.partition("@")[2] or 0)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(", ") if name)


# How each instruction reads, by its first word, and what the groups of the pattern make.
_FORMS: dict[str, tuple[re.Pattern[str], Callable[..., Instruction]]] = {
    "RUN": (
        re.compile(r"RUN (\S+) \((.*?)\) -> \((.*?)\)$"),
        lambda fragment, inputs, outputs: Run(fragment, _names(inputs), _names(outputs)),
    ),
    "LAUNCH": (
        re.compile(r"LAUNCH (all_reduce|all_gather|reduce_scatter|all_to_all) (sum|max|copy) (\S+) \((\S+)\) -> (\S+)$"),
        lambda collective, kind, axes, source, target: Launch(collective, kind, tuple(axes.split(",")), source, target),
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
    "FREE": (re.compile(r"FREE (.+)$"), lambda buffers: Free(tuple(buffers.split(" ")))),
    "PAUSE": (re.compile(r"PAUSE$"), Pause),
}


def parse(text: str) -> tuple[Instruction, ...]:
    """Read back what `str(schedule)` printed. Raises `ScheduleError` naming the first line that is none."""
    instructions: list[Instruction] = []
    for number, line in enumerate(text.strip().splitlines(), 1):
        line = line.strip()
        pattern, build = _FORMS.get(line.split(" ", 1)[0], (None, Pause))
        match = pattern.match(line) if pattern else None
        if match is None:
            raise ScheduleError(f"line {number} is no instruction: {line!r}")
        instructions.append(build(*match.groups()))
    return tuple(instructions)
