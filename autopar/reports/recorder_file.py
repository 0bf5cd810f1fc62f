"""What a flight recorder leaves in its folder, and how it is read back; nothing in it is code.

    rank0.ring             the latest instructions of rank 0, written into mapped memory while it runs: the file is up to date whatever
                           becomes of the process, which may be stopped, killed, or stuck in a wait
    rank0.json             who that is, what its program files are, and with which error it ended, if it did
    program-3f2a….txt      the instructions of a schedule, one a line

A ring is int64 words: a head, then `CAPACITY` records of three words, written in turns: the number of the call, the program and
the instruction, and when that began, in nanoseconds of the rank's own clock. It ended when the next one began.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from autopar.errors import AutoparError
from autopar.ir.instructions import Instruction, parse
from autopar.ir.mesh import Mesh

MAGIC = 0x0072_6170_6F74_7561  # "autopar"
CAPACITY = 1000
WORDS_A_RECORD = 3
# Words of the head: what it is, how the rank fares, when it last showed life, and one moment on its own clock and on the wall's.
HEAD_WORDS = 16
MAGIC_AT, STATE_AT, ALIVE_AT, OWN_CLOCK_AT, WALL_CLOCK_AT = range(5)
RUNNING, LEFT, FAILED = range(3)
NUM_WORDS = HEAD_WORDS + CAPACITY * WORDS_A_RECORD
# The second word of a record has the number of the program above so many bits, that of the instruction below.
INSTRUCTION_BITS = 32


class Begun(NamedTuple):
    """An instruction that a rank began: in its how many-th call, of which program; wall-clock seconds."""

    call: int
    program: int
    number: int
    seconds: float


@dataclass(frozen=True)
class RecordedProgram:
    """What a rank ran: instructions, the mesh, its own place there, and the ranks of the world that the places are."""

    instructions: tuple[Instruction, ...]
    mesh: Mesh
    place: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class RankRecord:
    """What one rank left: its latest instructions, oldest first.

    `state` is RUNNING where nothing else is known; `alive_seconds` is when the process last showed life, about once a second, by the
    wall clock; `error` is what a call raised, and `is_from_peer` that it was about other ranks.
    """

    rank: int
    num_ranks: int
    pid: int
    host: str
    programs: tuple[RecordedProgram, ...]
    begun: tuple[Begun, ...]
    state: int
    alive_seconds: float
    error: str = ""
    is_from_peer: bool = False

    @property
    def last(self) -> Begun | None:
        return self.begun[-1] if self.begun else None

    @cached_property
    def program(self) -> RecordedProgram | None:
        """What it runs, or ran last."""
        return self.programs[self.last.program] if self.last is not None else None

    @property
    def instruction(self) -> Instruction | None:
        """What it is at; None where it is outside of a call."""
        return self.instruction_of(self.last) if self.last is not None else None

    def instruction_of(self, begun: Begun) -> Instruction | None:
        instructions = self.programs[begun.program].instructions
        return instructions[begun.number] if begun.number < len(instructions) else None


def read_ranks(folder: Path) -> tuple[RankRecord, ...]:
    """What each rank left in `folder`. Raises `AutoparError` where there is nothing, or something else."""
    files = sorted(folder.glob("rank*.json"), key=lambda path: int(path.stem.removeprefix("rank")))
    if not files:
        raise AutoparError(f"no flight recorder has written to {folder}: there is no rank0.json")
    texts: dict[str, tuple[Instruction, ...]] = {}
    return tuple(_read_rank(path, texts) for path in files)


def _read_rank(path: Path, texts: dict[str, tuple[Instruction, ...]]) -> RankRecord:
    about: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    words = array("q", path.with_suffix(".ring").read_bytes())
    if len(words) != NUM_WORDS or words[MAGIC_AT] != MAGIC:
        raise AutoparError(f"{path.with_suffix('.ring')} is no ring of this version of autopar on a {sys.byteorder}-endian machine")
    since = words[WALL_CLOCK_AT] - words[OWN_CLOCK_AT]
    return RankRecord(
        rank=about["rank"],
        num_ranks=about["num_ranks"],
        pid=about["pid"],
        host=about["host"],
        programs=tuple(_read_program(path.parent, each, texts) for each in about["programs"]),
        begun=tuple(_records(words, since)),
        state=words[STATE_AT],
        alive_seconds=(words[ALIVE_AT] + since) / 1e9,
        error=about["error"],
        is_from_peer=about["is_from_peer"],
    )


def _read_program(folder: Path, about: dict[str, Any], texts: dict[str, tuple[Instruction, ...]]) -> RecordedProgram:
    name = about["file"]
    if name not in texts:
        texts[name] = parse((folder / Path(name).name).read_text(encoding="utf-8"))
    mesh = Mesh(tuple((axis, size) for axis, size in about["mesh"]))
    return RecordedProgram(texts[name], mesh, about["place"], tuple(about["ranks"]))


def _records(words: Sequence[int], since: int) -> list[Begun]:
    """Oldest first. A rank that is read while it writes may have a record without its time yet: that one is not begun."""
    found: list[Begun] = []
    for at in range(HEAD_WORDS, NUM_WORDS, WORDS_A_RECORD):
        call, place, clock = words[at : at + WORDS_A_RECORD]
        if clock:
            found.append(Begun(call, place >> INSTRUCTION_BITS, place & ((1 << INSTRUCTION_BITS) - 1), (clock + since) / 1e9))
    return sorted(found, key=lambda each: each.seconds)
