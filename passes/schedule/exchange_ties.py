"""Stages that share a parameter exchange its gradients, once a step."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from autopar.graph.fragments import FragmentCutter, buffer_of
from autopar.ir.instructions import Add, Instruction, Receive, Send
from autopar.pipeline.buffer_names import BufferNames
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.pipeline.stage_rules import stage_of
from autopar.pipeline.stage_work import Sum
from autopar.pipeline.step_end import completed, finished, local_sums


@dataclass(frozen=True)
class ExchangeTies:
    """Send each part of a sum that several stages make, or another than the one that wants it, to all that want it; add them up.

    All add in one order, so that what is computed from their sums is equal bit by bit.

    Reads: a `ScheduleProgram` with its gradients reduced. Writes: transfers, sums, and what follows on these, at the end.
    Ensures: every sum is where it belongs, complete.
    """

    name: str = "exchange ties"

    def apply(self, program: ScheduleProgram) -> ScheduleProgram:
        assert program.cut is not None
        ties = [each for each in program.cut.sums if not each.is_local]
        if not ties:
            return program
        names, cutter = BufferNames.of(program), FragmentCutter(program.device, program.fragments)
        places = []
        for place, schedule in enumerate(program.places):
            mine = program.stages_of(place)
            wanted = [each for each in ties if set(each.stages).intersection(mine)]
            moved = {node for stage in mine for each in local_sums(program, stage) for node in each.after}
            exchange = completed([*_exchanged(ties, place, program, names), *_added(wanted, names)])
            places.append(schedule.appended([*exchange, *finished(wanted, moved, cutter, names)]))
        return program.with_places(places, fragments=cutter.fragments, buffers=names.table)


def _exchanged(ties: list[Sum], place: int, program: ScheduleProgram, names: BufferNames) -> list[Instruction]:
    """What the ranks at `place` send and receive."""
    found: list[Instruction] = []
    for each in ties:
        wanting = sorted({program.order.stages[stage] for stage in each.stages})
        for part in each.parts:
            maker, buffers = program.order.stages[stage_of(part)], (names.sum(buffer_of(part)),)
            if maker == place:
                found += [Send(_name(part, peer), "pp", peer, buffers) for peer in wanting if peer != maker]
            elif place in wanting:
                found.append(Receive(_name(part, place), "pp", maker, buffers))
    return list(dict.fromkeys(found))  # equal gradients of several parameters are one


def _name(part: Node, peer: int) -> str:
    return f"tied_{part.name}>{peer}"


def _added(ties: list[Sum], names: BufferNames) -> list[Instruction]:
    pairs = dict.fromkeys((each.target, part) for each in ties for part in each.parts if part is not each.target)
    return [Add(names.sum(buffer_of(target)), names.sum(buffer_of(part))) for target, part in pairs]
