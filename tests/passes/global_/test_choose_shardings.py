"""The sharding search on captured programs: what it finds, what it keeps to, what it writes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar
from autopar.checks.sharding import check_shardings
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.model import CostModel
from autopar.driver.manager import run_passes
from autopar.errors import PlanError
from autopar.frontend.capture import capture
from autopar.ir.keys import DIMS, SHARDING, STRATEGY
from autopar.ir.mesh import Mesh, virtual_mesh
from autopar.ir.program import Program
from autopar.ir.sharding import Sharding
from autopar.ops.strategies import strategies_of
from autopar.partition.sharding_problem import whole_axes
from autopar.passes.forward.decompose_losses import DecomposeLosses
from autopar.passes.global_.choose_shardings import ChooseShardings
from autopar.passes.global_.find_atoms import FindAtoms
from autopar.passes.global_.fold_no_ops import FoldNoOps
from autopar.passes.global_.insert_reshards import InsertReshards
from autopar.passes.global_.merge_equal_calls import MergeEqualCalls
from autopar.passes.global_.refine_mesh import RefineMesh
from autopar.passes.global_.trace_joint import TraceJoint
from autopar.plans.plan import Plan

H100 = Cluster.named("8xh100")


class Blocks(nn.Module):
    """Residual MLPs with norms: up-projection, gelu, down-projection; the loss is a mean of squares."""

    def __init__(self, width: int = 2048, num_blocks: int = 2) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(num_blocks))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width, bias=False) for _ in range(num_blocks))
        self.down = nn.ModuleList(nn.Linear(4 * width, width, bias=False) for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(nn.functional.gelu(up(norm(x))))
        return (x * x).mean()


def program(mesh: Mesh, width: int = 2048, batch: int = 8, num_blocks: int = 2) -> Program:
    """The GLOBAL program of `Blocks` on inputs [batch, 512, width], with atoms, ready to be decided upon."""
    with torch.device("meta"):
        model = Blocks(width, num_blocks).to(torch.bfloat16)
    x = torch.empty(batch, 512, width, dtype=torch.bfloat16, device="meta")
    forward = capture(model, (x,), {}, mesh)
    passes = (DecomposeLosses(), TraceJoint(True), FoldNoOps(), MergeEqualCalls(), FindAtoms(), RefineMesh())
    return run_passes(forward, passes)


@pytest.fixture(scope="module")
def blocks() -> Program:
    return program(virtual_mesh(dp=2, tp=4))


def shardings(decided: Program) -> dict[str, str]:
    return {item.name: SHARDING[node][0].describe(DIMS[node][0]) for item, node in decided.named_inputs()}


def test_column_and_row_splits_are_found(blocks: Program) -> None:
    chosen = ChooseShardings(H100)
    decision = chosen.decide(blocks)
    found = shardings(chosen.apply(blocks, decision))
    for block in range(2):
        assert found[f"up.{block}.weight"] == "[8192@tp, 2048]"
        assert found[f"down.{block}.weight"] == "[2048, 8192@tp]"
    assert decision.gap < 1e-4
    assert decision.lower_bound_seconds <= decision.cost_seconds * (1 + 1e-9)


def test_the_batch_is_on_dp_and_contractions_are_split_by_all_ranks(blocks: Program) -> None:
    chosen = ChooseShardings(Cluster.ideal())
    decided = chosen.apply(blocks, chosen.decide(blocks))
    products = [node for node in decided.graph.nodes if node.target is torch.ops.aten.mm.default]
    assert len(products) == 2 * 2 * 3
    assert all(STRATEGY[node].num_shards == 8 for node in products)
    (batch,) = [node for item, node in decided.named_inputs() if item.kind == "batch"]
    assert SHARDING[batch][0].describe(DIMS[batch][0]) == "[8@dp, 512, 2048]"


def test_the_decision_is_legal_and_leaves_the_given_program_alone(blocks: Program) -> None:
    chosen = ChooseShardings(H100)
    decided = chosen.apply(blocks, chosen.decide(blocks))
    assert not any(node in SHARDING for node in blocks.graph.nodes)
    assert all(node in SHARDING for node in decided.graph.nodes if node.op != "output")
    inserted = InsertReshards().apply(decided)
    assert check_shardings(inserted) == []


def test_deciding_twice_gives_the_same(blocks: Program) -> None:
    assert ChooseShardings(H100).decide(blocks).strategies == ChooseShardings(H100).decide(blocks).strategies


def test_folding_changes_the_size_of_the_search_and_not_its_result() -> None:
    deep = program(virtual_mesh(dp=2, tp=4), num_blocks=8)
    folded, whole = ChooseShardings(H100).decide(deep), ChooseShardings(H100, fold=False).decide(deep)
    assert folded.cost_seconds == pytest.approx(whole.cost_seconds, rel=1e-4)
    assert folded.solution.num_variables < whole.solution.num_variables


def test_a_pin_is_kept_and_never_makes_the_step_cheaper(blocks: Program) -> None:
    free = ChooseShardings(H100).decide(blocks)
    for pins in ({"up.*.weight": (None, "tp")}, {"down.0.weight": ()}, {"up.*.weight": ("tp", None), "down.*.weight": (None, "tp")}):
        chosen = ChooseShardings(H100, pins=pins)
        decision = chosen.decide(blocks)
        assert decision.cost_seconds >= free.cost_seconds * (1 - 1e-5)
    assert shardings(chosen.apply(blocks, decision))["up.1.weight"] == "[8192@tp, 2048]"
    assert decision.cost_seconds == pytest.approx(free.cost_seconds, rel=1e-5)
    assert decision.reasons["up.0.weight"] == "pinned by the user"


def test_a_pin_that_cannot_be_kept_is_refused(blocks: Program) -> None:
    with pytest.raises(PlanError, match="'up.0.weight'.*axis 'ep' is not on the mesh"):
        ChooseShardings(H100, pins={"up.0.weight": ("ep", None)}).decide(blocks)


def test_a_plan_that_fits_is_taken_as_it_is(blocks: Program) -> None:
    first = ChooseShardings(H100)
    decision = first.decide(blocks)
    plan = Plan.from_json(Plan.of(first.apply(blocks, decision), decision).to_json())
    again = ChooseShardings(Cluster.ideal(), plan=plan).decide(blocks)
    calls = {node.name for node in blocks.graph.nodes if node.op == "call_function"}
    assert {name: again.strategies[name] for name in calls} == {name: decision.strategies[name] for name in calls}


def test_earlier_placements_are_kept(blocks: Program) -> None:
    dims = {item.name: DIMS[node][0] for item, node in blocks.named_inputs()}

    class Placed:
        def __init__(self, dims: object, sharding: Sharding) -> None:
            self.dims, self.sharding = dims, sharding

    name = "up.0.weight"
    kept = {name: Placed(dims[name], Sharding(((), ("tp",))))}
    chosen = ChooseShardings(H100, placements=kept)  # type: ignore[arg-type]
    assert shardings(chosen.apply(blocks, chosen.decide(blocks)))[name] == "[8192, 2048@tp]"
    other = {name: Placed(((2, 4096), (2048,)), Sharding(((), ("tp",), ())))}
    with pytest.raises(PlanError, match="was placed as .* by the first capture"):
        ChooseShardings(H100, placements=other).decide(blocks)  # type: ignore[arg-type]


def test_the_runner_up_of_every_parameter_is_told(blocks: Program) -> None:
    decision = ChooseShardings(H100).decide(blocks)
    nodes = {item.name: node for item, node in blocks.named_inputs() if item.kind == "parameter"}
    assert set(decision.reasons) == set(nodes)
    for node in nodes.values():
        other = decision.runner_up(node.name)
        assert other is not None and other.extra_seconds > -1e-9
        assert other.strategy != decision.strategies[node.name]
    assert "next best" in decision.reasons["up.0.weight"]
    assert "ms a step" in str(decision)


def test_no_time_gives_a_legal_plan(blocks: Program) -> None:
    chosen = ChooseShardings(H100, timeout=0.0)
    decided = InsertReshards().apply(chosen.apply(blocks, chosen.decide(blocks)))
    assert check_shardings(decided) == []


def test_the_cost_is_that_of_the_parts(blocks: Program) -> None:
    """Ops, reshards and held parameters of the applied plan add up to what the search says."""
    chosen = ChooseShardings(H100)
    decision = chosen.decide(blocks)
    decided = chosen.apply(blocks, decision)
    cost = CostModel(H100, decided.mesh)
    seconds = sum(
        cost.node(node, STRATEGY[node]).seconds for node in decided.graph.nodes if node.op == "call_function" and "getitem" not in node.name
    )
    for item, node in decided.named_inputs():
        if item.kind == "parameter":
            seconds += cost.parameter(DIMS[node][0], item.dtype, SHARDING[node][0], item.requires_grad).seconds
    for node in InsertReshards().apply(decided).graph.nodes:
        if node.name.startswith("reshard"):
            source = node.args[0]
            seconds += cost.reshard(source.meta["val"].nbytes, SHARDING[source][0], SHARDING[node][0])
    assert seconds == pytest.approx(decision.cost_seconds, rel=1e-6)


def test_sub_axes_stay_together_but_for_atoms_too_small_for_the_whole() -> None:
    mesh = Mesh((("dp", 1), ("tp.0", 2), ("tp.1", 2)))
    found = program(virtual_mesh(dp=1, tp=4), width=64)
    node = next(node for node in found.graph.nodes if node.target is torch.ops.aten.gelu.default)
    every = strategies_of(node, mesh)
    together = whole_axes(every, (DIMS[node][0],), DIMS[node], mesh)
    assert len(every) > len(together)
    assert all(("tp.0" in split) == ("tp.1" in split) for each in together for split in each.results[0].splits)
    heads = replace(every[0], operands=(Sharding((("tp.0",), ("tp.1",), ())),), results=(Sharding((("tp.0",), ("tp.1",), ())),))
    two_heads = ((2,), (512,), (64,))
    assert whole_axes((heads,), (two_heads,), (two_heads,), mesh) == (heads,)
    four_heads = ((4,), (512,), (64,))
    assert whole_axes((heads,), (four_heads,), (four_heads,), mesh) == ()


class Positions(nn.Module):
    """An MLP on tokens with learnt positions, of which a call reads as many as it has tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, 8)
        self.positions = nn.Parameter(torch.randn(16, 8))
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        return (x + self.down(torch.relu(self.up(x)))).square().mean()


@pytest.mark.parametrize("pin", [(None, "tp"), ("tp", None), ()])
def test_a_parameter_keeps_its_sharding_at_another_length(pin: tuple[str | None, ...]) -> None:
    model = Positions()
    parallel = autopar.compile(model, virtual_mesh(dp=1, tp=2), backend="eager", pins={"up.weight": ("tp", None), "positions": pin})
    dims: set[object] = set()
    for length in (16, 8, 4, 6):
        ids = torch.randint(0, 32, (2, length))
        torch.testing.assert_close(parallel(ids), model(ids))
        dims.add(parallel.plan.parameters["positions"].dims)
    assert len(dims) > 1
