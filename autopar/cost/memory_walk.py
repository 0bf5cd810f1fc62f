"""The walk over the instructions of a rank that counts its memory (`autopar.cost.schedule_memory`)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from autopar.cost.buffer_kinds import Kind, kinds_of
from autopar.cost.fragment_places import places_of
from autopar.cost.rank_memory import MemoryStep, RankMemory, Sizes
from autopar.ir.actions import parse_action
from autopar.ir.instructions import Add, Copy, Free, Instruction, Launch, Memory, Pause, Receive, Run, Update, Wait
from autopar.ir.lifetimes import touched
from autopar.ir.schedule import Fragment, Schedule

# Where a tensor may begin in a bucket: what kernels like, and Inductor expects of its inputs.
BUCKET_ALIGNMENT_BYTES = 64
# From so many bytes on, of all ranks, gathers and scatters over gloo go between pairs of ranks (`autopar.runtime.execute.paired`).
PAIRED_BYTES = 1 << 20


@dataclass
class Walk:
    """Goes through the instructions of a rank, and knows what there is."""

    schedule: Schedule
    sizes: Sizes
    # The memory that each buffer lies in, how many buffers lie there, and its bytes.
    memory: dict[str, int] = field(default_factory=dict[str, int])
    users: Counter[int] = field(default_factory=Counter[int])
    bytes_of: dict[int, float] = field(default_factory=dict[int, float])
    kind_of: dict[int, Kind] = field(default_factory=dict[int, Kind])
    # What is not on the device: where each memory is, their bytes by that, and the most so far.
    parked: dict[int, Memory] = field(default_factory=dict[int, Memory])
    parked_bytes: dict[Memory, float] = field(default_factory=dict[Memory, float])
    most_parked: dict[Memory, float] = field(default_factory=dict[Memory, float])
    kinds: dict[Kind, float] = field(default_factory=dict[Kind, float])
    launched: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    # How many saved values there are for which stage of which microbatch.
    saved: Counter[tuple[int, int | None]] = field(default_factory=Counter[tuple[int, int | None]])
    live: int = 0
    bytes: float = 0
    # Since the step began: the most bytes and live microbatches, and whether a buffer came or went.
    most_bytes: float = 0
    most_kinds: dict[Kind, float] = field(default_factory=dict[Kind, float])
    most_live: int = 0
    is_changed: bool = False

    def run(self, groups: Iterable[Sequence[Instruction]]) -> RankMemory:
        self.bytes = self.sizes.held_bytes + self.sizes.given_bytes
        self.parked_bytes |= self.sizes.parked_bytes
        self.most_parked |= {where: size for where, size in self.sizes.parked_bytes.items() if size}
        self.kinds |= {"optimizer": self.sizes.held_bytes, "inputs": self.sizes.given_bytes}
        for name in self.schedule.inputs:
            where = self.schedule.memory_of(name)
            if where == "device":
                self.place(name, self.sizes.buffer_bytes(name))
            else:
                self.park(name, self.sizes.buffer_bytes(name), where)
        if self.sizes.arrival == "launch":
            for each in self.schedule.instructions:
                if isinstance(each, Launch) and len(each.sources) > 1 and each.collective != "all_gather":
                    self.keep_bucket(each)
        held, steps = self.bytes, list[MemoryStep]()
        for position, group in enumerate(groups):
            self.most_bytes, self.most_kinds = self.bytes, dict(self.kinds)
            self.most_live, self.is_changed = self.live, False
            for instruction in group:
                self.visit(instruction)
            if self.is_changed:
                steps.append(MemoryStep(position, self.most_bytes, self.bytes, self.most_live, self.most_kinds))
        return RankMemory(tuple(steps), held, dict(self.most_parked))

    def visit(self, instruction: Instruction) -> None:
        if isinstance(instruction, Run):
            self.compute(instruction)
        elif isinstance(instruction, Free):
            self.drop_all(instruction.buffers)
        elif isinstance(instruction, Add):
            if instruction.target not in self.memory:
                self.place(instruction.target, self.sizes.buffer_bytes(instruction.source))
        elif isinstance(instruction, Update):
            self.work(instruction)
            self.arrive(instruction.versions)
        elif isinstance(instruction, Wait):
            self.drop_if_there(_second(instruction.target))
            self.land(self.launched.pop(instruction.target, ()))
            self.drop_if_there(_flight(instruction.target))
        elif isinstance(instruction, Copy):
            self.copy(instruction)
        elif isinstance(instruction, Pause) and self.sizes.taken_bytes:
            self.place("results, as the caller gets them", self.sizes.taken_bytes)
        elif isinstance(instruction, (Launch, Receive)):
            self.depart(instruction)

    def copy(self, instruction: Copy) -> None:
        """Into memory that is taken at once, everywhere: the sources lie in one, and so will the targets."""
        self.launched[instruction.name] = instruction.writes
        first, size = instruction.name, self.bytes_of[self.memory[instruction.sources[0]]]
        if instruction.memory == "device":
            self.place(first, size, "in flight")
        else:
            self.park(first, size, instruction.memory)
        for name in instruction.targets[1:]:
            self.share(name, self.memory[first])

    def park(self, name: str, size: float, where: Memory) -> None:
        memory = len(self.bytes_of)
        self.bytes_of[memory], self.parked[memory] = size, where
        self.parked_bytes[where] = self.parked_bytes.get(where, 0) + size
        self.most_parked[where] = max(self.most_parked.get(where, 0), self.parked_bytes[where])
        self.kind_of[memory] = "activations"
        self.share(name, memory)

    def depart(self, instruction: Launch | Receive) -> None:
        """Something that will fill buffers is launched."""
        self.launched[instruction.name] = instruction.writes
        if self.sizes.arrival != "launch":
            return
        if isinstance(instruction, Launch) and self.is_in_place(instruction):
            return self.share(instruction.name, self.memory[instruction.sources[0]])
        if isinstance(instruction, Launch) and len(instruction.sources) > 1:
            self.depart_bucket(instruction)
            return
        for each in instruction.writes:
            self.place(each, self.sizes.buffer_bytes(each), "in flight")
        if isinstance(instruction, Launch) and instruction.collective in ("all_gather", "reduce_scatter"):
            part, whole = sorted(sum(map(self.sizes.buffer_bytes, names)) for names in (instruction.sources, instruction.targets))
            self.arrive_beside(instruction, part, round(whole / part) if part else 1, whole if instruction.node_size else 0.0)

    def is_in_place(self, launch: Launch) -> bool:
        """Whether the result takes the place of what is reduced, which nothing reads any more, nor what lies in its memory."""
        source = launch.sources[0]
        if launch.collective != "all_reduce" or len(launch.sources) > 1 or source not in self.schedule.spent:
            return False
        memory = self.memory[source]
        return self.users[memory] == 1 and self.bytes_of[memory] == self.sizes.buffer_bytes(source)

    @cached_property
    def kinds_by_name(self) -> Mapping[str, Kind]:
        return kinds_of(self.schedule)

    @cached_property
    def savers(self) -> dict[str, int]:
        """By saved buffer the stage whose backward reads it here; of what is saved for other ranks alone there is none. Where two actions
        take turns, the end of one lies in the span of the other, which is of another microbatch."""
        found: dict[str, int] = {}
        for span in self.schedule.spans:
            action, inside = parse_action(span.action), self.schedule.instructions[span.begin : span.end]
            if action.kind != "F":
                found |= {name: action.stage for each in inside for name in touched(each) if self._is_saved(name)}
            for name in {name for each in inside for name in each.reads if self._is_saved(name)}:
                if self.schedule.buffers[name].microbatch != action.microbatch:
                    found.setdefault(name, action.stage)
        return found

    def _is_saved(self, name: str) -> bool:
        return name in self.schedule.buffers and self.schedule.buffers[name].role == "saved"

    def arrive(self, names: Iterable[str]) -> None:
        for name in names:
            self.place(name, self.sizes.buffer_bytes(name))

    def land(self, names: Iterable[str]) -> None:
        """What was launched is there: it takes its memory now, or is under way no more."""
        for name in names:
            if name not in self.memory:
                self.place(name, self.sizes.buffer_bytes(name))
            elif self.memory[name] not in self.parked:
                self.recount(self.memory[name], self.kinds_by_name[name])

    def keep_bucket(self, bucket: Launch) -> None:
        """There from the step before: what is summed in it."""
        kinds = {self.kinds_by_name.get(each) for each in bucket.targets}
        self.place(_bucket(bucket.name), self.laid_bytes(bucket.targets), "gradients" if kinds == {"gradients"} else "buckets")

    def depart_bucket(self, bucket: Launch) -> None:
        if bucket.collective == "all_gather":
            self.fly(bucket, bucket.sources, bucket.targets)
            return
        for each in bucket.targets:
            self.share(each, self.memory[_bucket(bucket.name)])
        if bucket.collective == "reduce_scatter":
            self.fly(bucket, bucket.targets, bucket.sources)

    def fly(self, bucket: Launch, parts: Sequence[str], wholes: Sequence[str]) -> None:
        """Memory for all ranks' parts, each rank's laid out alike, until the WAIT."""
        sizes = [sum(map(self.sizes.buffer_bytes, names)) for names in (parts, wholes)]
        part, num_ranks = self.laid_bytes(parts), round(sizes[1] / sizes[0]) if sizes[0] else 1
        self.place(_flight(bucket.name), num_ranks * part, "in flight")
        self.arrive_beside(bucket, part, num_ranks)

    def arrive_beside(self, launch: Launch, part: float, num_ranks: int, in_order: float = 0.0) -> None:
        """What a launch takes besides. By node the sum of one, and what is put `in_order`. Over gloo small messages twice: it gathers in
        memory of its own, and what is to be added up arrives beside what is sent. Of large ones, the other ranks' parts of a sum alone;
        and where several in half precision are added up, their sum in float32."""
        size = launch.node_size
        beside = in_order + (num_ranks // size * part if size and launch.collective == "reduce_scatter" else 0.0)
        if self.sizes.over_gloo:
            ways = ((size, num_ranks // size * part), (num_ranks // size, part)) if size else ((num_ranks, part),)
            beside += sum(self._over_gloo(launch, each, ranks) for ranks, each in ways)
        elif not size:
            return
        self.place(_second(launch.name), beside, "in flight")

    def _over_gloo(self, launch: Launch, part: float, num_ranks: int) -> float:
        tensor_type = self.schedule.type_of(launch.sources[0])
        is_half = tensor_type is not None and tensor_type[1] in (torch.float16, torch.bfloat16)
        is_paired, is_sum = num_ranks * part >= PAIRED_BYTES, launch.collective == "reduce_scatter"
        parts = num_ranks if not is_paired else num_ranks - 1 if is_sum else 0
        parts += 2 if is_sum and is_half and num_ranks > 2 else 0
        return parts * part

    def laid_bytes(self, names: Iterable[str]) -> float:
        """Of buffers side by side, each where kernels like it to begin."""
        return sum(BUCKET_ALIGNMENT_BYTES * math.ceil(self.sizes.buffer_bytes(name) / BUCKET_ALIGNMENT_BYTES) for name in names)

    def drop_all(self, names: Iterable[str]) -> None:
        for name in names:
            self.drop(name)

    def drop_if_there(self, name: str) -> None:
        if name in self.memory:
            self.drop(name)

    def compute(self, instruction: Run) -> None:
        fragment = self.schedule.fragments.get(instruction.fragment)
        if fragment is None:
            self.arrive(instruction.outputs)
        else:
            self.compute_fragment(instruction, fragment)
        self.work(instruction)

    def work(self, instruction: Run | Update) -> None:
        working = self.sizes.working_bytes(instruction)
        if self.bytes + working > self.most_bytes:
            self.most_bytes, self.most_kinds, self.is_changed = self.bytes + working, {**self.kinds, "temporaries": working}, True

    def compute_fragment(self, instruction: Run, fragment: Fragment) -> None:
        names = [*instruction.inputs, *instruction.outputs]
        for number, (name, (source, size)) in enumerate(zip(instruction.outputs, places_of(fragment), strict=True)):
            if source == number + len(instruction.inputs):
                self.place(name, size)
            else:
                self.share(name, self.memory[names[source]])

    def place(self, name: str, size: float, kind: Kind | None = None) -> None:
        """Give a buffer memory of its own."""
        memory = len(self.bytes_of)
        self.bytes_of[memory] = size
        self.bytes += size
        self.count_kind(memory, kind or self.kinds_by_name.get(name, "activations"))
        if self.bytes > self.most_bytes:
            self.most_bytes, self.most_kinds = self.bytes, dict(self.kinds)
        self.share(name, memory)

    def count_kind(self, memory: int, kind: Kind) -> None:
        self.kind_of[memory] = kind
        self.kinds[kind] = self.kinds.get(kind, 0) + self.bytes_of[memory]

    def recount(self, memory: int, kind: Kind) -> None:
        self.kinds[self.kind_of[memory]] -= self.bytes_of[memory]
        self.count_kind(memory, kind)

    def share(self, name: str, memory: int) -> None:
        if self.kind_of[memory] == "activations" and self.kinds_by_name.get(name) == "gradients":
            self.recount(memory, "gradients")
        self.memory[name] = memory
        self.users[memory] += 1
        self.count(name, 1)

    def drop(self, name: str) -> None:
        memory = self.memory.pop(name)
        self.users[memory] -= 1
        self.count(name, -1)
        if not self.users[memory] and memory in self.parked:
            self.parked_bytes[self.parked[memory]] -= self.bytes_of[memory]
        elif not self.users[memory]:
            self.bytes -= self.bytes_of[memory]
            self.kinds[self.kind_of[memory]] -= self.bytes_of[memory]

    def count(self, name: str, by: int) -> None:
        self.is_changed = True
        if name not in self.savers:
            return
        whose = self.savers[name], self.schedule.buffers[name].microbatch
        before = self.saved[whose] > 0
        self.saved[whose] += by
        self.live += (self.saved[whose] > 0) - before
        self.most_live = max(self.most_live, self.live)


def _bucket(name: str) -> str:
    """A name that no buffer has, for the memory of the bucket that is launched by `name`."""
    return f"bucket {name}"


def _second(name: str) -> str:
    """Likewise, for what is there besides over gloo."""
    return f"memory of {name} over gloo"


def _flight(name: str) -> str:
    """Likewise, for what is under way besides."""
    return f"{_bucket(name)} under way"
