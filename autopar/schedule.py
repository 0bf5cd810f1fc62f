"""What a rank executes: a tuple of instructions over named buffers. Prints, parses, hashes.

RUN f3 (h_1, p_fc_weight) -> (h_2)          compute: a fragment of the LOCAL graph
LAUNCH all_reduce sum tp (h_2) -> h_3       start a collective over the ranks along `tp`
WAIT h_3                                    block until it is complete
FREE h_2 h_1                                drop buffers
PAUSE                                       hand the outputs to the caller, wait for their gradients
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch.fx import GraphModule

from autopar.errors import ScheduleError
from autopar.program import Signature

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


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
class Wait:
    target: str

    def __str__(self) -> str:
        return f"WAIT {self.target}"


@dataclass(frozen=True)
class Free:
    buffers: tuple[str, ...]

    def __str__(self) -> str:
        return f"FREE {' '.join(self.buffers)}"


@dataclass(frozen=True)
class Pause:
    def __str__(self) -> str:
        return "PAUSE"


Instruction = Run | Launch | Wait | Free | Pause


@dataclass(frozen=True)
class Fragment:
    """A piece of the LOCAL graph between two cuts, compiled once however often it runs.

    `module` takes its inputs in order and returns a tuple.
    """

    name: str
    module: GraphModule
    num_uses: int = 1


@dataclass(frozen=True)
class Schedule:
    """The instructions of every rank (all ranks run the same ones on a dp × tp mesh) and the fragments they run.

    Buffers named in `inputs` are there before the first instruction, in the order of `signature.inputs`;
    those in `outputs` are left at the end (loss and user outputs: at PAUSE), in the order of `signature.outputs`.
    Tangents are there after PAUSE only. An inference program has no PAUSE.
    """

    instructions: tuple[Instruction, ...]
    fragments: dict[str, Fragment]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    signature: Signature
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)

    def __str__(self) -> str:
        return "\n".join(str(instruction) for instruction in self.instructions)

    @property
    def fingerprint(self) -> str:
        """Equal on two ranks exactly when they would run the same program."""
        code = "\n".join(f"{name}:{fragment.module.code}" for name, fragment in sorted(self.fragments.items()))
        return hashlib.sha256(f"{self}\n{code}".encode()).hexdigest()


_PATTERNS = {
    "RUN": re.compile(r"RUN (\S+) \((.*?)\) -> \((.*?)\)$"),
    "LAUNCH": re.compile(r"LAUNCH (all_reduce|all_gather|reduce_scatter|all_to_all) (sum|max|copy) (\S+) \((\S+)\) -> (\S+)$"),
    "WAIT": re.compile(r"WAIT (\S+)$"),
    "FREE": re.compile(r"FREE (.+)$"),
    "PAUSE": re.compile(r"PAUSE$"),
}


def parse(text: str) -> tuple[Instruction, ...]:
    """Read back what `str(schedule)` printed. Raises `ScheduleError` naming the first line that is none."""
    instructions: list[Instruction] = []
    for number, line in enumerate(text.strip().splitlines(), 1):
        line = line.strip()
        word = line.split(" ", 1)[0]
        match = _PATTERNS[word].match(line) if word in _PATTERNS else None
        if match is None:
            raise ScheduleError(f"line {number} is no instruction: {line!r}")
        instructions.append(_build(word, match))
    return tuple(instructions)


def _build(word: str, match: re.Match[str]) -> Instruction:
    def names(group: int) -> tuple[str, ...]:
        return tuple(name for name in match.group(group).split(", ") if name)

    if word == "RUN":
        return Run(match.group(1), names(2), names(3))
    if word == "LAUNCH":
        collective, kind, axes, source, target = match.groups()
        return Launch(collective, kind, tuple(axes.split(",")), source, target)  # type: ignore[arg-type]
    if word == "WAIT":
        return Wait(match.group(1))
    if word == "FREE":
        return Free(tuple(match.group(1).split(" ")))
    return Pause()
