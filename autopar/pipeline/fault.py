"""A violation in a pipeline, and where it stands in the grid."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autopar.checks.violation import Violation
from autopar.pipeline.actions import Place
from autopar.pipeline.program import Compute, PipelineInstruction, PipelineProgram, Receive, ReduceGradients, Send, Wait


@dataclass(frozen=True)
class Fault(Violation):
    """A violation at `places` of the grid."""

    places: tuple[Place, ...] = ()


def describe(program: PipelineProgram, rank: int, position: int) -> str:
    """`rank 1, instruction 7: 1F3 (microbatch 3)`; past the last instruction, `rank 1, at the end`."""
    row = program.ranks[rank]
    if position >= len(row):
        return f"rank {rank}, at the end"
    microbatch = microbatch_of(row[position])
    return f"rank {rank}, instruction {position}: {row[position]}" + (f" (microbatch {microbatch})" if microbatch is not None else "")


def microbatch_of(instruction: PipelineInstruction) -> int | None:
    """The microbatch that an instruction is about; None where it is about all."""
    if isinstance(instruction, Wait):
        instruction = instruction.launched
    if isinstance(instruction, Compute):
        return instruction.action.microbatch
    return None if isinstance(instruction, ReduceGradients) else instruction.transfer.microbatch


def place(program: PipelineProgram, rank: int, position: int) -> Place:
    """The action that an instruction belongs to: a receive to its reader, a send to its maker, a WAIT to what it holds up."""
    row = program.ranks[rank]
    positions = [index for index, each in enumerate(row) if isinstance(each, Compute)]
    before = sum(index < position for index in positions)
    instruction = row[position] if position < len(row) else None
    if isinstance(instruction, Receive):
        readers = instruction.transfer.readers
        found = (number for number, index in enumerate(positions) if getattr(row[index], "action", None) in readers)
        return Place(rank, next(found, before))
    is_after = isinstance(instruction, (Send, ReduceGradients)) and before > 0
    return Place(rank, before - 1 if is_after else before)


def fault_at(
    program: PipelineProgram, rank: int, positions: int | Iterable[int], what: str, expected: str = "", got: str = "", fix: str = ""
) -> Fault:
    """A fault at one instruction of `rank`, or at several of which the first is named."""
    several = (positions,) if isinstance(positions, int) else tuple(positions)
    places = tuple(place(program, rank, position) for position in several)
    return Fault(what, describe(program, rank, several[0]), expected, got, fix, places=places)
