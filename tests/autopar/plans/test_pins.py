"""Pins on what modules return: kept, or refused with the reason. (Pins on parameters: test_plan.py.)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import autopar
from autopar.driver.decide_once import decide_once
from autopar.driver.manager import run_passes
from autopar.errors import PlanError
from autopar.frontend.capture import capture
from autopar.ir.collectives import reduce_scatter
from autopar.ir.keys import DIMS, ORIGIN, SHARDING, SOURCE, STRATEGY
from autopar.ir.markers import pinned
from autopar.ir.mesh import virtual_mesh
from autopar.ir.program import Program
from autopar.passes.forward.decompose_losses import DecomposeLosses
from autopar.passes.global_.choose_shardings import ChooseShardings
from autopar.passes.global_.find_atoms import FindAtoms
from autopar.passes.global_.fold_no_ops import FoldNoOps
from autopar.passes.global_.mark_pinned import MarkPinned
from autopar.passes.global_.mark_saved import MarkSaved
from autopar.passes.global_.refine_mesh import RefineMesh
from autopar.passes.global_.trace_joint import TraceJoint
from autopar.plans.pins import resolve
from autopar.plans.plan import Pins, Plan
from autopar.runtime.module.parallel_module import ParallelModule
from tests.support.models.residual import Residual, batch, parallel_residual
from tests.support.models.zoo import BATCH, LENGTH, WIDTH, Case, llama

LAYER = "model.layers.*."
SEQUENCE = (None, "tp", ...)
SEQUENCE_PARALLEL: Pins = {
    "model.embed_tokens.weight": ("tp", None),
    "model.embed_tokens": SEQUENCE,
    LAYER + "self_attn.[qkv]_proj.weight": ("tp", None),
    LAYER + "self_attn.o_proj.weight": (None, "tp"),
    LAYER + "self_attn": SEQUENCE,
    LAYER + "*_layernorm": SEQUENCE,
    LAYER + "mlp.gate_proj.weight": ("tp", None),
    LAYER + "mlp.up_proj.weight": ("tp", None),
    LAYER + "mlp.down_proj.weight": (None, "tp"),
    LAYER + "mlp": SEQUENCE,
    "model.norm": SEQUENCE,
    "lm_head.weight": ("tp", None),
}


@pytest.fixture(scope="module")
def case() -> Case:
    return llama(2)


@pytest.fixture(scope="module")
def sequence_parallel(case: Case) -> ParallelModule:
    mesh = virtual_mesh(dp=2, tp=2)
    return autopar.compile(case.model, mesh, example_inputs=case.batch, backend="eager", pins=SEQUENCE_PARALLEL)


def test_megatrons_sequence_parallelism_by_pins_is_exact(case: Case, sequence_parallel: ParallelModule) -> None:
    assert sequence_parallel.verify(**case.batch, promote=True)
    assert sequence_parallel.summary()["flops_split"] == 1.0


def test_a_pinned_output_is_split_on_every_rank(sequence_parallel: ParallelModule) -> None:
    compiled = sequence_parallel.compiled
    nodes = [node for node in compiled.program.graph.nodes if node.target is pinned]
    modules = {"model.embed_tokens", "model.norm"} | {f"model.layers.{i}.{name}" for i in range(2) for name in _PINNED}
    assert {SOURCE[node].module for node in nodes} == modules
    local = {ORIGIN[node]: node for node in compiled.local.graph.nodes if node in ORIGIN}
    for node in nodes:
        assert SHARDING[node][0].describe(DIMS[node][0]) == f"[{BATCH}@dp, {LENGTH}@tp, {WIDTH}]"
        assert local[node.all_input_nodes[0].name].meta["val"].shape == (BATCH // 2, LENGTH // 2, WIDTH)
    assert not any(node.target is pinned for node in compiled.local.graph.nodes)


_PINNED = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")


def test_row_parallel_products_arrive_by_reduce_scatter(sequence_parallel: ParallelModule) -> None:
    """Two a layer and one for the table, and nothing is all-reduced over tp in the forward."""
    found = sequence_parallel.summary()["communication"]["tp"]
    assert found["reduce_scatter"]["forward"] > 0 and found.get("all_reduce", {"forward": 0})["forward"] == 0
    products = [
        node for node in sequence_parallel.compiled.local.graph.nodes if node.target is reduce_scatter and "down_proj" in str(SOURCE[node])
    ]
    assert len(products) >= 2


def test_the_batch_stays_on_dp_unasked() -> None:
    parallel = parallel_residual(pins={"blocks.*.mlp": ("dp", None, "tp"), "table": ()})
    found = {SOURCE[node].module: SHARDING[node][0].describe(DIMS[node][0]) for node in _pinned_nodes(parallel)}
    assert found == {"table": "[4@dp, 8, 16]", "blocks.0.mlp": "[4@dp, 8, 16@tp]", "blocks.1.mlp": "[4@dp, 8, 16@tp]"}
    assert parallel.verify(*batch(), promote=True)


def _pinned_nodes(parallel: ParallelModule) -> list[torch.fx.Node]:
    return [node for node in parallel.compiled.program.graph.nodes if node.target is pinned]


def test_a_later_pattern_overrides_and_every_call_is_held() -> None:
    parallel = parallel_residual(Residual(1, repeats=2).double(), pins={"*.mlp": (..., "tp"), "blocks.0.mlp": (None, "tp", ...)})
    assert [SHARDING[node][0].describe(DIMS[node][0]) for node in _pinned_nodes(parallel)] == ["[4@dp, 8@tp, 16]"] * 2
    assert all(STRATEGY[node].operands == STRATEGY[node].results for node in _pinned_nodes(parallel))
    assert parallel.verify(*batch(), promote=True)


def test_a_plan_with_pinned_outputs_is_taken_again_as_it_is() -> None:
    first = parallel_residual(pins={"blocks.*.mlp": (None, "tp", None)})
    again = parallel_residual(plan=Plan.from_json(first.plan.to_json()))
    assert again.plan.pinned == first.plan.pinned == ("blocks.0.mlp", "blocks.1.mlp")
    assert again.plan.strategies == first.plan.strategies and again.plan.fingerprint == first.plan.fingerprint


@pytest.mark.parametrize(
    ("pins", "expected"),
    [
        (
            {"blocks.*.mlpp": ("tp",)},
            r"'blocks.\*.mlpp' matches no parameter; there are blocks.0.mlp.up.*; and no module that runs; there are blocks.0.mlp,",
        ),
        ({"blocks": ()}, "'blocks' matches no parameter; .*no module that runs"),
        ({"blocks.0.mlp": ("tp", None)}, r"the output of 'blocks.0.mlp' \('tp', None\): 2 entries for 3 dims"),
        ({"blocks.0.mlp": (..., "tp", ...)}, "3 entries for 3 dims"),
        ({"blocks.0.mlp": (None, "ep", ...)}, r"the output of 'blocks.0.mlp' \(None, 'ep', ...\): axis 'ep' is not on the mesh"),
        ({"blocks.0.mlp": ("tp", ...)}, r"axis 'tp' may not split the batch; let it with pins=\{'batch': \('dp', 'tp'\)\}"),
        ({"blocks.0.mlp": (None, "dp", ...)}, r"\[4, 8@dp, 16\] cannot be had: dp splits the batch, and the batch alone"),
        ({"blocks.0.mlp": (..., ("tp", "tp"))}, "axis 'tp' is used twice"),
    ],
)
def test_refuses_pins_on_outputs(pins: dict[str, Any], expected: str, captured: Program) -> None:
    passes = (MarkPinned(tuple(pins)), FindAtoms(), RefineMesh())
    with pytest.raises(PlanError, match=expected):
        resolve(pins, run_passes(captured, passes))


@pytest.fixture(scope="module")
def captured() -> Program:
    """Traced and simplified, before pins are looked at."""
    mesh = virtual_mesh(dp=2, tp=2)
    return run_passes(capture(Residual(), batch(), {}, mesh), (DecomposeLosses(), TraceJoint(True), FoldNoOps()))


def test_other_ranks_take_the_pinned_strategies_of_the_first(captured: Program) -> None:
    pins: Pins = {"blocks.*.mlp": (None, "tp", ...), "head.weight": ("tp", None)}
    program, texts = run_passes(captured, (MarkPinned(tuple(pins)), MarkSaved(), FindAtoms(), RefineMesh())), list[str]()

    def first(make: Callable[[], str]) -> str:
        texts.append(make())
        return texts[0]

    choose = ChooseShardings(pins=pins)
    decided = decide_once(choose, program, first)
    other = decide_once(choose, program, lambda make: texts[0])
    calls = [node.name for node in program.graph.nodes if node.op == "call_function"]
    assert [other.strategies[name] for name in calls] == [decided.strategies[name] for name in calls]
    assert len(other.fixed) > len(decided.fixed)


def test_later_captures_keep_the_pins() -> None:
    model = Residual().double()
    parallel = parallel_residual(model, pins={"blocks.*.mlp": (None, "tp", ...), "head.weight": ("tp", None)})
    shorter = batch()[0][:, :4]
    with torch.no_grad():
        torch.testing.assert_close(parallel(shorter), model(shorter))
    assert [SHARDING[node][0].describe(DIMS[node][0]) for node in _pinned_nodes(parallel)] == ["[4@dp, 4@tp, 16]"] * 2


def test_the_batch_may_be_pinned_to_an_axis_that_was_freed() -> None:
    parallel = parallel_residual(dp=1, tp=2, pins={"batch": ("dp", "tp"), "blocks.0.mlp": ("tp", ...)})
    assert [SHARDING[node][0].describe(DIMS[node][0]) for node in _pinned_nodes(parallel)] == ["[4@tp, 8, 16]"]
