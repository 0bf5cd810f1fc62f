"""Who holds up all the others: the records of the ranks side by side, collectives and transfers matched."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from autopar.ir.instructions import Copy, Instruction, Launch, Receive, Send, Wait
from autopar.ir.mesh import Mesh
from autopar.reports.recorder_file import FAILED, LEFT, RankRecord, RecordedProgram, read_ranks

# A process whose last sign of life is so much older than another's, and which did not say that it ended, was stopped or killed.
SILENT_SECONDS = 4.0
# How many characters of an instruction are printed.
LONGEST = 200


class _Meeting(NamedTuple):
    """The `number`-th collective of a group of ranks in a call, or transfer of a pair."""

    kind: str
    members: tuple[int, ...]
    number: int


@dataclass(frozen=True)
class Waiting:
    """A rank waits at a WAIT for what `missing` have not launched."""

    launched: Launch | Send | Receive
    missing: tuple[int, ...]


@dataclass(frozen=True)
class FlightRecord:
    """What all ranks left. It prints; `write` makes JSON of it.

    awaited   the ranks that everybody waits for: they failed, show no sign of life, or wait for nobody themselves
    waiting   by rank that waits for others, for what
    missing   the ranks without a record: they ended in good order, or never ran
    """

    ranks: tuple[RankRecord, ...]

    @cached_property
    def by_rank(self) -> Mapping[int, RankRecord]:
        return {each.rank: each for each in self.ranks}

    @cached_property
    def missing(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.ranks[0].num_ranks) if rank not in self.by_rank)

    @cached_property
    def waiting(self) -> Mapping[int, Waiting]:
        found = {each.rank: _waiting(each, self.by_rank) for each in self.ranks}
        return {rank: waiting for rank, waiting in found.items() if waiting is not None}

    @cached_property
    def silent(self) -> tuple[int, ...]:
        """The ranks that were stopped or killed: they did not end, and show no sign of life."""
        newest = max(each.alive_seconds for each in self.ranks)
        running = (each for each in self.ranks if each.state not in (LEFT, FAILED))
        return tuple(each.rank for each in running if newest - each.alive_seconds > SILENT_SECONDS)

    @cached_property
    def awaited(self) -> tuple[int, ...]:
        """Those which failed by themselves, else are silent, else are waited for and wait for nobody, else are those of whom the others got
        no answer before a call, else are behind all others."""
        failed = [each.rank for each in self.ranks if each.state == FAILED and not each.is_from_peer]
        if failed or self.silent:
            return tuple(failed) or self.silent
        wanted = {rank for each in self.waiting.values() for rank in each.missing}
        if wanted:
            return tuple(sorted(wanted - set(self.waiting)) or sorted(wanted))
        if any(each.state == FAILED for each in self.ranks):  # for want of an answer, all of them, and at no WAIT
            others = tuple(each.rank for each in self.ranks if each.state != FAILED) or self.missing
            if others:
                return others
        behind = min(_progress(each) for each in self.ranks)
        return tuple(each.rank for each in self.ranks if _progress(each) == behind < max(map(_progress, self.ranks)))

    def instruction(self, rank: int) -> Instruction | None:
        """What `rank` is at; None between calls."""
        return self.by_rank[rank].instruction

    def __str__(self) -> str:
        names = ", ".join(map(str, self.awaited))
        head = f"everybody waits for rank{'s' if len(self.awaited) > 1 else ''} {names}" if self.awaited else "nobody is behind the others"
        lines = [head]
        if self.missing:
            lines.append(
                f"no record of rank{'s' if len(self.missing) > 1 else ''} {', '.join(map(str, self.missing))}: ended, or never ran"
            )
        order = sorted(self.ranks, key=lambda each: (each.rank not in self.awaited, each.rank))
        return "\n".join([*lines, *(f"  {line}" for each in order for line in self._lines(each))])

    def _lines(self, record: RankRecord) -> Iterator[str]:
        yield f"rank {record.rank} (process {record.pid} on {record.host}): {_where(record)}"
        if record.error:
            yield f"  raised {record.error.splitlines()[0][:LONGEST]}"
        if record.rank in self.silent:
            yield f"  no sign of life since {_clock(record.alive_seconds)}: stopped, killed, or its machine is lost"
        waiting = self.waiting.get(record.rank)
        if waiting is not None:
            yield f"  which {_named(waiting.missing)} did not launch"

    def as_dict(self) -> dict[str, Any]:
        """JSON-able: the verdict, and every instruction that is on record, with when it began and ended (seconds since 1970)."""
        ranks: list[dict[str, Any]] = []
        for each in self.ranks:
            ends: list[float | None] = [*(begun.seconds for begun in each.begun[1:]), None]
            rows = [
                {"call": begun.call, "number": begun.number, "what": str(each.instruction_of(begun) or "end of the call"),
                 "begin_seconds": begun.seconds, "end_seconds": end}
                for begun, end in zip(each.begun, ends, strict=True)
            ]  # fmt: skip
            ranks.append({"rank": each.rank, "pid": each.pid, "host": each.host, "error": each.error, "instructions": rows})
        waiting = {str(rank): {"for": list(each.missing), "at": str(each.launched)} for rank, each in self.waiting.items()}
        return {"awaited": list(self.awaited), "silent": list(self.silent), "waiting": waiting, "ranks": ranks}

    def write(self, path: str | Path) -> None:
        """`as_dict` as JSON."""
        Path(path).write_text(json.dumps(self.as_dict(), indent=1), encoding="utf-8")


def read_recorder(folder: str | Path) -> FlightRecord:
    """What the flight recorders of a run left in `folder`: a value that prints which rank, at which instruction, everybody waits for.

    The folder is named by the error of a run, and by a warning when a rank waits for a minute; `AUTOPAR_RECORDER=folder` chooses it. It
    may be read while the ranks run, or hang. Raises `AutoparError` where there are no records.
    """
    return FlightRecord(read_ranks(Path(folder)))


def _waiting(record: RankRecord, records: Mapping[int, RankRecord]) -> Waiting | None:
    instruction, program, last = record.instruction, record.program, record.last
    if not isinstance(instruction, Wait) or program is None or last is None:
        return None
    found = _meeting(program, instruction, last.number)
    if found is None:
        return None
    launched, meeting = found
    others = {rank: records.get(rank) for rank in meeting.members if rank != record.rank}
    has_come = _waits_too if isinstance(launched, Launch) and launched.node_size else _has_launched
    missing = [rank for rank, other in others.items() if not has_come(other, meeting, last.call)]
    return Waiting(launched, tuple(missing)) if missing else None


def _has_launched(record: RankRecord | None, meeting: _Meeting, call: int) -> bool:
    """Whether a rank has launched its end of what meets in the `call`-th call."""
    if record is None or record.last is None or record.program is None:
        return False
    if record.last.call != call:
        return record.last.call > call
    return sum(_end(each, record.program) == meeting[:2] for each in record.program.instructions[: record.last.number]) > meeting.number


def _waits_too(record: RankRecord | None, meeting: _Meeting, call: int) -> bool:
    """Likewise, of a collective by node, whose second half ranks launch where they wait for it."""
    if record is None or record.last is None or record.program is None or record.last.call != call:
        return _has_launched(record, meeting, call)
    instructions = record.program.instructions
    ends = [number for number, each in enumerate(instructions) if _end(each, record.program) == meeting[:2]]
    launched = instructions[ends[meeting.number]]
    assert isinstance(launched, Launch), f"a collective by node is launched, and this is {launched}"
    waits = (number for number, each in enumerate(instructions) if isinstance(each, Wait) and each.target == launched.name)
    return next((number for number in waits if number > ends[meeting.number]), 0) <= record.last.number


def _meeting(program: RecordedProgram, waited: Wait, number: int) -> tuple[Launch | Send | Receive, _Meeting] | None:
    """What a WAIT, the `number`-th instruction, waits for; None for a copy of its own."""
    before = program.instructions[:number]
    flights = (
        (at, each) for at, each in enumerate(before) if isinstance(each, (Launch, Copy, Send, Receive)) and each.name == waited.target
    )
    at, launched = max(flights, key=lambda flight: flight[0])
    if isinstance(launched, Copy):
        return None
    kind, members = _end(launched, program)
    return launched, _Meeting(kind, members, sum(_end(each, program) == (kind, members) for each in before[:at]))


def _end(instruction: Instruction, program: RecordedProgram) -> tuple[str, tuple[int, ...]]:
    """What an instruction is an end of, and whose, by ranks of the world."""
    if isinstance(instruction, Launch):
        return "collective", _group(program.mesh, program.place, program.ranks, instruction.axes)
    if isinstance(instruction, (Send, Receive)):
        return "transfer", tuple(program.ranks[place] for place in instruction.channel(program.mesh, program.place))
    return "", ()


@cache
def _group(mesh: Mesh, place: int, ranks: tuple[int, ...], axes: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(sorted(ranks[member] for member in mesh.group(place, axes)))


def _progress(record: RankRecord) -> tuple[int, int]:
    return (record.last.call, record.last.number) if record.last is not None else (0, 0)


def _where(record: RankRecord) -> str:
    last, instruction = record.last, record.instruction
    if last is None:
        return "before its first call"
    if instruction is None:
        return f"after call {last.call}, which ended at {_clock(last.seconds)}"
    text = str(instruction)
    text = text if len(text) <= LONGEST else text[:LONGEST] + " …"
    return f"at instruction {last.number} of call {last.call} since {_clock(last.seconds)}: {text}"


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%H:%M:%S.%f")[:-3]
