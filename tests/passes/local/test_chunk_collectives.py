"""Whether pieces are asked for, planned or found by cost, what is said of it, and that a wrong whole is found."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.fx import Node

from autopar.checks.local import check_local
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.memory import MemoryBudget
from autopar.errors import AutoparError
from autopar.graph.chunk_sites import sites
from autopar.ir.keys import CHUNK
from autopar.ir.program import Program
from autopar.passes.local.chunk_collectives import ChunkCollectives
from autopar.plans.keys import node_keys
from tests.autopar.cost.test_chunk_prices import cost_of
from tests.autopar.graph.test_chunk_sites import local_program
from tests.equivalence.test_chunks import blocks, chunks_of, launches

SLOW_LINKS = cost_of(1e6).cluster


def test_slow_links_beside_long_products_are_cut_by_cost() -> None:
    decision = ChunkCollectives(SLOW_LINKS).decide(local_program())
    assert decision.numbers and set(decision.numbers.values()) <= {2, 4, 8}
    reason = decision.reasons[next(iter(decision.numbers))]
    assert "pieces: " in reason and " → " in reason and "with its products" in reason


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (ChunkCollectives(Cluster.ideal()), "whole: links cost nothing here"),
        (ChunkCollectives(SLOW_LINKS, "off"), 'whole: collective_chunks="off"'),
        (ChunkCollectives(SLOW_LINKS, budget=MemoryBudget(1e6)), "whole: pieces would take memory, of which there is a budget"),
    ],
)
def test_nothing_is_cut_where_that_saves_nothing_or_takes_what_is_short(asked: ChunkCollectives, reason: str) -> None:
    program = local_program()
    decision = asked.decide(program)
    assert not decision.numbers and str(decision) == reason
    assert asked.apply(program, decision) is program


def test_a_cpu_whose_cores_move_the_bytes_cuts_nothing() -> None:
    decision = ChunkCollectives(Cluster.named("cpu")).decide(local_program())
    assert decision.reasons and not decision.numbers


def test_a_plan_says_which_and_the_user_overrules_it() -> None:
    program = local_program()
    key = node_keys(program)[sites(program)[0].launch]
    assert ChunkCollectives(SLOW_LINKS, planned={key: 2}).decide(program).numbers == {key: 2}
    assert not ChunkCollectives(SLOW_LINKS, "off", planned={key: 2}).decide(program).numbers
    assert len(ChunkCollectives(SLOW_LINKS, 2, planned={key: 3}).decide(program).numbers) > 1
    chosen = ChunkCollectives(SLOW_LINKS, 2)
    decision = chosen.decide(program)
    assert chosen.read(program, chosen.written(program, decision)).numbers == decision.numbers


def test_two_plans_differ_in_pieces() -> None:
    (whole, _), (pieces, _) = blocks("off", tp=2), blocks(3, tp=2)
    found = whole.plan.diff(pieces.plan)
    assert found and "chunks" in str(found) and "absent → 3" in str(found)
    assert whole.plan.chunks == {} and pieces.plan.chunks == chunks_of(pieces.compiled).numbers
    assert replace(whole.plan, chunks=None).to_json() != whole.plan.to_json()


@pytest.mark.parametrize("value", ["some", 1, 0, True, 2.5])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(AutoparError, match=r'collective_chunks=.* is unknown; use "auto", "off" or a number of pieces, 2 or more'):
        blocks(value, tp=2)  # type: ignore[arg-type]


def origin() -> Program:
    parallel, _ = blocks("off", tp=2)
    return parallel.compiled.program


def test_a_value_put_together_in_another_order_is_found() -> None:
    chosen, program = ChunkCollectives(Cluster.ideal(), 2), local_program()
    cut = chosen.apply(program, chosen.decide(program))
    assert not check_local(cut, origin())
    cats = [node for node in cut.graph.nodes if _joins(node)]
    assert cats
    for node in cats:
        node.args = (list(reversed(node.args[0])), *node.args[1:])
    found = [str(each.what) for each in check_local(cut, origin())]
    assert len([each for each in found if "put together of wrong pieces" in each]) >= len(cats) - 1


def _joins(node: Node) -> bool:
    return str(node.target) == "aten.cat.default" and any(each in CHUNK for each in node.all_input_nodes)


def test_pieces_stay_apart_in_buckets() -> None:
    pieces, whole = (launches(blocks(chunks, tp=2)[0].compiled) for chunks in (4, "off"))
    sums, before = ([each for each in found if each.collective == "reduce_scatter"] for found in (pieces, whole))
    assert len(sums) == 4 * len(before) and all(len(each.sources) == 1 for each in sums)
