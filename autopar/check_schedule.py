"""Invariants of the schedules of all ranks, proved before any of them runs.

on each rank   a buffer is written once, read only while it is there, freed once and left nowhere but in the outputs
               a launched collective has one WAIT, and nothing touches its source's memory or its target before
               shapes fit: a fragment's inputs, a collective's source and target
across ranks   all members of a group launch the same collectives in the same order, and the orders on all groups
               fit one global order (a later launch never waits for an earlier one: what NCCL needs; gloo forgives)
               PAUSE comes at most once, at the same place between launches on every rank
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from autopar.mesh import Mesh
from autopar.printing import short_dtype
from autopar.schedule import Free, Instruction, Launch, Pause, Run, Schedule, Wait
from autopar.violation import Violation


def check_schedule(schedules: Mapping[int, Schedule], mesh: Mesh) -> list[Violation]:
    """Every violation in the schedules, one per rank of `mesh`; a schedule that several ranks share is walked once."""
    found: list[Violation] = []
    walked: dict[int, int] = {}
    for rank, schedule in sorted(schedules.items()):
        if id(schedule) not in walked:
            walked[id(schedule)] = rank
            found += _Walk(rank, schedule, mesh).run()
    missing = [rank for rank in range(mesh.size) if rank not in schedules]
    if missing:
        return [*found, Violation("ranks without a schedule", got=str(missing), fix=f"one schedule for each of {mesh.size} ranks")]
    unknown = any("unknown axis" in violation.what for violation in found)
    # Ranks that run one and the same list launch in one order by construction.
    if len(walked) > 1 and not unknown:
        found += _rendezvous(schedules, mesh)
    return found


def _place(rank: int, number: int, instruction: Instruction) -> str:
    return f"rank {rank}, instruction {number}: {instruction}"


@dataclass
class _Walk:
    """One rank's schedule from the first instruction to the last, with the buffers that are there."""

    rank: int
    schedule: Schedule
    mesh: Mesh
    alive: set[str] = field(default_factory=set)
    freed: dict[str, int] = field(default_factory=dict)
    pending: dict[str, Launch] = field(default_factory=dict)
    found: list[Violation] = field(default_factory=list)
    here: str = ""
    paused: bool = False

    def run(self) -> list[Violation]:
        inputs = self.schedule.signature.inputs
        late = {name for item, name in zip(inputs, self.schedule.inputs, strict=True) if item.kind == "tangent"}
        self.alive = set(self.schedule.inputs) - late
        for number, instruction in enumerate(self.schedule.instructions):
            self.here = _place(self.rank, number, instruction)
            if isinstance(instruction, Run):
                self._run(instruction)
            elif isinstance(instruction, Launch):
                self._launch(instruction)
            elif isinstance(instruction, Wait):
                self._wait(instruction)
            elif isinstance(instruction, Free):
                self._free(instruction, number)
            else:
                self._pause(late)
        self._end()
        return self.found

    def _say(self, what: str, expected: str = "", got: str = "", fix: str = "") -> None:
        self.found.append(Violation(what, self.here, expected, got, fix))

    def _read(self, name: str) -> None:
        if name in self.pending:
            self._say(f"buffer {name} is read before its collective is complete", "WAIT first", "LAUNCH only", f"put WAIT {name} before")
        elif name in self.freed:
            self._say(f"buffer {name} is read after it was freed", got=f"freed by instruction {self.freed[name]}", fix="free it later")
        elif name not in self.alive:
            self._say(f"buffer {name} is read before anything wrote it", fix="run what makes it earlier")

    def _write(self, name: str) -> None:
        if name in self.alive or name in self.pending or name in self.freed:
            self._say(f"buffer {name} is written twice", fix="give the second value a name of its own")
        self.freed.pop(name, None)
        self.alive.add(name)

    def _run(self, instruction: Run) -> None:
        for name in instruction.inputs:
            self._read(name)
        for name in instruction.outputs:
            self._write(name)
        fragment = self.schedule.fragments.get(instruction.fragment)
        if fragment is None:
            self._say(f"there is no fragment {instruction.fragment}", ", ".join(sorted(self.schedule.fragments)), instruction.fragment)
            return
        wanted = [node.meta.get("val") for node in fragment.module.graph.nodes if node.op == "placeholder"]
        if len(wanted) != len(instruction.inputs):
            self._say(
                "the fragment takes another number of inputs", str(len(wanted)), str(len(instruction.inputs)), "pass one buffer per input"
            )
            return
        for name, value in zip(instruction.inputs, wanted, strict=True):
            given = self.schedule.shapes.get(name)
            if value is not None and given is not None and given != (tuple(value.shape), value.dtype):
                expected = f"{short_dtype(value.dtype)}{list(value.shape)}"
                self._say(
                    f"buffer {name} does not fit the fragment's input",
                    expected,
                    f"{short_dtype(given[1])}{list(given[0])}",
                    "cut the fragments anew",
                )

    def _launch(self, instruction: Launch) -> None:
        self._read(instruction.source)
        self._write(instruction.target)
        self.alive.discard(instruction.target)
        self.pending[instruction.target] = instruction
        unknown = [axis for axis in instruction.axes if axis not in self.mesh.names]
        if unknown:
            self._say(f"unknown axis {unknown[0]!r}", f"axes of the mesh ({self.mesh})", ",".join(instruction.axes))
            return
        source, target = (self.schedule.shapes.get(name) for name in (instruction.source, instruction.target))
        if source is None or target is None:
            return
        expected = _result_shape(instruction, source[0], self.mesh.size_of(instruction.axes))
        if expected is None:
            size = self.mesh.size_of(instruction.axes)
            self._say(
                f"{instruction.collective} wants one entry per rank first",
                f"[{size}, …]",
                str(list(source[0])),
                "lay the parts out along dim 0",
            )
        elif (expected, source[1]) != target:
            got = f"{short_dtype(target[1])}{list(target[0])}"
            self._say(
                "the target does not have the collective's shape",
                f"{short_dtype(source[1])}{list(expected)}",
                got,
                "set the shape from the source",
            )

    def _wait(self, instruction: Wait) -> None:
        if self.pending.pop(instruction.target, None) is None:
            launched = instruction.target in self.alive
            got = "it was waited for before" if launched else "it was never launched"
            self._say(f"WAIT without a LAUNCH for {instruction.target}", "one WAIT for each LAUNCH", got, "drop the WAIT or launch first")
            return
        self.alive.add(instruction.target)

    def _free(self, instruction: Free, number: int) -> None:
        for name in instruction.buffers:
            using = [target for target, launch in self.pending.items() if name in (target, launch.source)]
            if using:
                self._say(
                    f"buffer {name} is freed while a collective uses it", f"WAIT {using[0]} first", "no WAIT yet", "free it after the WAIT"
                )
            if name in self.freed:
                self._say(
                    f"buffer {name} is freed twice", got=f"freed by instruction {self.freed[name]}", fix="free it once, after its last use"
                )
            elif name not in self.alive and not using:
                self._say(f"buffer {name} is freed before anything wrote it", fix="free it after its last use")
            self.alive.discard(name)
            self.freed[name] = number

    def _pause(self, late: set[str]) -> None:
        if self.paused:
            self._say("PAUSE comes twice", "at most one PAUSE", "another before", "hand the outputs out once")
        self.paused = True
        self.alive |= late
        self._present("loss", "output")

    def _present(self, *kinds: str) -> None:
        outputs = self.schedule.signature.outputs
        for item, name in zip(outputs, self.schedule.outputs, strict=True):
            if item.kind in kinds and name not in self.alive:
                reason = (
                    f"freed by instruction {self.freed[name]}"
                    if name in self.freed
                    else "still in flight"
                    if name in self.pending
                    else "never written"
                )
                self._say(
                    f"{item.kind} {item.name!r} (buffer {name}) is not there",
                    "written, complete and not freed",
                    reason,
                    "keep it until here",
                )

    def _end(self) -> None:
        self.here = f"rank {self.rank}, at the end"
        self._present(*(("gradient", "buffer") if self.paused else ("loss", "output", "gradient", "buffer")))
        for target in self.pending:
            self._say(f"the collective into {target} is never waited for", "one WAIT for each LAUNCH", "none", f"add WAIT {target}")
        left = self.alive - set(self.schedule.inputs) - set(self.schedule.outputs)
        if left:
            self._say("buffers are never freed", got=", ".join(sorted(left)), fix="free each after its last use")


def _result_shape(launch: Launch, source: tuple[int, ...], size: int) -> tuple[int, ...] | None:
    """The target's shape; None when the source lacks its dim of one entry per rank."""
    if launch.collective == "all_gather":
        return (size, *source)
    if launch.collective == "all_reduce":
        return source
    if not source or source[0] != size:
        return None
    return source[1:] if launch.collective == "reduce_scatter" else source


def _rendezvous(schedules: Mapping[int, Schedule], mesh: Mesh) -> Iterator[Violation]:
    """Let every rank run until its next launch or PAUSE, and past it only together with its whole group.

    When nobody can advance, no global order of the launches exists.
    """
    stops = {rank: _stops(schedule) for rank, schedule in schedules.items()}
    at = dict.fromkeys(schedules, 0)
    ready = sorted(schedules)
    while ready:
        rank = ready.pop()
        if at[rank] == len(stops[rank]):
            continue
        number, instruction = stops[rank][at[rank]]
        group = mesh.group(rank, instruction.axes) if isinstance(instruction, Launch) else tuple(sorted(schedules))
        partners = {member: stops[member][at[member]] if at[member] < len(stops[member]) else None for member in group}
        if not all(_meets(instruction, group, partner, member, mesh) for member, partner in partners.items()):
            continue
        odd = [
            member
            for member in group
            if _signature_of(schedules[member], partners[member]) != _signature_of(schedules[rank], (number, instruction))
        ]
        for member in odd:
            yield _differs(rank, (number, instruction), member, partners[member], schedules)
        for member in group:
            at[member] += 1
        ready += group
    stuck = {rank: stops[rank][position] for rank, position in at.items() if position < len(stops[rank])}
    if stuck:
        yield _deadlock(stuck, mesh)


Stop = tuple[int, Launch | Pause]


def _stops(schedule: Schedule) -> list[Stop]:
    return [(number, each) for number, each in enumerate(schedule.instructions) if isinstance(each, (Launch, Pause))]


def _meets(instruction: Launch | Pause, group: tuple[int, ...], partner: Stop | None, member: int, mesh: Mesh) -> bool:
    """Whether `member` stands at an instruction of the same group (or at PAUSE as well)."""
    if partner is None or isinstance(partner[1], Pause) or isinstance(instruction, Pause):
        return partner is not None and isinstance(partner[1], Pause) and isinstance(instruction, Pause)
    return mesh.group(member, partner[1].axes) == group


def _signature_of(schedule: Schedule, stop: Stop | None) -> object:
    """What all members of a group must agree on."""
    if stop is None or isinstance(stop[1], Pause):
        return None
    launch = stop[1]
    return launch.collective, launch.kind, launch.axes, schedule.shapes.get(launch.source)


def _differs(rank: int, stop: Stop, member: int, other: Stop | None, schedules: Mapping[int, Schedule]) -> Violation:
    assert other is not None

    def tell(where: int, what: Stop) -> str:
        shape = schedules[where].shapes.get(what[1].source) if isinstance(what[1], Launch) else None
        return _place(where, *what) + (f" of {short_dtype(shape[1])}{list(shape[0])}" if shape else "")

    fix = "all members of a group launch the same collective, kind, shape and dtype"
    return Violation("two ranks of a group launch different collectives", "across ranks", tell(rank, stop), tell(member, other), fix)


def _deadlock(stuck: dict[int, Stop], mesh: Mesh) -> Violation:
    lines = []
    for rank, (number, instruction) in sorted(stuck.items()):
        group = mesh.group(rank, instruction.axes) if isinstance(instruction, Launch) else tuple(range(mesh.size))
        others = ", ".join(str(member) for member in group if member != rank)
        lines.append(f"{_place(rank, number, instruction)} waits for rank{'s' if ',' in others else ''} {others}")
    got = "\n              ".join(lines)
    return Violation(
        "deadlock: nobody can advance",
        "across ranks",
        "one order of launches on all ranks",
        got,
        "launch collectives in one order everywhere",
    )
