"""When the memory of each parameter is read for the last time: by its own name, by that of a view, or by a collective under way."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.cost.fragment_places import lies_with
from autopar.ir.instructions import Copy, Instruction, Launch, Receive, Run, Send, Update, Wait
from autopar.ir.lifetimes import touched
from autopar.ir.schedule import Schedule


def reads(schedule: Schedule) -> Iterator[tuple[int, Instruction, frozenset[str]]]:
    """Each instruction that uses the memory of parameters, its number, and the buffers of these parameters.

    What is launched uses its operands until its WAIT. An UPDATE, which writes them, is none.
    """
    lies_in = {name: name for item, name in zip(schedule.signature.inputs, schedule.inputs, strict=True) if item.kind == "parameter"}
    under_way: dict[str, frozenset[str]] = {}
    for number, instruction in enumerate(schedule.instructions):
        if isinstance(instruction, Update):
            continue
        if isinstance(instruction, Run) and instruction.fragment in schedule.fragments:
            places = lies_with(schedule.fragments[instruction.fragment])
            for name, source in zip(instruction.outputs, places, strict=False):
                if source < len(instruction.inputs) and (parameter := lies_in.get(instruction.inputs[source])):
                    lies_in[name] = parameter
        used = frozenset(lies_in[name] for name in touched(instruction) if name in lies_in)
        if isinstance(instruction, Wait):
            used = under_way.pop(instruction.target, frozenset())
        elif isinstance(instruction, (Launch, Copy, Send, Receive)):
            under_way[instruction.name] = used
        if used:
            yield number, instruction, used


def last_reads(schedule: Schedule) -> dict[str, int]:
    """By the buffer of a parameter the number of the last instruction that uses its memory; -1 where none does."""
    items = zip(schedule.signature.inputs, schedule.inputs, strict=True)
    found = {name: -1 for item, name in items if item.kind == "parameter"}
    for number, _, used in reads(schedule):
        found |= dict.fromkeys(used, number)
    return found
