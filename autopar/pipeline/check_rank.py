"""The instructions of one rank of a pipeline, first to last: what runs, what is sent and received, and what is missing."""

from __future__ import annotations

from collections import defaultdict

from autopar.pipeline.actions import Action, Edge, Kind
from autopar.pipeline.fault import Fault, fault_at
from autopar.pipeline.program import Compute, PipelineProgram, Receive, ReduceGradients, Send, Transfer, Wait, receives_of, sends_of

# What must have run before, on the same stage and microbatch.
_BEFORE: dict[Kind, Kind] = {"B": "F", "I": "F", "W": "I"}
# What does the same work.
_RIVALS: dict[Kind, tuple[Kind, ...]] = {"F": (), "B": ("I", "W"), "I": ("B",), "W": ("B",)}


def check_rank(program: PipelineProgram, rank: int) -> list[Fault]:
    """Every violation that shows on `rank` alone. All stages lie on ranks that exist."""
    return _Walk(program, rank).check()


class _Walk:
    def __init__(self, program: PipelineProgram, rank: int) -> None:
        self.program, self.rank, self.row = program, rank, program.ranks[rank]
        self.stages = [stage for stage, holder in enumerate(program.stages) if holder == rank]
        self.by_stage: dict[int, list[Edge]] = defaultdict(list)
        for edge in program.edges:
            self.by_stage[edge.source].append(edge)
            self.by_stage[edge.target].append(edge)
        # Where each was seen first.
        self.ran: dict[Action, int] = {}
        self.launched: dict[Send | Receive, int] = {}
        self.waited: dict[Send | Receive, int] = {}
        self.reduced: dict[int, int] = {}
        self.found: list[Fault] = []
        self.position = 0

    def say(self, what: str, expected: str = "", got: str = "", fix: str = "", position: int | None = None) -> None:
        where = self.position if position is None else position
        self.found.append(fault_at(self.program, self.rank, where, what, expected, got, fix))

    def tell(self, position: int) -> str:
        return f"instruction {position}: {self.row[position]}"

    def check(self) -> list[Fault]:
        for position, each in enumerate(self.row):
            self.position = position
            if isinstance(each, Compute):
                self.compute(each.action)
            elif isinstance(each, (Send, Receive)):
                self.launch(each)
            elif isinstance(each, Wait):
                self.wait(each.launched)
            else:
                self.reduce(each.stage)
        self.position = len(self.row)
        for stage in self.stages:
            for microbatch in range(self.program.num_microbatches):
                self.complete(stage, microbatch)
            self.reduced_last(stage)
        for each, position in self.launched.items():
            self.closed(each, position)
        return self.found

    def compute(self, action: Action) -> None:
        stage, kind, microbatch = action
        if action in self.ran:
            self.say(f"{action} runs twice", "once", f"before at {self.tell(self.ran[action])}", "leave one out")
            return
        self.ran[action] = self.position
        if stage not in self.stages or microbatch >= self.program.num_microbatches:
            expected = f"stages {', '.join(map(str, self.stages))}; microbatches 0 to {self.program.num_microbatches - 1}"
            self.say(f"{action} has no place on this rank", expected, f"stage {stage}, microbatch {microbatch}")
            return
        before = _BEFORE.get(kind)
        if before and Action(stage, before, microbatch) not in self.ran:
            self.say(f"{action} runs too early", f"{stage}{before}{microbatch} first", "not run yet")
        for rival in _RIVALS[kind]:
            if Action(stage, rival, microbatch) in self.ran:
                at = self.ran[Action(stage, rival, microbatch)]
                self.say(f"{action} does again what {self.tell(at)} did", "B, or I and W", f"both {rival} and {kind}", "leave one out")
        for transfer in receives_of(action, self.by_stage[stage]):
            self.needs(action, transfer)

    def needs(self, action: Action, transfer: Transfer) -> None:
        """What another stage gives is there."""
        peer = self.program.stages[transfer.source]
        receive = Receive(transfer, peer)
        if peer == self.rank:
            if not self.is_made(transfer):
                self.say(f"{action} runs before what gives its input", f"{_either(transfer.makers)} first", "not run yet")
        elif receive not in self.launched:
            self.say(f"{action} reads what was not received", f"{receive} and its WAIT first", "no such receive yet")
        elif receive not in self.waited:
            got = f"{self.tell(self.launched[receive])} alone"
            self.say(f"{action} reads a value that may be on its way still", f"WAIT {receive} first", got)

    def is_made(self, transfer: Transfer) -> bool:
        return any(action in self.ran for action in transfer.makers)

    def launch(self, each: Send | Receive) -> None:
        if each in self.launched:
            self.say(f"{each} is launched twice", "once", f"before at {self.tell(self.launched[each])}", "leave one out")
            return
        self.launched[each] = self.position
        if not self.is_ours(each.transfer):
            ends = f"stage {each.transfer.source} to stage {each.transfer.target}, microbatch {each.transfer.microbatch}"
            edges = ", ".join(f"{edge.source} to {edge.target}" for edge in self.program.edges)
            self.say(f"{each} carries nothing that this pipeline has", f"stages {edges}, and gradients back", ends)
        elif each.stage not in self.stages:
            self.say(f"stage {each.stage} is not on this rank", f"rank {self.program.stages[each.stage]}", f"rank {self.rank}")
        elif each.peer != self.program.stages[each.peer_stage]:
            expected = f"rank {self.program.stages[each.peer_stage]}"
            self.say(f"wrong peer: stage {each.peer_stage} is not there", expected, f"rank {each.peer}", f"address {expected}")
        elif isinstance(each, Send) and not self.is_made(each.transfer):
            self.say(f"{each} is launched before its value is made", f"{_either(each.transfer.makers)} first", "not run yet")

    def is_ours(self, transfer: Transfer) -> bool:
        """Whether an edge of the pipeline carries it."""
        known = sends_of(transfer.makers[0], self.by_stage[transfer.source])
        return transfer.microbatch < self.program.num_microbatches and transfer in known

    def wait(self, launched: Send | Receive) -> None:
        if launched in self.waited:
            self.say(f"a second WAIT for {launched}", "one", f"before at {self.tell(self.waited[launched])}", "leave one out")
        elif launched not in self.launched:
            self.say("a WAIT before the launch", f"{launched} first", "not launched yet")
        self.waited.setdefault(launched, self.position)

    def reduce(self, stage: int) -> None:
        if stage in self.reduced:
            got = f"before at {self.tell(self.reduced[stage])}"
            self.say(f"the gradients of stage {stage} are reduced twice", "once", got, "leave one out")
        elif stage not in self.stages:
            self.say(f"stage {stage} is not on this rank", f"one of stages {self.stages}", f"stage {stage}")
        self.reduced.setdefault(stage, self.position)

    def complete(self, stage: int, microbatch: int) -> None:
        """Each microbatch has its forward and its backward, and what they make for other ranks is sent."""
        done: dict[str, int] = {action.kind: at for action, at in self._of(stage, microbatch).items()}
        backward = ("I", "W") if {"I", "W"} & done.keys() else ("B",)
        for kind in ("F", *(() if "B" in done else backward)):
            if kind not in done:
                self.say(
                    f"{stage}{kind}{microbatch} never runs", f"every kind of work of microbatch {microbatch} once", "missing", "add it"
                )
        for action, position in self._of(stage, microbatch).items():
            for transfer in sends_of(action, self.by_stage[stage]):
                send = Send(transfer, self.program.stages[transfer.target])
                if send.peer != self.rank and send not in self.launched:
                    self.say(f"what {action} makes for stage {transfer.target} is never sent", str(send), "no such send", position=position)

    def _of(self, stage: int, microbatch: int) -> dict[Action, int]:
        actions = (Action(stage, kind, microbatch) for kind in _RIVALS)
        return {action: self.ran[action] for action in actions if action in self.ran}

    def reduced_last(self, stage: int) -> None:
        at = self.reduced.get(stage)
        if at is None:
            expected = f"{ReduceGradients(stage)} after its last backward"
            self.say(f"the gradients of stage {stage} are never reduced", expected, "none")
            return
        late = [str(action) for action, position in self.ran.items() if action[:2] in ((stage, "B"), (stage, "W")) and position > at]
        if late:
            got = f"{', '.join(late)} after it"
            self.say(f"gradients of stage {stage} are reduced before they are complete", f"after {late[-1]}", got, position=at)

    def closed(self, each: Send | Receive, position: int) -> None:
        """Every launch is waited for, and what is received is read."""
        if each not in self.waited:
            self.say(f"{each} has no WAIT", "one WAIT for each launch", "none", f"add WAIT {each}", position)
        if isinstance(each, Receive) and not any(action in self.ran for action in each.transfer.readers):
            self.say(f"{each} is never read", f"{_either(each.transfer.readers)} on this rank", "neither runs", position=position)


def _either(actions: tuple[Action, ...]) -> str:
    return " or ".join(map(str, actions))
