"""What ranks execute: instructions over typed buffers, and the fragments that they run. Prints, hashes."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain
from typing import Literal, NamedTuple

import torch
from torch.fx import GraphModule

from autopar.errors import ScheduleError
from autopar.ir.instructions import Add, Channel, Free, Instruction, Launch, Memory, Pause, Receive, Run, Send
from autopar.ir.mesh import Mesh
from autopar.ir.program import Input, Output, Signature

# Shape and dtype.
TensorType = tuple[tuple[int, ...], torch.dtype]
# The kind of an input; what a fragment, a collective or a transfer gives; what a forward makes and a backward reads; what ADD adds up.
Role = Literal["parameter", "buffer", "batch", "constant", "coordinate", "random_key", "tangent", "value", "saved", "sum"]


class Buffer(NamedTuple):
    """What a name in a schedule stands for.

    value       the node of the LOCAL graph whose value it holds, or of a sum the one whose values are its addends
    type        shape and dtype on one rank; None where nothing says
    microbatch  which one's value it is; None for what there is one of in a step
    role        what it is to the step
    memory      where it lies: what COPY gives may lie elsewhere than on the device, and so may a parameter
    """

    value: str
    type: TensorType | None = None
    microbatch: int | None = None
    role: Role = "value"
    memory: Memory = "device"


class Versions(NamedTuple):
    """Of the parameters in a step: how often each is updated, and how many updates lie at most between the version that a gradient is
    computed at and the one that it updates."""

    num_updates: int = 1
    staleness: int = 0


@dataclass(frozen=True)
class Fragment:
    """A piece of the LOCAL graph between two cuts, compiled once however often it runs.

    `module` takes its inputs in order and returns a tuple. `structure` is equal for two pieces exactly when one compiled form
    serves both.
    """

    name: str
    module: GraphModule
    structure: str = ""


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
    `is_over_at_pause`: PAUSE is the last instruction, and the gradients, those of the loss itself, are there when outputs are handed
    out; else the backward follows it. Tangents are there after PAUSE only, or from the start where all is over then. `buffers` says
    what each name stands for: those that RECV fills must be there, since nothing else says how large they are. `spans` are the actions
    of a pipeline, in order. `versions` is what its UPDATEs promise.
    """

    instructions: tuple[Instruction, ...]
    fragments: Mapping[str, Fragment]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    signature: Signature
    buffers: Mapping[str, Buffer] = field(default_factory=dict[str, Buffer])
    spans: tuple[Span, ...] = ()
    is_over_at_pause: bool = False
    versions: Versions = Versions()

    def __str__(self) -> str:
        return "\n".join(str(instruction) for instruction in self.instructions)

    def type_of(self, name: str) -> TensorType | None:
        """Shape and dtype of a buffer, None where nothing says."""
        return self.buffers[name].type if name in self.buffers else None

    def bytes_of(self, name: str) -> int:
        """Of a buffer on one rank. Raises `ScheduleError` where nothing says how large it is."""
        layout = self.type_of(name)
        if layout is None:
            raise ScheduleError(f"nothing is known of the size of buffer {name!r}")
        return math.prod(layout[0]) * layout[1].itemsize

    def memory_of(self, name: str) -> Memory:
        """Where a buffer lies."""
        return self.buffers[name].memory if name in self.buffers else "device"

    def microbatch_of(self, name: str) -> int:
        """The microbatch that a buffer belongs to; 0 for what there is one of in a step."""
        return (self.buffers[name].microbatch if name in self.buffers else None) or 0

    def channels(self, mesh: Mesh, rank: int) -> frozenset[Channel]:
        """The channels that `rank` uses when it runs this. Raises `ScheduleError` for a peer that is not on `mesh`."""
        return frozenset(each.channel(mesh, rank) for each in self.instructions if isinstance(each, (Send, Receive)))

    @cached_property
    def end_alone(self) -> int:
        """The first instruction that another rank, the caller, the optimizer or memory beside the device hears of."""
        return next((at for at, each in enumerate(self.instructions) if not isinstance(each, (Run, Add, Free))), len(self.instructions))

    @cached_property
    def end_alone_behind_pause(self) -> int:
        """The first instruction behind PAUSE that does more than make buffers."""
        begin = next((at + 1 for at, each in enumerate(self.instructions) if isinstance(each, Pause)), 0)
        rest = enumerate(self.instructions[begin:], begin)
        return next((at for at, each in rest if not isinstance(each, Run)), len(self.instructions))

    @cached_property
    def fed(self) -> Mapping[tuple[str, str], tuple[str, ...]]:
        """By kind and name of an input the buffers it is in: one, or one a microbatch where it differs among them."""
        return _by_item(self.signature.inputs, self.inputs)

    @cached_property
    def left(self) -> Mapping[tuple[str, str], tuple[str, ...]]:
        """Likewise of an output."""
        return _by_item(self.signature.outputs, self.outputs)

    @cached_property
    def spent(self) -> Mapping[str, tuple[Launch, int]]:
        """The operands that nothing but one LAUNCH reads, and that are neither given nor handed out: that, and which of its own each is."""
        readers = Counter(name for each in self.instructions for name in each.reads)
        kept = {*self.inputs, *self.outputs}
        launches = (each for each in self.instructions if isinstance(each, Launch))
        operands = ((name, (each, number)) for each in launches for number, name in enumerate(each.sources))
        return {name: where for name, where in operands if readers[name] == 1 and name not in kept}

    @cached_property
    def operand_types(self) -> Mapping[str, tuple[TensorType | None, ...]]:
        """By name of a LAUNCH the shapes and dtypes of its operands, None where nothing says."""
        return {each.name: tuple(map(self.type_of, each.sources)) for each in self.instructions if isinstance(each, Launch)}

    def regrouped(self, groups: Sequence[Sequence[Instruction]]) -> Schedule:
        """With each instruction replaced by those of its group; a span covers what stands in the place of its instructions."""
        starts = list(accumulate(map(len, groups), initial=0))
        spans = tuple(Span(each.action, starts[each.begin], starts[each.end]) for each in self.spans)
        return replace(self, instructions=tuple(chain.from_iterable(groups)), spans=spans)

    def prepended(self, more: Sequence[Instruction]) -> Schedule:
        """With `more` before the first instruction."""
        spans = tuple(Span(each.action, each.begin + len(more), each.end + len(more)) for each in self.spans)
        return replace(self, instructions=(*more, *self.instructions), spans=spans)

    def appended(self, more: Sequence[Instruction]) -> Schedule:
        """With `more` at the end, before a PAUSE at which all is over."""
        end = len(self.instructions) - self.is_over_at_pause
        return replace(self, instructions=(*self.instructions[:end], *more, *self.instructions[end:]))

    @property
    def fingerprint(self) -> str:
        """Of what is printed and of the fragments: equal on two ranks that run the same program. Calls compare the sizes of inputs."""
        code = "\n".join(f"{name}:{fragment.module.code}" for name, fragment in sorted(self.fragments.items()))
        return hashlib.sha256(f"{self}\n{code}".encode()).hexdigest()


def _by_item(items: Sequence[Input | Output], buffers: Sequence[str]) -> dict[tuple[str, str], tuple[str, ...]]:
    found: dict[tuple[str, str], tuple[str, ...]] = {}
    for item, buffer in zip(items, buffers, strict=True):
        found[item.kind, item.name] = (*found.get((item.kind, item.name), ()), buffer)
    return found
