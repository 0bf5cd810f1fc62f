"""What the field knows by name and nobody tells the search."""

from __future__ import annotations

from collections import Counter

import pytest

from autopar.cost.hardware.cluster import Cluster
from autopar.cost.memory import MemoryBudget
from autopar.cost.model import CostModel
from autopar.ir.freedom import Freedom
from autopar.ir.keys import DIMS, PHASE, SHARDING
from autopar.ir.markers import save
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.passes.global_.choose_shardings import ChooseShardings
from autopar.passes.global_.find_atoms import FindAtoms
from autopar.passes.global_.insert_reshards import InsertReshards
from autopar.reports.summary import transfers
from benchmarks.planning import LLAMA_3_8B, traced

NUM_LAYERS = 2


@pytest.fixture(scope="module")
def program() -> Program:
    """Two layers of Llama-3-8B's shapes, one sequence of 4,096 tokens per data-parallel rank."""
    return FindAtoms().apply(traced(LLAMA_3_8B, NUM_LAYERS))


def planned(program: Program, mesh: Mesh, cluster: str, freedom: Freedom, budget: str | None = None) -> Program:
    choose = ChooseShardings(Cluster.named(cluster), budget=MemoryBudget.of(budget))
    here = program.copy(mesh=mesh, freedom=freedom)
    decision = choose.decide(here)
    assert decision.gap <= 0.01
    return InsertReshards().apply(choose.apply(here, decision))


def test_sequence_parallelism(program: Program) -> None:
    """Megatron's (arXiv:2205.05198, section 4.2.2): reduce-scatter and all-gather over the sequence in place of all-reduces."""
    mesh = Mesh((("dp", 1), ("tp", 8)))
    found = planned(program, mesh, "8xA100", Freedom())
    cost = CostModel(Cluster.named("8xA100"), mesh)
    hidden = LLAMA_3_8B.length * LLAMA_3_8B.width * 2
    large = [each for each in transfers(found, cost) if each.phase == "forward" and each.bytes > 0.5 * hidden]
    assert Counter(each.collective for each in large) == {"reduce_scatter": 2 * NUM_LAYERS, "all_gather": 2 * NUM_LAYERS + 1}
    saved = [SHARDING[node][0].describe(DIMS[node][0]) for node in found.graph.nodes if node.target is save]
    assert saved.count("[1, 4096@tp, 4096]") >= 2 * NUM_LAYERS, "the residual stream is saved split over the sequence"


def test_two_dimensional_sharding_of_weights_under_a_budget() -> None:
    """Fully sharded over dp on one dim, tensor parallel on the other: where memory asks for it. A sequence for each dp rank."""
    mesh, program = Mesh((("dp", 4), ("tp", 4))), FindAtoms().apply(traced(LLAMA_3_8B, NUM_LAYERS, num_sequences=4))
    found = planned(program, mesh, "8xH100", Freedom(shards_parameters=True), "3GB")
    weights = [SHARDING[node][0] for item, node in found.named_inputs() if item.kind == "parameter" and len(item.shape) == 2]
    assert sum("dp" in each.axes and "tp" in each.axes for each in weights) >= 3 * NUM_LAYERS
    gathered = [
        each for each in transfers(found, CostModel(Cluster.named("8xH100"), mesh)) if (each.collective, each.axes) == ("all_gather", "dp")
    ]
    assert {each.phase for each in gathered} == {"forward", "backward"}, "weights are gathered in both, and held in neither"


def test_without_a_budget_dp_splits_no_parameter(program: Program) -> None:
    found = planned(program, Mesh((("dp", 4), ("tp", 4))), "8xH100", Freedom())
    assert not any("dp" in SHARDING[node][0].axes for item, node in found.named_inputs() if item.kind == "parameter")
    assert {PHASE[node] for node in found.graph.nodes if node.target is save} == {"forward"}
