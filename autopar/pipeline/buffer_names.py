"""Names of buffers in a schedule: one for each value of the LOCAL program and each microbatch; and what a name stands for.

h@2          a value of microbatch 2; where there is one microbatch, h
tokens       what there is one of in a step: parameters, what is known ahead, what is done to sums
w_grad.sum   what the microbatches, or several stages, add up
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch.fx import Node

from autopar.graph.fragments import buffer_of, types_of
from autopar.ir.instructions import Instruction, Launch, Run, Wait
from autopar.ir.program import Input, Program
from autopar.ir.schedule import Buffer, Role, TensorType
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.pipeline.stage_cut import StageCut
from autopar.pipeline.stage_rules import differs

Rename = Callable[[str], str]


@dataclass
class BufferNames:
    """Names values, and keeps in `table` what every name given so far stands for."""

    cut: StageCut
    num_microbatches: int
    table: dict[str, Buffer] = field(default_factory=dict[str, Buffer])

    @classmethod
    def of(cls, program: ScheduleProgram) -> BufferNames:
        assert program.cut is not None, "a grid has no values"
        return cls(program.cut, program.order.num_microbatches, dict(program.buffers))

    def of_microbatch(self, number: int) -> Rename:
        """The names of values as microbatch `number` has them."""

        def rename(value: str) -> str:
            if self.num_microbatches == 1 or value in self.per_step:
                return self._named(value, value)
            if value not in self.carried_buffers:
                return self._named(f"{value}@{number}", value, number)
            before = self.carried_buffers[value]
            return self._named(f"{before}@{number - 1}", before, number - 1) if number else self._named(value, value)

        return rename

    def of_step(self, value: str) -> str:
        """The name of a value that there is one of, or of the sum of those that there are several of."""
        return self._named(value, value) if value in self.per_step else self.sum(value)

    def sum(self, value: str) -> str:
        """The buffer that adds up `value` over the microbatches, or over stages."""
        return self._named(f"{value}.sum", value, role="sum")

    def count(self, value: str) -> str:
        """The name of a sum over the microbatches that is taken ahead."""
        return self._named(value, value, role="sum")

    def of_input(self, item: Input, node: Node) -> tuple[str, ...]:
        """The buffers that an input is in: one a microbatch where it differs among them."""
        if self.num_microbatches > 1 and differs(item):
            return tuple(self._named(f"{node.name}@{number}", node.name, number) for number in range(self.num_microbatches))
        return (self._named(node.name, node.name),)

    @property
    def inputs(self) -> list[tuple[Input, str]]:
        """The inputs of the program with the buffers that they are in."""
        return [(item, name) for item, node in self._program.named_inputs() for name in self.of_input(item, node)]

    def _named(self, name: str, value: str, microbatch: int | None = None, role: Role | None = None) -> str:
        if name not in self.table:
            self.table[name] = Buffer(value, self._types.get(value), microbatch, role or self._roles.get(value, "value"))
        return name

    @property
    def _program(self) -> Program:
        return self.cut.program

    @cached_property
    def _types(self) -> dict[str, TensorType]:
        return types_of(self._program)

    @cached_property
    def _roles(self) -> dict[str, Role]:
        roles: dict[str, Role] = {name: "saved" for name in self._saved}
        for item, node in self._program.named_inputs():
            roles[node.name] = item.kind
        return roles

    @property
    def _saved(self) -> set[str]:
        """What forwards make and backwards read, on whatever ranks."""
        made = {node for (_, kind), nodes in self.cut.actions.items() if kind == "F" for node in nodes}
        read = {node for (_, kind), nodes in self.cut.actions.items() if kind != "F" for each in nodes for node in each.all_input_nodes}
        return {buffer_of(node) for node in made & read}

    @cached_property
    def per_step(self) -> frozenset[str]:
        """The values of which there is one a step."""
        calls = {buffer_of(node) for node in self.cut.per_step}
        changing = {node.name for item, node in self._program.named_inputs() if differs(item)} | set(self.carried_buffers)
        return frozenset(calls | {node.name for node in self._program.placeholders if node.name not in changing})

    @cached_property
    def carried_buffers(self) -> dict[str, str]:
        """The buffers of the model that each microbatch finds as the one before left them, with where that is."""
        inputs = {item.name: node.name for item, node in self._program.named_inputs() if item.kind == "buffer"}
        changed = ((item, node) for item, node in self._program.named_outputs() if item.kind == "buffer" and not item.is_once)
        return {inputs[item.name]: buffer_of(node) for item, node in changed}


def renamed(instructions: Iterable[Instruction], rename: Rename) -> list[Instruction]:
    """What computes values of the LOCAL program, with the names that `rename` gives them."""
    return [_renamed(each, rename) for each in instructions]


def _renamed(instruction: Instruction, rename: Rename) -> Instruction:
    if isinstance(instruction, Run):
        return Run(instruction.fragment, tuple(map(rename, instruction.inputs)), tuple(map(rename, instruction.outputs)))
    if isinstance(instruction, Launch):
        return replace(instruction, sources=tuple(map(rename, instruction.sources)), targets=tuple(map(rename, instruction.targets)))
    assert isinstance(instruction, Wait), instruction
    return Wait(rename(instruction.target))
