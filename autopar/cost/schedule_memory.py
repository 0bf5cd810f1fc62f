"""What a rank holds while it runs its schedule, instruction by instruction, from the schedule alone.

Buffers are counted by the memory they lie in: a fragment's result that is a view of its input, or of another result, takes
none of its own. What a fragment needs within itself, and what a collective needs while it is under way, is not counted; nor is
what an optimizer holds.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from autopar._torch import fake_mode
from autopar.errors import ScheduleError
from autopar.ir.schedule import Add, Fragment, Free, Instruction, Launch, Layout, Receive, Run, Schedule, Wait

# By result of a fragment: the first of its inputs and results that lies in the same memory, and the bytes of that.
_Places = tuple[tuple[int, int], ...]


def peak_bytes(schedule: Schedule) -> int:
    """The most that a rank holds after any instruction, its inputs included. Raises `ScheduleError` for a buffer of unknown size."""
    return _Walk(schedule).peak()


@dataclass
class _Walk:
    schedule: Schedule
    # The memory that each buffer lies in, how many buffers lie there, and its bytes.
    memory: dict[str, int] = field(default_factory=dict[str, int])
    users: Counter[int] = field(default_factory=Counter[int])
    sizes: dict[int, int] = field(default_factory=dict[int, int])
    launched: dict[str, Instruction] = field(default_factory=dict[str, Instruction])
    places: dict[str, _Places] = field(default_factory=dict[str, _Places])
    bytes: int = 0

    def peak(self) -> int:
        for name in self.schedule.inputs:
            self.place(name, self.size_of(name))
        most = self.bytes
        for instruction in self.schedule.instructions:
            self.run(instruction)
            most = max(most, self.bytes)
        return most

    def run(self, instruction: Instruction) -> None:
        if isinstance(instruction, Run):
            self.compute(instruction)
        elif isinstance(instruction, Free):
            for name in instruction.buffers:
                self.drop(name)
        elif isinstance(instruction, Add):
            if instruction.target not in self.memory:
                self.place(instruction.target, self.size_of(instruction.source))
        elif isinstance(instruction, Wait):
            launched = self.launched.pop(instruction.target, None)
            arrived = (launched.target,) if isinstance(launched, Launch) else launched.buffers if isinstance(launched, Receive) else ()
            for name in arrived:
                self.place(name, self.size_of(name))
        elif isinstance(instruction, (Launch, Receive)):
            self.launched[instruction.target if isinstance(instruction, Launch) else instruction.transfer] = instruction

    def compute(self, instruction: Run) -> None:
        if instruction.fragment not in self.places:
            self.places[instruction.fragment] = _places(self.schedule.fragments[instruction.fragment])
        names = [*instruction.inputs, *instruction.outputs]
        for number, (name, (source, size)) in enumerate(zip(instruction.outputs, self.places[instruction.fragment], strict=True)):
            if source == number + len(instruction.inputs):
                self.place(name, size)
            else:
                self.share(name, self.memory[names[source]])

    def place(self, name: str, size: int) -> None:
        """Give a buffer memory of its own."""
        memory = len(self.sizes)
        self.sizes[memory] = size
        self.bytes += size
        self.share(name, memory)

    def share(self, name: str, memory: int) -> None:
        self.memory[name] = memory
        self.users[memory] += 1

    def drop(self, name: str) -> None:
        memory = self.memory.pop(name)
        self.users[memory] -= 1
        if not self.users[memory]:
            self.bytes -= self.sizes[memory]

    def size_of(self, name: str) -> int:
        layout: Layout | None = self.schedule.shape_of(name)
        if layout is None:
            raise ScheduleError(f"nothing is known of the size of buffer {name!r}")
        shape, dtype = layout
        return math.prod(shape) * dtype.itemsize


def _places(fragment: Fragment) -> _Places:
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
