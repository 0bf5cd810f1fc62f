"""The lifetimes of the buffers of a schedule: the last instruction that uses each, behind which it is freed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from autopar.ir.instructions import Add, Copy, Free, Instruction, Launch, Pause, Receive, Run, Send, Wait


def touched(instruction: Instruction) -> tuple[str, ...]:
    """The buffers that an instruction reads or writes; none of a WAIT, which names what was launched."""
    return instruction.reads + instruction.writes


def with_frees(instructions: Sequence[Instruction], kept: Collection[str]) -> list[list[Instruction]]:
    """Each instruction with a FREE behind it of the buffers that nothing touches afterwards, but for those that are `kept`.

    The operand of a collective is in use until its WAIT, and so is what is sent or copied.
    """
    last: dict[str, int] = {}
    under_way: dict[str, tuple[str, ...]] = {}
    for position, instruction in enumerate(instructions):
        if isinstance(instruction, (Launch, Copy, Send, Receive)):
            under_way[instruction.name] = touched(instruction)
        names = under_way[instruction.target] if isinstance(instruction, Wait) else touched(instruction)
        last |= dict.fromkeys(names, position)
    ends: dict[int, list[str]] = {}
    for name, position in last.items():
        if name not in kept:
            ends.setdefault(position, []).append(name)
    return [[each, Free(tuple(ends[position]))] if position in ends else [each] for position, each in enumerate(instructions)]


def reading(instruction: Instruction, names: Mapping[str, str]) -> Instruction:
    """What reads, with other `names` of what it reads. No UPDATE: what it reads has one name."""

    def renamed(old: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(names.get(name, name) for name in old)

    if not names or isinstance(instruction, (Wait, Receive, Free, Pause)):
        return instruction
    if isinstance(instruction, Run):
        return replace(instruction, inputs=renamed(instruction.inputs))
    if isinstance(instruction, (Launch, Copy)):
        return replace(instruction, sources=renamed(instruction.sources))
    if isinstance(instruction, Send):
        return replace(instruction, buffers=renamed(instruction.buffers))
    assert isinstance(instruction, Add), instruction
    return replace(instruction, source=names.get(instruction.source, instruction.source))
