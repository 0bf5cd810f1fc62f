"""One plan for all ranks: rank 0 searches, the others take what it found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from autopar.ir.program import Program
from autopar.passes.global_.choose_shardings import ChooseShardings, ShardingDecision
from autopar.plans.plan import Plan

# Called on every rank with a function that makes a text; returns on all what it made on rank 0, where alone it is called.
FromFirst = Callable[[Callable[[], str]], str]


@dataclass(frozen=True)
class DecideOnce:
    """`choose`, decided on rank 0. Its plan travels to the other ranks as JSON, and they apply it to their own program.

    Ranks that searched on their own would agree only as long as solver, cost model and versions do; this way they agree
    or are told apart by the plan's fingerprint.

    Reads, writes and ensures what `choose` does.
    """

    choose: ChooseShardings
    from_first: FromFirst

    @property
    def name(self) -> str:
        return self.choose.name

    def decide(self, program: Program) -> ShardingDecision:
        """Raises `PlanError` on every rank when rank 0 finds no plan."""
        found: list[ShardingDecision] = []

        def search() -> str:
            found.append(self.choose.decide(program))
            return Plan.of(self.choose.apply(program, found[0]), found[0]).to_json()

        plan = Plan.from_json(self.from_first(search))
        if found:
            return found[0]
        decision = replace(self.choose, plan=plan, pins=None, placements=None).decide(program)
        return replace(decision, reasons=plan.reasons)

    def apply(self, program: Program, decision: ShardingDecision) -> Program:
        return self.choose.apply(program, decision)
