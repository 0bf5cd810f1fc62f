"""What a rank holds while it runs its schedule, instruction by instruction, from the schedule alone: no clock is needed.

Buffers are counted by the memory they lie in: a fragment's result that is a view of its input, or of another result, takes
none of its own. What a fragment needs within itself is counted where `Sizes` says it. What a collective needs while it is under
way is counted where arrivals are those of processes: its results from its launch on, and the memory in which a bucket is put together
or taken apart. What an optimizer holds is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.fx import GraphModule
from torch.multiprocessing.reductions import StorageWeakRef

from autopar._torch import fake_mode
from autopar.ir.actions import parse_action
from autopar.ir.instructions import Add, Free, Instruction, Launch, Receive, Run, Wait
from autopar.ir.lifetimes import touched, with_frees
from autopar.ir.schedule import Fragment, Schedule

# By result of a fragment: the first of its inputs and results that lies in the same memory, and the bytes of that.
_Places = tuple[tuple[int, int], ...]


class MemoryStep(NamedTuple):
    """Bytes while the instruction at `position` runs and after it, and microbatches (of any stage) of which values are saved then."""

    position: int
    during_bytes: float
    after_bytes: float
    live_microbatches: int


@dataclass(frozen=True)
class RankMemory:
    """The memory of one rank; a step for each instruction that makes or drops a buffer. `held_bytes` are there before the first."""

    steps: tuple[MemoryStep, ...]
    held_bytes: float

    @property
    def peak_bytes(self) -> float:
        return max((step.during_bytes for step in self.steps), default=self.held_bytes)

    @property
    def peak_live_microbatches(self) -> int:
        """A microbatch counts once for each of the rank's stages, while a buffer of the role "saved" is there that its backward reads."""
        return max((step.live_microbatches for step in self.steps), default=0)


@dataclass(frozen=True)
class Sizes:
    """What a schedule itself does not say.

    buffer_bytes   of a buffer with memory of its own, where no fragment says it
    working_bytes  what a RUN needs besides its buffers while it runs
    held_bytes     what is there all the time and is no buffer
    arrival        when a receive or a collective takes its memory: at its launch, as on processes, or at its WAIT, as on virtual ranks
    """

    buffer_bytes: Callable[[str], float]
    working_bytes: Callable[[Run], float] = lambda run: 0
    held_bytes: float = 0
    arrival: Literal["launch", "wait"] = "wait"


def peak_bytes(schedule: Schedule) -> int:
    """The most that a rank holds after any instruction, its inputs included. Raises `ScheduleError` for a buffer of unknown size."""
    return int(schedule_memory(schedule).peak_bytes)


def peak_bytes_on_processes(schedule: Schedule) -> int:
    """Likewise of a schedule without its FREEs yet, on a process of its own."""
    groups = with_frees(schedule.instructions, {*schedule.inputs, *schedule.outputs})
    return int(schedule_memory(schedule, Sizes(schedule.bytes_of, arrival="launch"), groups).peak_bytes)


def schedule_memory(schedule: Schedule, sizes: Sizes | None = None, groups: Iterable[Sequence[Instruction]] | None = None) -> RankMemory:
    """The memory of a rank over its instructions; sizes are those of the types of its buffers unless `sizes` says others.

    `groups` are instructions that count as one step, those of the schedule with what frees its buffers (`autopar.ir.lifetimes`); by
    default each is a step of its own.
    """
    walk = _Walk(schedule, sizes or Sizes(schedule.bytes_of))
    return walk.run(((each,) for each in schedule.instructions) if groups is None else groups)


@dataclass
class _Walk:
    schedule: Schedule
    sizes: Sizes
    # The memory that each buffer lies in, how many buffers lie there, and its bytes.
    memory: dict[str, int] = field(default_factory=dict[str, int])
    users: Counter[int] = field(default_factory=Counter[int])
    bytes_of: dict[int, float] = field(default_factory=dict[int, float])
    launched: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    # How many saved values there are for which stage of which microbatch.
    saved: Counter[tuple[int, int | None]] = field(default_factory=Counter[tuple[int, int | None]])
    live: int = 0
    bytes: float = 0
    # Since the step began: the most bytes and live microbatches, and whether a buffer came or went.
    most_bytes: float = 0
    most_live: int = 0
    is_changed: bool = False

    def run(self, groups: Iterable[Sequence[Instruction]]) -> RankMemory:
        self.bytes = self.sizes.held_bytes
        for name in self.schedule.inputs:
            self.place(name, self.sizes.buffer_bytes(name))
        held, steps = self.bytes, list[MemoryStep]()
        for position, group in enumerate(groups):
            self.most_bytes, self.most_live, self.is_changed = self.bytes, self.live, False
            for instruction in group:
                self.visit(instruction)
            if self.is_changed:
                steps.append(MemoryStep(position, self.most_bytes, self.bytes, self.most_live))
        return RankMemory(tuple(steps), held)

    def visit(self, instruction: Instruction) -> None:
        if isinstance(instruction, Run):
            self.compute(instruction)
        elif isinstance(instruction, Free):
            for name in instruction.buffers:
                self.drop(name)
        elif isinstance(instruction, Add):
            if instruction.target not in self.memory:
                self.place(instruction.target, self.sizes.buffer_bytes(instruction.source))
        elif isinstance(instruction, Wait):
            self.arrive(self.launched.pop(instruction.target, ()))
            self.unpack(instruction.target)
        elif isinstance(instruction, (Launch, Receive)):
            self.depart(instruction)

    def depart(self, instruction: Launch | Receive) -> None:
        """Something that will fill buffers is launched."""
        if self.sizes.arrival == "wait":
            self.launched[instruction.name] = instruction.writes
            return
        self.arrive(instruction.writes)
        if isinstance(instruction, Launch):
            self.pack(instruction)

    @cached_property
    def savers(self) -> dict[str, int]:
        """By saved buffer the stage whose backward reads it here; of what is saved for other ranks alone there is none."""
        found: dict[str, int] = {}
        for span in self.schedule.spans:
            action = parse_action(span.action)
            if action.kind != "F":
                names = {name for each in self.schedule.instructions[span.begin : span.end] for name in touched(each)}
                found |= {name: action.stage for name in names if self._is_saved(name)}
        return found

    def _is_saved(self, name: str) -> bool:
        return name in self.schedule.buffers and self.schedule.buffers[name].role == "saved"

    def arrive(self, names: Iterable[str]) -> None:
        for name in names:
            self.place(name, self.sizes.buffer_bytes(name))

    def pack(self, bucket: Launch) -> None:
        """The memory of several buffers under way besides their results: all-reduces are done in these."""
        packed = {"all_gather": (*bucket.sources, *bucket.targets), "reduce_scatter": bucket.sources}.get(bucket.collective, ())
        if len(bucket.sources) > 1 and packed:
            self.place(_packed(bucket.name), sum(map(self.sizes.buffer_bytes, packed)))

    def unpack(self, name: str) -> None:
        if _packed(name) in self.memory:
            self.drop(_packed(name))

    def compute(self, instruction: Run) -> None:
        fragment = self.schedule.fragments.get(instruction.fragment)
        if fragment is None:
            self.arrive(instruction.outputs)
        else:
            self.compute_fragment(instruction, fragment)
        working = self.sizes.working_bytes(instruction)
        self.most_bytes = max(self.most_bytes, self.bytes + working)

    def compute_fragment(self, instruction: Run, fragment: Fragment) -> None:
        names = [*instruction.inputs, *instruction.outputs]
        for number, (name, (source, size)) in enumerate(zip(instruction.outputs, _places(fragment), strict=True)):
            if source == number + len(instruction.inputs):
                self.place(name, size)
            else:
                self.share(name, self.memory[names[source]])

    def place(self, name: str, size: float) -> None:
        """Give a buffer memory of its own."""
        memory = len(self.bytes_of)
        self.bytes_of[memory] = size
        self.bytes += size
        self.most_bytes = max(self.most_bytes, self.bytes)
        self.share(name, memory)

    def share(self, name: str, memory: int) -> None:
        self.memory[name] = memory
        self.users[memory] += 1
        self.count(name, 1)

    def drop(self, name: str) -> None:
        memory = self.memory.pop(name)
        self.users[memory] -= 1
        self.count(name, -1)
        if not self.users[memory]:
            self.bytes -= self.bytes_of[memory]

    def count(self, name: str, by: int) -> None:
        self.is_changed = True
        if name not in self.savers:
            return
        whose = self.savers[name], self.schedule.buffers[name].microbatch
        before = self.saved[whose] > 0
        self.saved[whose] += by
        self.live += (self.saved[whose] > 0) - before
        self.most_live = max(self.most_live, self.live)


def _packed(name: str) -> str:
    """A name that no buffer has, for the memory of a bucket under way."""
    return f"bucket {name}"


def lies_with(fragment: Fragment) -> tuple[int, ...]:
    """By result of a fragment the first of its inputs and results, in this order, that lies in the same memory.

    Of a fragment whose inputs have no known shapes nothing is said to be a view.
    """
    if any("val" not in node.meta for node in fragment.module.graph.find_nodes(op="placeholder")):
        return ()
    return tuple(source for source, _ in _places(fragment))


# By fragment: passes that look for what fits walk through one schedule many times.
_PLACES: WeakKeyDictionary[GraphModule, _Places] = WeakKeyDictionary()


def _places(fragment: Fragment) -> _Places:
    if fragment.module not in _PLACES:
        _PLACES[fragment.module] = _found_places(fragment)
    return _PLACES[fragment.module]


def _found_places(fragment: Fragment) -> _Places:
    """By running the fragment on tensors without memory."""
    given = [node.meta["val"] for node in fragment.module.graph.find_nodes(op="placeholder")]
    with fake_mode(), torch.no_grad():
        inputs = [torch.empty_strided(each.shape, each.stride(), dtype=each.dtype) for each in given]
        results = fragment.module(*inputs)
    first: dict[StorageWeakRef, int] = {}
    found: list[tuple[int, int]] = []
    for number, tensor in enumerate([*inputs, *results]):
        source = first.setdefault(StorageWeakRef(tensor.untyped_storage()), number)
        if number >= len(inputs):
            found.append((source, tensor.untyped_storage().nbytes()))
    return tuple(found)
