"""Instructions that run once a step, not for each microbatch: what is computed from complete sums, and blocking transfers."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Node

from autopar.graph.fragments import FragmentCutter
from autopar.ir.collectives import is_launch
from autopar.ir.instructions import Instruction, Receive, Send, Wait
from autopar.pipeline.buffer_names import BufferNames, renamed
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.pipeline.stage_work import Sum


def once_a_step(nodes: Iterable[Node], cutter: FragmentCutter, names: BufferNames, under_way: set[Node] | None = None) -> list[Instruction]:
    """What computes calls that run once a step, complete at its end, as are the collectives that were `under_way` before."""
    under_way = set() if under_way is None else under_way
    section = cutter.section(nodes, under_way)
    return renamed([*section, *all_waits(under_way)], names.of_step)


def all_waits(under_way: set[Node]) -> list[Instruction]:
    """WAITs for all that is under way, in the order of the graph."""
    launches = [node for node in next(iter(under_way)).graph.nodes if node in under_way] if under_way else []
    under_way.clear()
    assert all(is_launch(each) for each in launches)
    return [Wait(each.name) for each in launches]


def local_sums(program: ScheduleProgram, stage: int) -> list[Sum]:
    """The sums that `stage` alone makes and wants."""
    assert program.cut is not None
    return [each for each in program.cut.sums if each.is_local and each.stages == (stage,)]


def finished(
    sums: Iterable[Sum], moved: set[Node], cutter: FragmentCutter, names: BufferNames, under_way: set[Node] | None = None
) -> list[Instruction]:
    """What follows on `sums`, but for what has `moved` already: equal gradients of several parameters are one. `moved` grows.

    What is `under_way` already is waited for, too."""
    after = {node for each in sums for node in each.after} - moved
    moved |= after
    return once_a_step([node for node in names.cut.program.graph.nodes if node in after], cutter, names, under_way)


def completed(instructions: list[Instruction]) -> list[Instruction]:
    """Transfers with WAITs for all of them behind the last, before what else there is."""
    launched = [each for each in instructions if isinstance(each, (Send, Receive))]
    others = [each for each in instructions if not isinstance(each, (Send, Receive))]
    return [*launched, *(Wait(each.transfer) for each in launched), *others]
