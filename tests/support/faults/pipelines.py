"""Pipelines to plant faults into, the edits that plant them, and a slow but simple machine that runs instructions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from autopar.ir.actions import Action, parse_action
from autopar.ir.instructions import Channel, Instruction, Receive, Run, Send, Wait, parse
from autopar.pipeline.expand import receives_of, sends_of, stage_edges
from autopar.pipeline.schedule_program import ScheduleProgram


def edited(program: ScheduleProgram, rank: int, edit: str) -> ScheduleProgram:
    """`edit` applied to the instructions of `rank`: one of

    drop X              twice X            swap X | Y          replace X | Y
    move X before Y     move X after Y     add X before Y      add X after Y

    An instruction is named as it prints, without its buffers: `RUN 1F0`, `SEND 0F0>1 pp=1`. One that comes new has those of the
    instruction of the same name, if there is one.
    """
    row = [str(each) for each in program.places[rank].instructions]
    verb, rest = edit.split(" ", 1)
    if verb in ("move", "add"):
        side = " before " if " before " in rest else " after "
        what, anchor = rest.split(side)
        new = row.pop(_index(row, what)) if verb == "move" else _written(program, what)
        row.insert(_index(row, anchor) + (side == " after "), new)
    elif verb == "drop":
        row.pop(_index(row, rest))
    elif verb == "twice":
        row.insert(_index(row, rest), row[_index(row, rest)])
    elif verb == "replace":
        old, new = rest.split(" | ")
        row[_index(row, old)] = _written(program, new)
    else:
        assert verb == "swap", edit
        one, other = (_index(row, each) for each in rest.split(" | "))
        row[one], row[other] = row[other], row[one]
    return with_row(program, rank, parse("\n".join(row)))


def _index(row: list[str], short: str) -> int:
    return next(number for number, each in enumerate(row) if each == short or each.startswith(f"{short} ("))


def _written(program: ScheduleProgram, short: str) -> str:
    """In full, as some rank has it."""
    word, name, *_ = short.split(" ")
    if word == "WAIT":
        return short
    if word != "RUN":
        return f"{short} ({name})"
    rows = [str(each) for schedule in program.places for each in schedule.instructions]
    return next((each for each in rows if each.startswith(f"{short} (")), f"{short} () -> ()")


def with_row(program: ScheduleProgram, rank: int, row: Sequence[Instruction]) -> ScheduleProgram:
    schedule = replace(program.places[rank], instructions=tuple(row), spans=())
    strange = (each.fragment for each in row if isinstance(each, Run) and each.fragment not in program.actions)
    actions = {**program.actions, **{name: parse_action(name) for name in strange}}
    return replace(program, places=(*program.places[:rank], schedule, *program.places[rank + 1 :]), actions=actions)


class Machine:
    """Runs a grid with values that say what they are: no cost, no cleverness, and no knowledge of how programs are made or checked.

    `run` is true when all ranks reach their ends, every action found its inputs and every gradient was summed once.
    """

    def __init__(self, program: ScheduleProgram, is_eager: bool = False) -> None:
        self.program, self.edges = program, stage_edges(program)
        self.rows = [schedule.instructions for schedule in program.places]
        # Sends are buffered: their WAITs pass at once.
        self.is_eager = is_eager
        self.at = [0] * len(self.rows)
        self.sent: dict[Channel, list[str]] = defaultdict(list)
        self.received: dict[Channel, list[str]] = defaultdict(list)
        self.numbers: dict[tuple[int, str], tuple[Send | Receive, int]] = {}
        # Per rank: values that may be read, values made there, actions run.
        self.there: list[set[str]] = [set() for _ in self.rows]
        self.ran: list[list[Action]] = [[] for _ in self.rows]
        self.reduced: list[int] = []
        self.is_sound = True

    def run(self) -> bool:
        while any([self.step(rank) for rank in range(len(self.rows))]):
            pass
        ended = all(at == len(row) for at, row in zip(self.at, self.rows, strict=True))
        return self.is_sound and ended and self.is_complete()

    def is_complete(self) -> bool:
        each, order = [action for rank in self.ran for action in rank], self.program.order
        if sorted(self.reduced) != list(range(order.num_stages)) or len(each) != len(set(each)):
            return False
        for stage in range(order.num_stages):
            for microbatch in range(order.num_microbatches):
                kinds = "".join(sorted(action.kind for action in each if action[::2] == (stage, microbatch)))
                if kinds not in ("BF", "FIW"):
                    return False
        places = [(rank, action) for rank, actions in enumerate(self.ran) for action in actions]
        known = all(action.microbatch < order.num_microbatches for _, action in places)
        return known and all(order.stages[action.stage] == rank for rank, action in places)

    def step(self, rank: int) -> bool:
        row = self.rows[rank]
        if self.at[rank] == len(row):
            return False
        each = row[self.at[rank]]
        if isinstance(each, Wait) and not self.passes(rank, each.target):
            return False
        self.at[rank] += 1
        if isinstance(each, Run):
            self.compute(rank, each)
        elif isinstance(each, (Send, Receive)):
            self.launch(rank, each)
        return True

    def launch(self, rank: int, each: Send | Receive) -> None:
        self.is_sound &= (rank, each.transfer) not in self.numbers
        if isinstance(each, Send):
            self.is_sound &= each.transfer in self.there[rank]
            ends = self.sent[rank, each.peer]
        else:
            ends = self.received[each.peer, rank]
        self.numbers[rank, each.transfer] = each, len(ends)
        ends.append(each.transfer)

    def passes(self, rank: int, transfer: str) -> bool:
        if (rank, transfer) not in self.numbers:
            return False
        launched, number = self.numbers[rank, transfer]
        if isinstance(launched, Send):
            return self.is_eager or len(self.received[rank, launched.peer]) > number
        if len(self.sent[launched.peer, rank]) <= number:
            return False
        self.is_sound &= self.sent[launched.peer, rank][number] == transfer
        self.there[rank].add(transfer)
        return True

    def compute(self, rank: int, each: Run) -> None:
        action = self.program.actions[each.fragment]
        if not isinstance(action, Action):
            done = [other for other in self.ran[rank] if other.stage == action.stage and other.kind in "BW"]
            self.is_sound &= len(done) == self.program.order.num_microbatches
            self.reduced.append(action.stage)
            return
        self.is_sound &= all(str(transfer) in self.there[rank] for transfer in receives_of(action, self.edges))
        before = {"B": "F", "I": "F", "W": "I"}.get(action.kind)
        self.is_sound &= not before or action._replace(kind=before) in self.ran[rank]  # type: ignore[arg-type]
        self.ran[rank].append(action)
        self.there[rank].update(map(str, sends_of(action, self.edges)))
