"""Megatron found, not told: what the search decides on real shapes, batch on dp alone, one sequence in bf16 per data-parallel rank.

Two depths are planned; what four layers send more than three do is a middle layer's. `benchmarks/planning.py` has the full depth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
from torch.fx import Node

from autopar.driver.compiled import Compiled
from autopar.ir.collectives import reshard
from autopar.ir.keys import DIMS, SHARDING, STRATEGY
from autopar.ir.program import Program, operands, results_of
from autopar.ir.schedule import Schedule
from autopar.ir.sharding import shape_of
from autopar.plans.plan import Plan
from autopar.reports.explain import details
from autopar.reports.summary import contractions
from benchmarks.planning import GPT2_MEDIUM, SHAPES, Planned, Shape, planned, traced
from tests.support.schedules import whole

TENSOR_PARALLEL = (2, 4, 8)
NUM_LAYERS = 4
# One shape each by default; the others at length.
QUICK = {("gpt2-medium", 2), ("llama-3-8b", 4)}
CASES = [
    pytest.param(name, tp, id=f"{name}, tp{tp}", marks=() if (name, tp) in QUICK else pytest.mark.slow)
    for name in SHAPES
    for tp in TENSOR_PARALLEL
]


@cache
def program(name: str, num_layers: int) -> Program:
    return traced(SHAPES[name], num_layers)


@cache
def found(name: str, tp: int, num_layers: int = NUM_LAYERS) -> Planned:
    return planned(program(name, num_layers), tp)


@pytest.mark.parametrize(("name", "tp"), CASES)
def test_a_layer_sends_at_most_what_megatrons_does(name: str, tp: int) -> None:
    deep, shallow = found(name, tp), found(name, tp, NUM_LAYERS - 1)
    for phase in ("forward", "backward"):
        per_layer = deep.sent(phase) - shallow.sent(phase)
        assert 0 < per_layer <= 1.02 * SHAPES[name].megatron_bytes(tp), f"{phase}: {per_layer:.0f} bytes"


@pytest.mark.parametrize(("name", "tp"), [("gpt2-medium", 2), *(("llama-3-8b", tp) for tp in TENSOR_PARALLEL)])
def test_every_contraction_is_split(name: str, tp: int) -> None:
    """Sending little is easy for a plan that computes everything on every rank.

    GPT-2-medium on four and more is left out: with 1,024 tokens, all-reducing costs more than computing some products on every rank.
    """
    result = found(name, tp).program
    assert {STRATEGY[node].num_shards for node in contractions(result)} == {tp}


@pytest.mark.parametrize(("name", "tp"), CASES)
def test_vocabulary_and_loss_are_split_and_logits_never_gathered(name: str, tp: int) -> None:
    result = found(name, tp).program
    logits = list(logits_of(result, SHAPES[name]))
    assert len(logits) > 8, "projection, softmax, loss and their gradients"
    for node, index in logits:
        sharding, dims = SHARDING[node][index], DIMS[node][index]
        assert shape_of(sharding.local_dims(dims, result.mesh))[-1] == SHAPES[name].vocabulary // tp, f"{node}: {sharding.describe(dims)}"
        assert node.target is not reshard, f"{node} moves logits"
    assert not any(node.target is reshard for node, _ in of_size(result, SHAPES[name].vocabulary * SHAPES[name].length))


def logits_of(result: Program, shape: Shape) -> Iterator[tuple[Node, int]]:
    """Values with a position for every token and every word of the vocabulary, (node, result)."""
    for node, index in of_size(result, shape.vocabulary * shape.length):
        value = results_of(node)[index]
        is_table = node.op == "placeholder" or value is None or value.shape[-1] != shape.vocabulary
        if not is_table and not reads_a_table(node):
            yield node, index


def reads_a_table(node: Node) -> bool:
    """Whether a value is a view of a parameter: as wide as the text is long, a table of words looks like logits."""
    read = operands(node)
    return len(read) == 1 and (read[0].op == "placeholder" or reads_a_table(read[0]))


def of_size(result: Program, num_elements: int) -> Iterator[tuple[Node, int]]:
    for node in result.graph.nodes:
        for index, value in enumerate(results_of(node)):
            if value is not None and value.numel() == num_elements:
                yield node, index


@pytest.mark.parametrize(("name", "tp"), CASES)
def test_megatrons_own_plan_costs_no_less(name: str, tp: int) -> None:
    pinned = planned(program(name, NUM_LAYERS), tp, SHAPES[name].megatron)
    split = {item.name for item, node in pinned.program.named_inputs() if item.kind == "parameter" and SHARDING[node][0].axes}
    assert len(split) >= 4 * NUM_LAYERS, f"the pins split only {split}"
    assert found(name, tp).decision.cost_seconds <= pinned.decision.cost_seconds * (1 + 1e-6)
    assert found(name, tp).decision.gap <= 0.005


def test_a_vocabulary_that_does_not_divide_is_padded_and_split_alike() -> None:
    shape = replace(GPT2_MEDIUM, vocabulary=50_257)
    result = planned(traced(shape, 2), 2)
    table = next(node for item, node in result.program.named_inputs() if item.name == "transformer.wte.weight")
    assert SHARDING[table][0].describe(DIMS[table][0]) == "[50258@tp, 1024]"
    padded = 50_258 * shape.length
    head = [node for node, _ in of_size(result.program, padded) if node in set(contractions(result.program))]
    assert head and {STRATEGY[node].num_shards for node in head} == {2}
    assert not any(node.target is reshard for node, _ in of_size(result.program, padded)), "logits are never gathered"
    assert "does not divide" not in details(compiled(result), "not split")


def compiled(result: Planned) -> Compiled:
    """What `explain` reads; nothing is lowered."""
    schedule = Schedule((), {}, (), (), result.program.signature)
    plan = Plan.of(result.program, result.decision)
    return Compiled.of(
        result.program, result.program, result.program, whole(result.program.mesh, schedule), plan, search=result.decision, cost=result.cost
    )
