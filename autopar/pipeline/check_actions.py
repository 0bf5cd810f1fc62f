"""Checks of what ranks at each place along `pp` run: which actions, in which order, with which sends, receives and reductions.

A violation is where the first rank of a place is; what it tells of stages and peers are places.

Buffers, the pairing of sends with receives, and freedom from deadlock are checked as of any schedule, by `autopar.checks.schedule`.
"""

from __future__ import annotations

from collections import defaultdict

from autopar.checks.buffers import place
from autopar.checks.violation import Violation
from autopar.ir.actions import Action, Edge, Kind, Reduction, Transfer
from autopar.ir.instructions import Receive, Run, Send
from autopar.pipeline.expand import receives_of, run_of, sends_of, stage_edges
from autopar.pipeline.schedule_program import ScheduleProgram

# What must have run before, on the same stage and microbatch.
_BEFORE: dict[Kind, Kind] = {"B": "F", "I": "F", "W": "I"}
# What does the same work.
_RIVALS: dict[Kind, tuple[Kind, ...]] = {"F": (), "B": ("I", "W"), "I": ("B",), "W": ("B",)}


def check_actions(program: ScheduleProgram) -> list[Violation]:
    """Every violation in the actions, sends and reductions of a grid. All stages lie at places that exist."""
    by_stage: dict[int, list[Edge]] = defaultdict(list)
    for edge in stage_edges(program):
        by_stage[edge.source].append(edge)
        by_stage[edge.target].append(edge)
    return [violation for at in range(len(program.places)) for violation in _Walk(program, at, by_stage).check()]


class _Walk:
    """`at` is a place along `pp`, `rank` the first rank of the mesh that is there."""

    def __init__(self, program: ScheduleProgram, at: int, by_stage: defaultdict[int, list[Edge]]) -> None:
        self.program, self.at, self.row = program, at, program.places[at].instructions
        self.holders, self.stages = program.order.stages, program.stages_of(at)
        self.rank = program.first_at(at)
        self.num_microbatches, self.by_stage = program.order.num_microbatches, by_stage
        # Where each was seen first.
        self.ran: dict[Action, int] = {}
        self.sent: dict[Transfer, int] = {}
        self.reduced: dict[int, int] = {}
        self.received: dict[Transfer, int] = {}
        self.found: list[Violation] = []
        self.position = 0

    def say(self, what: str, expected: str = "", got: str = "", fix: str = "", position: int | None = None) -> None:
        number = self.position if position is None else position
        where = place(self.rank, number, self.row[number]) if number < len(self.row) else f"rank {self.rank}, at the end"
        self.found.append(Violation(what, where, expected, got, fix, instructions=((self.rank, number),)))

    def tell(self, position: int) -> str:
        return f"instruction {position}: {self.row[position]}"

    def check(self) -> list[Violation]:
        for position, each in enumerate(self.row):
            self.position = position
            if isinstance(each, Run):
                action = self.program.actions.get(each.fragment)
                if isinstance(action, Action):
                    self.compute(action, each)
                elif action is not None:
                    self.reduce(action.stage)
            elif isinstance(each, (Send, Receive)):
                self.launch(each)
        self.position = len(self.row)
        for stage in self.stages:
            for microbatch in range(self.num_microbatches):
                self.complete(stage, microbatch)
            self.reduced_last(stage)
        for transfer, position in self.received.items():
            if not any(action in self.ran for action in transfer.readers):
                self.say(f"{transfer} is never read", f"{_either(transfer.readers)} at pp = {self.at}", "neither runs", position=position)
        return self.found

    def compute(self, action: Action, run: Run) -> None:
        stage, kind, microbatch = action
        if action in self.ran:
            self.say(f"{action} runs twice", "once", f"before at {self.tell(self.ran[action])}", "leave one out")
            return
        self.ran[action] = self.position
        if stage not in self.stages or microbatch >= self.num_microbatches:
            expected = f"stages {', '.join(map(str, self.stages))}; microbatches 0 to {self.num_microbatches - 1}"
            self.say(f"{action} has no place at pp = {self.at}", expected, f"stage {stage}, microbatch {microbatch}")
            return
        before = _BEFORE.get(kind)
        if before and Action(stage, before, microbatch) not in self.ran:
            self.say(f"{action} runs too early", f"{stage}{before}{microbatch} first", "not run yet")
        for rival in _RIVALS[kind]:
            if Action(stage, rival, microbatch) in self.ran:
                at = self.ran[Action(stage, rival, microbatch)]
                self.say(f"{action} does again what {self.tell(at)} did", "B, or I and W", f"both {rival} and {kind}", "leave one out")
        read, made = (map(str, of(action, self.by_stage[stage])) for of in (receives_of, sends_of))
        whole = run_of(action, read, made)
        if run != whole and (set(run.inputs), set(run.outputs)) != (set(whole.inputs), set(whole.outputs)):
            self.say(f"{action} reads or makes something else than its stage does", str(whole), str(run))

    def launch(self, each: Send | Receive) -> None:
        transfer = self.program.transfers.get(each.transfer)
        if transfer is None:
            edges = ", ".join(f"{edge.source} to {edge.target}" for edge in stage_edges(self.program))
            expected = f"stages {edges}, and gradients back; microbatches 0 to {self.num_microbatches - 1}"
            self.say(f"{each.transfer} is nothing that this pipeline has", expected, each.transfer)
            return
        is_send = isinstance(each, Send)
        (self.sent if is_send else self.received).setdefault(transfer, self.position)
        stage, other = (transfer.source, transfer.target) if is_send else (transfer.target, transfer.source)
        if stage not in self.stages:
            self.say(f"stage {stage} is not at pp = {self.at}", f"pp = {self.holders[stage]}", f"pp = {self.at}")
        elif each.peer != self.holders[other]:
            expected = f"pp = {self.holders[other]}"
            self.say(f"wrong peer: stage {other} is not there", expected, f"pp = {each.peer}", f"address {expected}")
        elif each.buffers != (each.transfer,):
            self.say(f"{each.transfer} carries something else than its value", f"({each.transfer})", f"({', '.join(each.buffers)})")

    def reduce(self, stage: int) -> None:
        if stage in self.reduced:
            got = f"before at {self.tell(self.reduced[stage])}"
            self.say(f"the gradients of stage {stage} are reduced twice", "once", got, "leave one out")
        elif stage not in self.stages:
            self.say(f"stage {stage} is not at pp = {self.at}", f"one of stages {self.stages}", f"stage {stage}")
        self.reduced.setdefault(stage, self.position)

    def complete(self, stage: int, microbatch: int) -> None:
        """Each microbatch has its forward and its backward, and what they make for other places is sent."""
        done = {action.kind: (action, self.ran[action]) for kind in _RIVALS if (action := Action(stage, kind, microbatch)) in self.ran}
        backward: tuple[Kind, ...] = ("I", "W") if {"I", "W"} & done.keys() else ("B",)
        for kind in ("F", *(() if "B" in done else backward)):
            if kind not in done:
                expected = f"every kind of work of microbatch {microbatch} once"
                self.say(f"{stage}{kind}{microbatch} never runs", expected, "missing", "add it")
        for action, position in done.values():
            for transfer in sends_of(action, self.by_stage[stage]):
                if self.holders[transfer.target] != self.at and transfer not in self.sent:
                    what = f"what {action} makes for stage {transfer.target} is never sent"
                    self.say(what, f"SEND {transfer}", "no such send", position=position)

    def reduced_last(self, stage: int) -> None:
        at = self.reduced.get(stage)
        if at is None:
            expected = f"{Reduction(stage)} after its last backward"
            self.say(f"the gradients of stage {stage} are never reduced", expected, "none")
            return
        late = [str(action) for action, position in self.ran.items() if action[:2] in ((stage, "B"), (stage, "W")) and position > at]
        if late:
            got = f"{', '.join(late)} after it"
            self.say(f"gradients of stage {stage} are reduced before they are complete", f"after {late[-1]}", got, position=at)


def _either(actions: tuple[Action, ...]) -> str:
    return " or ".join(map(str, actions))
