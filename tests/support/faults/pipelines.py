"""Pipelines to plant faults into, the edits that plant them, and a slow but simple machine that runs instructions."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from autopar.pipeline.actions import Action
from autopar.pipeline.program import (
    Channel,
    Compute,
    PipelineInstruction,
    PipelineProgram,
    Receive,
    ReduceGradients,
    Send,
    Transfer,
    Wait,
    parse_instruction,
    receives_of,
    sends_of,
)


def edited(program: PipelineProgram, rank: int, edit: str) -> PipelineProgram:
    """`edit` applied to the instructions of `rank`: one of

    drop X              twice X            swap X | Y          replace X | Y
    move X before Y     move X after Y     add X before Y      add X after Y
    """
    row = [str(each) for each in program.ranks[rank]]
    verb, rest = edit.split(" ", 1)
    if verb in ("move", "add"):
        side = " before " if " before " in rest else " after "
        what, anchor = rest.split(side)
        if verb == "move":
            row.remove(what)
        row.insert(row.index(anchor) + (side == " after "), what)
    elif verb == "drop":
        row.remove(rest)
    elif verb == "twice":
        row.insert(row.index(rest), rest)
    elif verb == "replace":
        old, new = rest.split(" | ")
        row[row.index(old)] = new
    else:
        assert verb == "swap", edit
        one, other = (row.index(each) for each in rest.split(" | "))
        row[one], row[other] = row[other], row[one]
    return with_row(program, rank, [parse_instruction(each) for each in row])


def with_row(program: PipelineProgram, rank: int, row: list[PipelineInstruction]) -> PipelineProgram:
    return replace(program, ranks=(*program.ranks[:rank], tuple(row), *program.ranks[rank + 1 :]))


class Machine:
    """Runs a program with values that say what they are: no cost, no cleverness, and no knowledge of how programs are made or checked.

    `run` is true when all ranks reach their ends, every action found its inputs and every gradient was summed once.
    """

    def __init__(self, program: PipelineProgram, is_eager: bool = False) -> None:
        self.program = program
        # Sends are buffered: their WAITs pass at once.
        self.is_eager = is_eager
        self.at = [0] * len(program.ranks)
        self.sent: dict[Channel, list[Transfer]] = defaultdict(list)
        self.received: dict[Channel, list[Receive]] = defaultdict(list)
        self.numbers: dict[tuple[int, Send | Receive], int] = {}
        # Per rank: values that may be read, values made there, actions run.
        self.there: list[set[Transfer]] = [set() for _ in program.ranks]
        self.ran: list[list[Action]] = [[] for _ in program.ranks]
        self.reduced: list[int] = []
        self.is_sound = True

    def run(self) -> bool:
        while any([self.step(rank) for rank in range(len(self.program.ranks))]):
            pass
        ended = all(at == len(row) for at, row in zip(self.at, self.program.ranks, strict=True))
        return self.is_sound and ended and self.is_complete()

    def is_complete(self) -> bool:
        each = [action for rank in self.ran for action in rank]
        if sorted(self.reduced) != list(range(len(self.program.stages))) or len(each) != len(set(each)):
            return False
        for stage in range(len(self.program.stages)):
            for microbatch in range(self.program.num_microbatches):
                kinds = "".join(sorted(action.kind for action in each if action[::2] == (stage, microbatch)))
                if kinds not in ("BF", "FIW"):
                    return False
        places = [(rank, action) for rank, actions in enumerate(self.ran) for action in actions]
        known = all(action.microbatch < self.program.num_microbatches for _, action in places)
        return known and all(self.program.stages[action.stage] == rank for rank, action in places)

    def step(self, rank: int) -> bool:
        row = self.program.ranks[rank]
        if self.at[rank] == len(row):
            return False
        each = row[self.at[rank]]
        if isinstance(each, Wait) and not self.passes(rank, each.launched):
            return False
        self.at[rank] += 1
        if isinstance(each, Compute):
            self.compute(rank, each.action)
        elif isinstance(each, Send):
            self.is_sound &= each.transfer in self.there[rank] and (rank, each) not in self.numbers
            self.numbers[rank, each] = len(self.sent[rank, each.peer])
            self.sent[rank, each.peer].append(each.transfer)
        elif isinstance(each, Receive):
            self.is_sound &= (rank, each) not in self.numbers
            self.numbers[rank, each] = len(self.received[each.peer, rank])
            self.received[each.peer, rank].append(each)
        elif isinstance(each, ReduceGradients):
            done = [action for action in self.ran[rank] if action.stage == each.stage and action.kind in "BW"]
            self.is_sound &= len(done) == self.program.num_microbatches
            self.reduced.append(each.stage)
        return True

    def passes(self, rank: int, launched: Send | Receive) -> bool:
        number = self.numbers.get((rank, launched))
        if number is None:
            return False
        if isinstance(launched, Send):
            return self.is_eager or len(self.received[rank, launched.peer]) > number
        if len(self.sent[launched.peer, rank]) <= number:
            return False
        self.is_sound &= self.sent[launched.peer, rank][number] == launched.transfer
        self.there[rank].add(launched.transfer)
        return True

    def compute(self, rank: int, action: Action) -> None:
        self.is_sound &= all(transfer in self.there[rank] for transfer in receives_of(action, self.program.edges))
        before = {"B": "F", "I": "F", "W": "I"}.get(action.kind)
        self.is_sound &= not before or action._replace(kind=before) in self.ran[rank]  # type: ignore[arg-type]
        self.ran[rank].append(action)
        self.there[rank].update(sends_of(action, self.program.edges))
