"""One plan for all ranks: rank 0 searches, the others take its plan, and its refusal is everyone's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from autopar.cost.hardware.cluster import Cluster
from autopar.driver.manager import run_passes
from autopar.errors import PlanError
from autopar.ir.mesh import virtual_mesh
from autopar.ir.program import Program
from autopar.passes.global_.choose_shardings import ChooseShardings, ShardingDecision
from autopar.passes.global_.decide_once import DecideOnce
from autopar.runtime.execute.world import from_first
from tests.support.models.zoo import ZOO
from tests.support.programs import FORWARD_PASSES, forward_program, global_program


@pytest.fixture(scope="module")
def program() -> Program:
    case = ZOO["gpt2"]()
    mesh = virtual_mesh(dp=2, tp=2)
    return global_program(run_passes(forward_program(case.model, case.batch, mesh), FORWARD_PASSES))


def shardings(decision: ShardingDecision) -> dict[str, object]:
    return {name: strategy.results for name, strategy in decision.strategies.items()}


class Ranks:
    """Ranks that meet one after another in one process: rank 0 comes first."""

    def __init__(self) -> None:
        self.first: Any = None

    def world(self, rank: int) -> Any:
        ranks = self

        class World:
            def __init__(self) -> None:
                self.ranks = (rank,)

            def gather(self, value: Any, what: str = "") -> list[Any]:
                if rank == 0:
                    ranks.first = value
                return [ranks.first, value]

        return World()

    def from_first(self, rank: int) -> Callable[[Callable[[], str]], str]:
        return lambda make: from_first(self.world(rank), make)


def test_the_other_ranks_take_the_plan_of_rank_0(program: Program) -> None:
    ranks = Ranks()
    mine = DecideOnce(ChooseShardings(Cluster.ideal()), ranks.from_first(0)).decide(program)
    # A rank that priced differently would search its way to another plan; it gets no say.
    theirs = DecideOnce(ChooseShardings(Cluster.named("h100")), ranks.from_first(1)).decide(program)
    alone = ChooseShardings(Cluster.named("h100")).decide(program)
    assert shardings(theirs) == shardings(mine)
    assert theirs.reasons == mine.reasons and theirs.fixed and not mine.fixed
    assert shardings(alone) != shardings(mine)


def test_what_rank_0_cannot_plan_is_refused_on_every_rank(program: Program) -> None:
    ranks = Ranks()
    impossible = ChooseShardings(Cluster.ideal(), pins={"*.c_fc.weight": ("pp", None)})
    with pytest.raises(PlanError, match="axis 'pp' is not on the mesh"):
        DecideOnce(impossible, ranks.from_first(0)).decide(program)
    with pytest.raises(PlanError, match="(?s)rank 0 found no plan: .*axis 'pp' is not on the mesh"):
        DecideOnce(impossible, ranks.from_first(1)).decide(program)
