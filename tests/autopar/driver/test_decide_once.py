"""One decision for all ranks: rank 0 decides, the others read what it wrote, and its refusal is everyone's."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autopar.compiler import Options, default_passes
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.model import CostModel
from autopar.driver.decide_once import SharedDecision, decide_once
from autopar.driver.manager import DecidingPass, run_passes
from autopar.errors import PlanError
from autopar.ir.actions import PipelineSchedule
from autopar.ir.keys import Source
from autopar.ir.mesh import Mesh, virtual_mesh
from autopar.ir.offload import Offload
from autopar.ir.padding import Padding
from autopar.ir.program import Program
from autopar.partition.whole_batch import MicrobatchDecision, Mixing
from autopar.passes.forward import choose_kernels
from autopar.passes.global_ import choose_order
from autopar.passes.global_.choose_microbatches import ChooseMicrobatches
from autopar.passes.global_.choose_order import ChooseOrder
from autopar.passes.global_.choose_shardings import ChooseShardings
from autopar.passes.global_.pad_atoms import PadAtoms, PaddingDecision
from autopar.passes.global_.place_stages import PlaceStages
from autopar.passes.global_.recompute import Recompute
from autopar.passes.global_.refine_mesh import RefineMesh
from autopar.passes.schedule.offload_activations import OffloadActivations
from autopar.passes.schedule.offload_parameters import OffloadParameters
from autopar.passes.schedule.wait_for_sums import MostUnderWay, WaitForSums
from autopar.pipeline.schedules import generate
from autopar.pipeline.stays import Trips
from autopar.pipeline.visits import Visit, Visits
from autopar.plans.decisions import ShardingDecision
from autopar.plans.plan import Plan
from autopar.recompute.decision import RecomputeDecision
from autopar.runtime.execute.agreement import from_first
from tests.support.captures import compiled
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
    mine = decide_once(ChooseShardings(Cluster.ideal()), program, ranks.from_first(0))
    # A rank that priced differently would search its way to another plan; it gets no say.
    theirs = decide_once(ChooseShardings(Cluster.named("h100")), program, ranks.from_first(1))
    alone = ChooseShardings(Cluster.named("h100")).decide(program)
    assert shardings(theirs) == shardings(mine)
    assert theirs.reasons == mine.reasons and theirs.fixed and not mine.fixed
    assert shardings(alone) != shardings(mine)


def test_what_rank_0_cannot_plan_is_refused_on_every_rank(program: Program) -> None:
    ranks = Ranks()
    impossible = ChooseShardings(Cluster.ideal(), pins={"*.c_fc.weight": ("pp", None)})
    with pytest.raises(PlanError, match="axis 'pp' is not on the mesh"):
        decide_once(impossible, program, ranks.from_first(0))
    with pytest.raises(PlanError, match="(?s)rank 0 found no plan: .*axis 'pp' is not on the mesh"):
        decide_once(impossible, program, ranks.from_first(1))


MIXED = (Mixing("sqrt", "aten.sqrt", "a sum over the batch", Source("m.py", 3, "x.sqrt()", "norm")), Mixing("seen", "buffer", "a buffer"))


@pytest.mark.parametrize(
    ("chosen", "decision"),
    [
        (RefineMesh(), Mesh((("dp", 2), ("tp.0", 2), ("tp.1", 2), ("mb", 4)))),
        (PadAtoms(), PaddingDecision({"head.weight": Padding(((97,), (2, 4)), ((100,), (2, 4)))})),
        (PadAtoms(), PaddingDecision()),
        (ChooseMicrobatches(), MicrobatchDecision(2, 4, MIXED, "dim 0 was taken")),
        (ChooseOrder(True, Cluster.ideal()), replace(generate("zb-v", 2, 3), name="my own")),
        (PlaceStages(Cluster.ideal()), None),
        (Recompute(), RecomputeDecision(reason="as much as the budget takes", fits=False, peak_bytes=12345.0)),
        (Recompute(), RecomputeDecision()),
        (WaitForSums(Cluster.ideal()), MostUnderWay(4)),
        (WaitForSums(Cluster.ideal()), MostUnderWay(None)),
        (OffloadParameters(Offload(parameters="host"), Cluster.ideal()), Visits("host", ((Visit("w", 0, 1, 2),), ()), ("all", "none"))),
        (OffloadActivations(Offload(activations="host"), Cluster.ideal()), Trips("host", ((), ()), ("all", "none"), False)),
    ],
)
def test_a_decision_is_read_as_it_was_written(chosen: Any, decision: object, program: Program) -> None:
    assert isinstance(chosen, SharedDecision)
    assert chosen.read(program, json.loads(json.dumps(chosen.written(program, decision)))) == decision


def test_what_every_rank_finds_by_itself_is_not_sent() -> None:
    passes = default_passes(Options(Cluster.named("h100"), kernels="triton"), training=True)
    alone = [each.name for each in passes if isinstance(each, DecidingPass) and not isinstance(each, SharedDecision)]
    assert alone and all(name.startswith("fuse ") for name in alone), alone


# ---- real ranks


def dear(program: Program, cost: CostModel, order: PipelineSchedule, capacity_bytes: float) -> PipelineSchedule:
    return generate("gpipe", order.num_ranks, order.num_microbatches)


def alone_and_together() -> tuple[str, str, str]:
    """The plan that this rank would make by itself, the one that it has beside others, and what it says of kernels.

    Every rank but the first has other prices, other measurements and another search for orders.
    """
    is_first, free = dist.get_rank() == 0, Cluster.ideal()
    cluster = replace(free, device=replace(free.device, name="h100")) if is_first else Cluster.named("8xv100")
    plans: list[Plan] = []
    with pytest.MonkeyPatch.context() as patch:
        if not is_first:
            cluster = replace(cluster, stage_speeds=(1.0, 0.3))
            patch.setattr(choose_kernels, "winner", lambda *_: SimpleNamespace(kernel="triton"))
            patch.setattr(choose_order, "best_order", dear)
        for mesh in (virtual_mesh(pp=2, tp=2), init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))):
            torch.manual_seed(0)
            case = ZOO["gpt2"](num_layers=2).to(torch.bfloat16)
            parallel = compiled(case.model, mesh, case.batch, cluster=cluster, schedule="auto", num_microbatches=4, timeout=180)
            plans.append(parallel.plan)
    return (
        plans[0].to_json(),
        plans[1].to_json(),
        parallel.explain(detail="all").split("\nwhose kernel runs attention\n")[1].split("\n\n")[0],
    )


def test_ranks_that_would_decide_otherwise_have_all_of_rank_0s_plan(gloo_ranks: Any) -> None:
    (first, together, shown), *others = gloo_ranks.run(alone_and_together)
    wanted = Plan.from_json(first)
    assert together == first
    for mine, taken, report in others:
        alone = Plan.from_json(mine)
        assert alone.parameters != wanted.parameters and alone.strategies != wanted.strategies
        assert alone.cuts != wanted.cuts and alone.schedule != wanted.schedule and alone.kernels != wanted.kernels
        assert taken == first and report == shown
