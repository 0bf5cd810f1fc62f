"""A flight recorder: the latest instructions of this process's rank, with times, in a file that outlives it.

Each instruction is three words written into mapped memory as it begins, so nothing has to be dumped: a rank that is stopped, killed
or blocked within a collective, which no signal handler of Python would interrupt, has left what it was at. What torch's recorder of NCCL
dumps on a timeout, an exception or on demand is there at any time, for every instruction, under every backend.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import mmap
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from autopar.errors import PeerError
from autopar.ir.instructions import Wait
from autopar.ir.mesh import Mesh
from autopar.ir.schedule import Schedule
from autopar.reports.recorder_file import (
    ALIVE_AT,
    CAPACITY,
    FAILED,
    HEAD_WORDS,
    INSTRUCTION_BITS,
    LEFT,
    MAGIC,
    MAGIC_AT,
    NUM_WORDS,
    OWN_CLOCK_AT,
    RUNNING,
    STATE_AT,
    WALL_CLOCK_AT,
    WORDS_A_RECORD,
)

logger = logging.getLogger("autopar")

# A folder, or "off". Without it the records are in a temporary folder, which is removed when all goes well.
VARIABLE = "AUTOPAR_RECORDER"
OFF = "off"
# How often a process says that it lives, and after how long in one WAIT it says where to look.
HEARTBEAT_SECONDS = 0.5
PATIENCE_SECONDS = 60.0


class FlightRecorder:
    """Of one process: `folder` gets the files that `autopar.reports.recorder_file` describes. `is_temporary`: removed after a good end."""

    def __init__(self, folder: Path, rank: int, num_ranks: int, is_temporary: bool) -> None:
        self.folder, self.rank, self._is_temporary = folder, rank, is_temporary
        self._about: dict[str, Any] = {
            "rank": rank, "num_ranks": num_ranks, "pid": os.getpid(), "host": socket.gethostname(),
            "programs": [], "error": "", "is_from_peer": False,
        }  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"rank{rank}.ring").open("wb+") as file:
            file.truncate(NUM_WORDS * 8)
            self._words = memoryview(mmap.mmap(file.fileno(), NUM_WORDS * 8)).cast("q")
        self._words[OWN_CLOCK_AT], self._words[WALL_CLOCK_AT] = time.perf_counter_ns(), time.time_ns()
        self._words[ALIVE_AT], self._words[STATE_AT], self._words[MAGIC_AT] = time.perf_counter_ns(), RUNNING, MAGIC
        self._at, self._num_calls = HEAD_WORDS, 0
        # By the identity of a schedule, which is kept, its number.
        self._programs: dict[int, tuple[int, Schedule]] = {}
        self._latest: Schedule | None = None
        self._told_at = 0
        self._write_about()
        threading.Thread(target=self._live, name="autopar flight recorder", daemon=True).start()
        atexit.register(self._leave, os.getpid())

    def call(self, schedule: Schedule, mesh: Mesh, place: int, ranks: tuple[int, ...]) -> Callable[[int], None]:
        """A new call begins, which runs `schedule` at `place` of `mesh`: what to call with the number of each instruction as it begins, and
        with that behind the last at the end."""
        self._num_calls += 1
        self._latest = schedule
        if self._words[STATE_AT] == FAILED:  # whoever caught the error goes on
            self._about |= {"error": "", "is_from_peer": False}
            self._write_about()
            self._words[STATE_AT] = RUNNING
        base, call = self._number_of(schedule, mesh, place, ranks) << INSTRUCTION_BITS, self._num_calls
        words, clock, last = self._words, time.perf_counter_ns, NUM_WORDS - WORDS_A_RECORD

        def record(number: int) -> None:
            at = self._at
            words[at + 2] = 0  # until both other words are those of this record
            words[at] = call
            words[at + 1] = base | number
            words[at + 2] = clock()
            self._at = at + WORDS_A_RECORD if at < last else HEAD_WORDS

        return record

    def failed(self, error: Exception) -> None:
        """A call, or what ranks agree on around it, raised `error`, which gets a note that says where the records are."""
        if self.where in getattr(error, "__notes__", ()):
            return
        self._about |= {"error": f"{type(error).__name__}: {error}"[:2000], "is_from_peer": isinstance(error, PeerError)}
        self._write_about()
        self._words[STATE_AT] = FAILED
        error.add_note(self.where)

    @property
    def where(self) -> str:
        """What a person reads who looks for a hang."""
        return f"the latest {CAPACITY} instructions of every rank: print(autopar.read_recorder({str(self.folder)!r}))"

    def _number_of(self, schedule: Schedule, mesh: Mesh, place: int, ranks: tuple[int, ...]) -> int:
        known = self._programs.get(id(schedule))
        if known is not None:
            return known[0]
        text, number = str(schedule), len(self._programs)
        name = f"program-{hashlib.sha256(text.encode()).hexdigest()[:16]}.txt"
        if not (self.folder / name).exists():
            self._write(name, text)
        self._programs[id(schedule)] = number, schedule
        self._about["programs"].append({"file": name, "mesh": mesh.axes, "place": place, "ranks": ranks})
        self._write_about()
        return number

    def _write_about(self) -> None:
        self._write(f"rank{self.rank}.json", json.dumps(self._about, indent=1))

    def _write(self, name: str, text: str) -> None:
        """Whole or not at all: another rank may write the same file, and anybody read it."""
        part = self.folder / f".{name}.{self.rank}"
        part.write_text(text, encoding="utf-8")
        part.replace(self.folder / name)

    def _live(self) -> None:
        while self._words[STATE_AT] != LEFT:
            self._words[ALIVE_AT] = now = time.perf_counter_ns()
            self._tell_of_a_hang(now)
            time.sleep(HEARTBEAT_SECONDS)

    def _tell_of_a_hang(self, now: int) -> None:
        """Say once where to look, when an instruction waits for long."""
        at = (self._at if self._at > HEAD_WORDS else NUM_WORDS) - WORDS_A_RECORD
        begun, number = self._words[at + 2], self._words[at + 1] & ((1 << INSTRUCTION_BITS) - 1)
        schedule = self._latest
        if not begun or begun == self._told_at or now - begun < PATIENCE_SECONDS * 1e9 or schedule is None:
            return
        if number < len(schedule.instructions) and isinstance(schedule.instructions[number], Wait):
            self._told_at = begun
            what = schedule.instructions[number]
            logger.warning("rank %d has waited for %d s at instruction %d: %s; %s", self.rank, PATIENCE_SECONDS, number, what, self.where)

    def _leave(self, pid: int) -> None:
        """At the end of the process, unless it is a child that was forked off."""
        if os.getpid() != pid:
            return
        is_good = self._words[STATE_AT] == RUNNING and getattr(sys, "last_value", None) is None
        if is_good:
            self._words[STATE_AT] = LEFT
        if is_good and self._is_temporary:
            for name in (f"rank{self.rank}.ring", f"rank{self.rank}.json"):
                (self.folder / name).unlink(missing_ok=True)
            with suppress(FileNotFoundError):  # another rank, which leaves at the same time, has removed it
                if not any(self.folder.glob("rank*")):
                    shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True)
class MeshRecorder:
    """The recorder of this process for what runs on `mesh`, where it stands at `place`; `ranks` are those of the world at each place."""

    recorder: FlightRecorder
    mesh: Mesh
    place: int
    ranks: tuple[int, ...]

    def call(self, schedule: Schedule) -> Callable[[int], None]:
        return self.recorder.call(schedule, self.mesh, self.place, self.ranks)

    def failed(self, error: Exception) -> None:
        self.recorder.failed(error)


# Of this process, once it is made: all its parallel modules write into one, in the order in which they run.
_recorders: list[FlightRecorder | None] = []


def noted(error: PeerError) -> PeerError:
    """`error`, with a note that says where the records are, if there are any."""
    for recorder in _recorders:
        if recorder is not None:
            recorder.failed(error)
    return error


def proposed_folder() -> str:
    """Where this rank would have the records, if it is the first: all take that rank's proposal."""
    return os.environ.get(VARIABLE) or str(Path(tempfile.gettempdir()) / f"autopar-recorder-{os.getpid()}-{time.time_ns():x}")


def recorder_of(proposed: str, mesh: Mesh, place: int, ranks: tuple[int, ...]) -> MeshRecorder | None:
    """The recorder of this process, which writes to `proposed` if it is made now; None where it is off, or nothing can be written."""
    if not _recorders:
        _recorders.append(_made(proposed))
    return None if _recorders[0] is None else MeshRecorder(_recorders[0], mesh, place, ranks)


def _made(proposed: str) -> FlightRecorder | None:
    asked_for = os.environ.get(VARIABLE)
    if asked_for == OFF:
        return None
    try:
        return FlightRecorder(Path(asked_for or proposed), dist.get_rank(), dist.get_world_size(), is_temporary=not asked_for)
    except OSError as error:
        logger.warning("no flight recorder: %s; set %s to a folder that can be written, or to %r", error, VARIABLE, OFF)
        return None
