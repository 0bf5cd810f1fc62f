"""One decision for all ranks: rank 0 decides, the others read what it wrote down.

Ranks that decided on their own would agree only as long as solver, prices, tables of measurements and versions do; this way they
agree, or are told apart by the fingerprints of their schedules.

    rank 0   decision = choose.decide(program)      choose.written(program, decision) → JSON ──┐
    others                                          choose.read(program, value) → decision ←───┘
    all      choose.apply(program, decision)
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from autopar.ir.program import Program
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.plans.json import Json

# Called on every rank with a function that makes a text; returns on all what it made on rank 0, where alone it is called.
FromFirst = Callable[[Callable[[], str]], str]


@runtime_checkable
class SharedDecision(Protocol):
    """A pass whose decision is made once for all ranks.

    Those that weigh prices, measurements or what the user gave have such decisions. What follows from the graph alone (which ops a
    fusion takes, what is saved) every rank finds for itself, in parallel: ranks have one graph, or nothing they do fits together.
    """

    def decide(self, program: Any) -> Any: ...

    def written(self, program: Any, decision: Any) -> Json:
        """`decision` in words that mean the same on another rank: names of parameters and of inputs, `node_keys`, numbers."""
        ...

    def read(self, program: Any, value: Any) -> Any:
        """The decision that `written` gave as `value`, after a way through JSON, about this rank's own program.

        A value that does not fit the program is no error here, where other ranks would wait in vain for this one; its schedule is
        then another than theirs, of which all are told.
        """
        ...


def decide_once(chosen: SharedDecision, program: Program | ScheduleProgram, from_first: FromFirst) -> Any:
    """Rank 0's decision about `program`. Collective; raises rank 0's error on every rank."""
    found: list[Any] = []

    def decide() -> str:
        found.append(chosen.decide(program))
        return json.dumps(chosen.written(program, found[0]))

    text = from_first(decide)
    return found[0] if found else chosen.read(program, json.loads(text))
