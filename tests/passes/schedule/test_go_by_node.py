"""Small gathers and scatters over several nodes go by node: where that is quicker, within the budget, exactly, on processes too."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from autopar.cost.hardware.cluster import Cluster
from autopar.cost.model import CostModel
from autopar.cost.schedule_budget import ScheduleBudget
from autopar.ir.instructions import Launch, parse
from autopar.ir.mesh import MICROBATCHES, Mesh
from autopar.passes.schedule.go_by_node import GoByNode
from autopar.pipeline.fragment_prices import fragment_seconds
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.plans.decisions import NodeSizes
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.verify.report import error_of
from tests.support.captures import compiled
from tests.support.models.zoo import gpt2, llama
from tests.support.ranks import GlooRanks, share
from tests.support.schedules import retyped, schedule_of, whole

HUNDREDS = Mesh((("dp", 256),))
STEP = """
LAUNCH all_gather copy dp (p) -> whole
LAUNCH all_reduce sum dp (p) -> total
LAUNCH reduce_scatter sum dp (g) -> part
WAIT whole
WAIT total
WAIT part
"""


def slow_inside() -> Cluster:
    """Two ranks to a node, where a step within it takes a millisecond: rings through all ranks are slow."""
    cluster = Cluster.named("2xH100")
    return replace(cluster, inner=replace(cluster.inner, latency_seconds=1e-3, small=None, in_switch=None))


def program(elements: int, mesh: Mesh = HUNDREDS, text: str = STEP) -> ScheduleProgram:
    """Each rank has so many numbers of a whole."""
    schedule, size = schedule_of(text, "p g", "whole total part"), mesh.size_of(("dp",))
    shapes = dict.fromkeys(("p", "total", "part"), (elements,)) | dict.fromkeys(("g", "whole"), (size, elements))
    return whole(mesh, retyped(schedule, {name: (shape, torch.float32) for name, shape in shapes.items()}))


def sizes(given: ScheduleProgram, chosen: GoByNode) -> dict[str, int]:
    found = chosen.apply(given, chosen.decide(given))
    return {each.name: each.node_size for each in found.places[0].instructions if isinstance(each, Launch)}


@pytest.mark.parametrize(("elements", "size"), [(1_000, 8), (4_000_000, 0)])
def test_small_gathers_and_scatters_go_so_over_many_nodes_and_large_ones_as_one(elements: int, size: int) -> None:
    assert sizes(program(elements), GoByNode(Cluster.named("8xH100"))) == {"whole": size, "total": 0, "part": size}


def test_on_one_node_or_with_a_rank_on_each_everything_goes_as_one() -> None:
    for mesh in (Mesh((("dp", 8),)), Mesh((("dp", 32), ("tp", 8))), Mesh((("dp", 8), (MICROBATCHES, 4)))):
        given = program(1_000, mesh)
        chosen = GoByNode(Cluster.named("8xH100"))
        assert not chosen.decide(given).sizes
        assert chosen.apply(given, NodeSizes()) is given


def test_two_neighbours_of_eight_ranks_share_a_node_beside_tensor_parallelism() -> None:
    assert sizes(program(1_000, Mesh((("dp", 64), ("tp", 4)))), GoByNode(Cluster.named("8xH100")))["whole"] == 2


def test_what_does_not_fit_into_the_budget_goes_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScheduleBudget, "allows", lambda *_: False)
    decision = GoByNode(Cluster.named("8xH100")).decide(program(1_000))
    assert not decision.sizes
    assert "as one: 2 collectives would be quicker by node, which does not fit into the budget" in str(decision)


def test_what_goes_so_is_priced_so_and_what_stays_one_as_one() -> None:
    given, cost = program(1_000), CostModel(Cluster.named("8xH100"), HUNDREDS)
    chosen = GoByNode(cost.cluster)
    moved = chosen.apply(given, chosen.decide(given))
    gathers = [each.places[0].instructions[0] for each in (given, moved)]
    as_one, by_node = (fragment_seconds(each, cost)(launch) for each, launch in zip((given, moved), gathers, strict=True))
    assert by_node == cost.by_node("all_gather", ("dp",), 4_000, 1_024_000) < as_one
    assert as_one == cost.collective("all_gather", ("dp",), 4_000, 1_024_000).seconds
    measured = CostModel(replace(cost.cluster, links=(("dp", cost.cluster.outer),)), HUNDREDS)
    assert fragment_seconds(moved, measured)(gathers[1]) == measured.collective("all_gather", ("dp",), 4_000, 1_024_000).seconds


def test_other_ranks_read_what_the_first_decided() -> None:
    given, chosen = program(1_000), GoByNode(Cluster.named("8xH100"))
    decision = chosen.decide(given)
    again = chosen.read(given, chosen.written(given, decision))
    assert chosen.apply(given, again).places[0].instructions == chosen.apply(given, decision).places[0].instructions


def test_it_prints_and_parses_back() -> None:
    (launch,) = parse("LAUNCH reduce_scatter sum dp,cp by 8 (a, b) -> (x, y)")
    assert launch == Launch("reduce_scatter", "sum", ("dp", "cp"), ("a", "b"), ("x", "y"), 8)
    assert str(launch) == "LAUNCH reduce_scatter sum dp,cp by 8 (a, b) -> (x, y)"


def by_node(parallel: ParallelModule) -> set[tuple[str, int]]:
    launches = (each for schedule in parallel.compiled.schedules for each in schedule.instructions if isinstance(each, Launch))
    return {(each.collective, each.node_size) for each in launches if "dp" in each.axes and each.collective != "all_reduce"}


@pytest.mark.parametrize(
    ("axes", "options"),
    [({"dp": 8}, {"zero": 3}), ({"dp": 4, "tp": 2}, {"zero": 2, "num_microbatches": 2}), ({"pp": 2, "dp": 4}, {"zero": 3})],
    ids=["dp8, level 3", "dp4 × tp2, level 2", "pp2 × dp4, level 3"],
)
def test_loss_and_gradients_are_the_originals(axes: dict[str, int], options: dict[str, Any]) -> None:
    case = llama(2)
    cluster = replace(slow_inside(), ranks_per_node=2 * axes.get("tp", 1))
    parallel = compiled(case.model, axes, case.batch, cluster=cluster, **options)
    assert by_node(parallel) == {("all_gather", 2), ("reduce_scatter", 2)}
    report = parallel.verify(promote=True, **case.batch)
    assert report and report.worst <= 1e-9, str(report)
    assert "by node take" in parallel.explain(detail="all")


def trained_on_a_process() -> tuple[set[tuple[str, int]], float]:
    torch.manual_seed(0)
    case = gpt2(1).to(torch.float32)
    reference = copy.deepcopy(case.model)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    batch = share(case.batch, mesh)
    options = {"zero": 3, "cluster": slow_inside(), "num_microbatches": 2, "timeout": 180}
    parallel = compiled(case.model, mesh, batch, optimizer="adamw", **options)
    parallel(**batch).loss.backward()
    reference(**case.batch).loss.backward()
    for module in (parallel, reference):
        torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3).step()
    full = parallel.full_state_dict()
    return by_node(parallel), max(error_of(full[key], value) for key, value in reference.state_dict().items() if key in full)


def test_processes_train_so(gloo_ranks: GlooRanks) -> None:
    for found, error in gloo_ranks.run(trained_on_a_process):
        assert found == {("all_gather", 2), ("reduce_scatter", 2)}
        assert error < 1e-4
