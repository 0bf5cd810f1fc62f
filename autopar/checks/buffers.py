"""Invariants of the schedule of one rank: what happens to each buffer, from the first instruction to the last."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container
from typing import Any

from autopar.checks.violation import Violation
from autopar.ir.instructions import Add, Copy, Flight, Free, Instruction, Launch, Pause, Receive, Run, Send, Update, Wait
from autopar.ir.mesh import Mesh
from autopar.ir.printing import short_dtype
from autopar.ir.schedule import Schedule, TensorType


def check_buffers(
    rank: int, schedule: Schedule, mesh: Mesh, actions: Container[str] = frozenset(), is_executable: bool = True
) -> list[Violation]:
    """Every violation that shows on `rank` alone; `autopar.checks.schedule` lists the invariants.

    `actions` are what RUN may name besides fragments. Buffers may stay in a schedule that is not executable yet, and where none has
    a size, as in a grid, none needs one.
    """
    return _Walk(rank, schedule, mesh, actions, is_executable).run()


# How many characters of an instruction an error has: a fragment may have hundreds of operands.
LONGEST = 300


def place(rank: int, number: int, instruction: Instruction) -> str:
    """An instruction as errors name it."""
    text = str(instruction)
    return f"rank {rank}, instruction {number}: {text if len(text) <= LONGEST else text[:LONGEST] + ' …'}"


def describe(tensor_type: TensorType) -> str:
    """`f32[4, 8]`."""
    shape, dtype = tensor_type
    return f"{short_dtype(dtype)}{list(shape)}"


class _Walk:
    """One rank's schedule from the first instruction to the last, with the buffers that are there."""

    def __init__(self, rank: int, schedule: Schedule, mesh: Mesh, actions: Container[str], is_executable: bool) -> None:
        self.rank, self.schedule, self.mesh = rank, schedule, mesh
        self.actions, self.is_executable = actions, is_executable
        self.has_sizes = is_executable or any(each.type for each in schedule.buffers.values())
        inputs = schedule.signature.inputs
        is_late = not schedule.is_over_at_pause and any(isinstance(each, Pause) for each in schedule.instructions)
        self.late = {name for item, name in zip(inputs, schedule.inputs, strict=True) if is_late and item.kind == "tangent"}
        self.alive = set(schedule.inputs) - self.late
        self.freed: dict[str, int] = {}
        # What is launched and not waited for, by the name that WAIT gives it, and every transfer so far.
        self.flying: dict[str, Flight] = {}
        self.transfers: dict[str, int] = {}
        # For each buffer that a flight fills, or reads, the names of these flights.
        self.arriving: dict[str, str] = {}
        self.lent: dict[str, list[str]] = defaultdict(list)
        # What ADD made, and which of these were read since.
        self.sums: set[str] = set()
        self.closed: dict[str, int] = {}
        self.wanted: dict[str, list[Any]] = {}
        self.found: list[Violation] = []
        self.number = 0
        self.paused = False

    def run(self) -> list[Violation]:
        for number, instruction in enumerate(self.schedule.instructions):
            self.number = number
            _VISIT[type(instruction)](self, instruction)
        self.end()
        return self.found

    def say(self, what: str, expected: str = "", got: str = "", fix: str = "") -> None:
        instructions, here = self.schedule.instructions, ((self.rank, self.number),)
        is_over = self.number == len(instructions)
        where = f"rank {self.rank}, at the end" if is_over else place(self.rank, self.number, instructions[self.number])
        self.found.append(Violation(what, where, expected, got, fix, instructions=here))

    def read(self, name: str, wherever: bool = False) -> None:
        where = self.schedule.memory_of(name)
        if where != "device" and not wherever:
            self.say(f"buffer {name} lies in {where} memory", "what the device can read", where, "copy it to the device before")
        if name in self.sums:
            self.closed.setdefault(name, self.number)
        if name in self.arriving:
            flight = self.flying[self.arriving[name]]
            expected, got = f"WAIT {self.arriving[name]} first", f"{_word(flight)} only"
            what = f"buffer {name} is read before its {_noun(flight)} is complete"
            self.say(what, expected, got, f"put WAIT {self.arriving[name]} before")
        elif name in self.freed:
            self.say(f"buffer {name} is read after it was freed", got=f"freed by instruction {self.freed[name]}", fix="free it later")
        elif name not in self.alive:
            self.say(f"buffer {name} is read before anything wrote it", fix="run what makes it earlier")

    def write(self, name: str) -> None:
        if name in self.alive or name in self.arriving or name in self.freed:
            self.say(f"buffer {name} is written twice", fix="give the second value a name of its own")
        self.freed.pop(name, None)
        self.alive.add(name)

    def compute(self, instruction: Run) -> None:
        for name in instruction.inputs:
            self.read(name)
        for name in instruction.outputs:
            self.write(name)
        if instruction.fragment in self.actions:
            return
        if instruction.fragment not in self.schedule.fragments:
            self.say(f"there is no fragment {instruction.fragment}", ", ".join(sorted(self.schedule.fragments)), instruction.fragment)
            return
        wanted = self._wanted_by(instruction.fragment)
        if len(wanted) != len(instruction.inputs):
            expected, got = str(len(wanted)), str(len(instruction.inputs))
            self.say("the fragment takes another number of inputs", expected, got, "pass one buffer per input")
            return
        for name, value in zip(instruction.inputs, wanted, strict=True):
            given = self.schedule.type_of(name)
            if value is not None and given is not None and given != (tuple(value.shape), value.dtype):
                expected = describe((tuple(value.shape), value.dtype))
                self.say(f"buffer {name} does not fit the fragment's input", expected, describe(given), "cut the fragments anew")

    def _wanted_by(self, fragment: str) -> list[Any]:
        """The values that a fragment takes; one of equal layers runs many times."""
        if fragment not in self.wanted:
            nodes = self.schedule.fragments[fragment].module.graph.nodes
            self.wanted[fragment] = [node.meta.get("val") for node in nodes if node.op == "placeholder"]
        return self.wanted[fragment]

    def fly(self, name: str, instruction: Flight) -> None:
        before = self.flying.get(name)
        if before is not None and type(before) is not type(instruction):
            what = f"a {_noun(before)} and a {_noun(instruction)} under way are both called {name}"
            self.say(what, "one name for each", str(before), "rename one of them")
        self.land(name)
        self.flying[name] = instruction

    def land(self, name: str) -> None:
        """What was launched under `name`, if anything, is complete."""
        flight = self.flying.pop(name, None)
        for buffer in flight.writes if flight else ():
            self.arriving.pop(buffer, None)
            if buffer not in self.freed:
                self.alive.add(buffer)
        for buffer in flight.reads if flight else ():
            self.lent[buffer].remove(name)

    def launch(self, instruction: Launch) -> None:
        for name in instruction.sources:
            self.read(name)
        for name in instruction.targets:
            self.write(name)
        self.fly(instruction.name, instruction)
        for name in instruction.targets:
            self.alive.discard(name)
            self.arriving[name] = instruction.name
        for name in instruction.sources:
            self.lent[name].append(instruction.name)
        self._check_bucket(instruction)
        unknown = [axis for axis in instruction.axes if axis not in self.mesh.names]
        if unknown:
            self.say(f"unknown axis {unknown[0]!r}", f"axes of the mesh ({self.mesh})", ",".join(instruction.axes))
            return
        self._check_nodes(instruction)
        for names in zip(instruction.sources, instruction.targets, strict=False):
            source, target = map(self.schedule.type_of, names)
            if source is not None and target is not None:
                self._check_result(instruction, source, target)

    def _check_bucket(self, instruction: Launch) -> None:
        sources, targets = len(instruction.sources), len(instruction.targets)
        if sources != targets:
            self.say("a collective has one target for each source", str(sources), str(targets), "name as many targets as sources")
        dtypes = {short_dtype(found[1]): name for name in instruction.sources if (found := self.schedule.type_of(name)) is not None}
        if len(dtypes) > 1:
            self.say("a bucket is of one dtype", " or ".join(dtypes), ", ".join(dtypes.values()), "put them into a bucket each")

    def _check_nodes(self, instruction: Launch) -> None:
        size, node_size = self.mesh.size_of(instruction.axes), instruction.node_size
        if node_size and instruction.collective not in ("all_gather", "reduce_scatter"):
            self.say("only gathers and scatters go by node", "all_gather or reduce_scatter", instruction.collective)
        elif node_size and (size % node_size or not 1 < node_size < size):
            self.say("nodes have equally many ranks of a group", f"a divisor of {size}, above 1 and below it", str(node_size))

    def _check_result(self, instruction: Launch, source: TensorType, target: TensorType) -> None:
        size = self.mesh.size_of(instruction.axes)
        expected = _result_shape(instruction, source[0], size)
        if expected is None:
            what = f"{instruction.collective} wants one entry per rank first"
            self.say(what, f"[{size}, …]", str(list(source[0])), "lay the parts out along dim 0")
        elif (expected, source[1]) != target:
            what = "the target does not have the collective's shape"
            self.say(what, describe((expected, source[1])), describe(target), "set the shape from the source")

    def copy(self, instruction: Copy) -> None:
        sources, targets = instruction.sources, instruction.targets
        for name in sources:
            self.read(name, wherever=True)
        for name in targets:
            self.write(name)
        self.fly(instruction.name, instruction)
        for name in targets:
            self.alive.discard(name)
            self.arriving[name] = instruction.name
        for name in sources:
            self.lent[name].append(instruction.name)

    def send(self, instruction: Send) -> None:
        self._name_transfer(instruction)
        for name in instruction.buffers:
            self.read(name)
            self.lent[name].append(instruction.transfer)

    def receive(self, instruction: Receive) -> None:
        self._name_transfer(instruction)
        for name in instruction.buffers:
            self.write(name)
            self.alive.discard(name)
            self.arriving[name] = instruction.transfer
            if self.has_sizes and self.schedule.type_of(name) is None:
                self.say(
                    f"nothing says how large buffer {name} is", "its shape and dtype", "neither", "put them into the schedule's buffers"
                )

    def _name_transfer(self, instruction: Send | Receive) -> None:
        name = instruction.transfer
        if name in self.transfers:
            got = f"before at instruction {self.transfers[name]}"
            self.say(f"transfer {name} is launched twice", "a name of its own for each", got, "leave one out, or rename it")
        self.transfers.setdefault(name, self.number)
        self.fly(name, instruction)

    def wait(self, instruction: Wait) -> None:
        if instruction.target not in self.flying:
            waited = instruction.target in self.alive or instruction.target in self.transfers
            got = "it was waited for before" if waited else "it was never launched"
            self.say(f"WAIT without a LAUNCH for {instruction.target}", "one WAIT for each LAUNCH", got, "drop the WAIT or launch first")
        self.land(instruction.target)

    def add(self, instruction: Add) -> None:
        source, target = instruction.source, instruction.target
        if source == target:
            self.say(f"buffer {target} is added to itself", "another buffer", source)
            return
        self.read(source)
        if target not in self.sums and (target in self.alive or target in self.arriving or target in self.late):
            expected, got = "a buffer that only ADD writes", "one that something else wrote"
            self.say(f"ADD into buffer {target}, which others may share", expected, got, "add into a buffer of its own")
        elif target in self.freed:
            got = f"freed by instruction {self.freed[target]}"
            self.say(f"buffer {target} is added to after it was freed", got=got, fix="free it later")
        elif target in self.closed:
            got = f"read by instruction {self.closed[target]}"
            self.say(f"buffer {target} is added to after it was read", "reads after the last ADD", got, "read it later")
        types = [self.schedule.type_of(name) for name in (target, source)]
        if None not in types and types[0] != types[1]:
            expected, got = (describe(tensor_type) for tensor_type in types if tensor_type is not None)
            self.say(f"buffers {target} and {source} cannot be added", expected, got, "add what has one shape and dtype")
        self.sums.add(target)
        self.alive.add(target)

    def update(self, instruction: Update) -> None:
        for name in instruction.parameters:
            self.read(name, wherever=True)
        for name in instruction.gradients:
            self.read(name)
        for name in instruction.versions:
            self.write(name)

    def free(self, instruction: Free) -> None:
        for name in instruction.buffers:
            using = [self.arriving[name]] if name in self.arriving else self.lent.get(name, [])
            if using:
                what = f"buffer {name} is freed while a {_noun(self.flying[using[0]])} uses it"
                self.say(what, f"WAIT {using[0]} first", "no WAIT yet", "free it after the WAIT")
            if name in self.freed:
                got = f"freed by instruction {self.freed[name]}"
                self.say(f"buffer {name} is freed twice", got=got, fix="free it once, after its last use")
            elif name not in self.alive and not using:
                self.say(f"buffer {name} is freed before anything wrote it", fix="free it after its last use")
            self.alive.discard(name)
            self.freed[name] = self.number

    def pause(self, instruction: Pause) -> None:
        if self.paused:
            self.say("PAUSE comes twice", "at most one PAUSE", "another before", "hand the outputs out once")
        if self.schedule.is_over_at_pause and self.number + 1 < len(self.schedule.instructions):
            self.say("all is over at PAUSE, and more follows it", "PAUSE last", "more behind it", "append before PAUSE")
        self.paused = True
        self.alive |= self.late
        self._present("loss", "output", "check")

    def _present(self, *kinds: str) -> None:
        for item, name in zip(self.schedule.signature.outputs, self.schedule.outputs, strict=True):
            if item.kind not in kinds:
                continue
            # Whoever has it now may keep it.
            self.closed.setdefault(name, self.number)
            if name not in self.alive:
                freed = f"freed by instruction {self.freed[name]}" if name in self.freed else "never written"
                got = "still in flight" if name in self.arriving else freed
                what = f"{item.kind} {item.name!r} (buffer {name}) is not there"
                self.say(what, "written, complete and not freed", got, "keep it until here")

    def end(self) -> None:
        self.number = len(self.schedule.instructions)
        self._present(*(("gradient", "buffer") if self.paused else ("loss", "output", "check", "gradient", "buffer")))
        for name, flight in self.flying.items():
            what = f"the {_noun(flight)} into {name}" if isinstance(flight, (Launch, Copy)) else f"the {_noun(flight)} {name}"
            self.say(f"{what} is never waited for", f"one WAIT for each {_word(flight)}", "none", f"add WAIT {name}")
        left = self.alive - set(self.schedule.inputs) - set(self.schedule.outputs)
        if left and self.is_executable:
            self.say("buffers are never freed", got=", ".join(sorted(left)), fix="free each after its last use")


_VISIT: dict[type, Callable[[_Walk, Any], None]] = {
    Run: _Walk.compute,
    Launch: _Walk.launch,
    Copy: _Walk.copy,
    Send: _Walk.send,
    Receive: _Walk.receive,
    Wait: _Walk.wait,
    Add: _Walk.add,
    Update: _Walk.update,
    Free: _Walk.free,
    Pause: _Walk.pause,
}


_WORDS: dict[type, str] = {Launch: "LAUNCH", Copy: "COPY", Send: "SEND", Receive: "RECV"}
_NOUNS: dict[type, str] = {Launch: "collective", Copy: "copy", Send: "send", Receive: "receive"}


def _word(flight: Flight) -> str:
    return _WORDS[type(flight)]


def _noun(flight: Flight) -> str:
    return _NOUNS[type(flight)]


def _result_shape(launch: Launch, source: tuple[int, ...], size: int) -> tuple[int, ...] | None:
    """The target's shape; None when the source lacks its dim of one entry per rank."""
    if launch.collective == "all_gather":
        return (size, *source)
    if launch.collective == "all_reduce":
        return source
    if not source or source[0] != size:
        return None
    return source[1:] if launch.collective == "reduce_scatter" else source
