"""Random plans are legal, repeatable and various."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.checks.checker import check
from autopar.driver.manager import run_passes
from autopar.ir.collectives import reshard
from autopar.ir.keys import DIMS, SHARDING, STRATEGY
from autopar.ir.mesh import Mesh, parent
from autopar.ir.program import Program, operands
from autopar.ir.reshard import reachable
from autopar.ops.strategies import strategies_of
from autopar.passes.global_.insert_reshards import InsertReshards
from autopar.testing.random_shardings import RandomShardings
from tests.support.graphs import traced, with_atoms

aten = torch.ops.aten
MESH = Mesh((("dp", 2), ("tp.0", 2), ("tp.1", 2)))


def layer(x: Tensor, w: Tensor, v: Tensor) -> list[Tensor]:
    hidden = aten.relu.default(aten.mm.default(x, w))
    whole = aten.native_layer_norm.default(hidden, [16], None, None, 1e-5)
    return [aten.mm.default(whole[0], v), whole[1]]


def program() -> Program:
    return with_atoms(traced(layer, torch.randn(8, 12), torch.randn(12, 16), torch.randn(16, 4), mesh=MESH, parameters=(1, 2)))


def test_every_node_gets_one_of_its_strategies_with_operands_that_can_be_had() -> None:
    start = program()
    for seed in range(20):
        found = RandomShardings(seed).apply(start, RandomShardings(seed).decide(start))
        for node in found.graph.nodes:
            if node.op == "call_function":
                assert STRATEGY[node] in strategies_of(node, MESH)
                for operand, target in zip(operands(node), STRATEGY[node].operands, strict=True):
                    sources = SHARDING[operand]
                    assert target in sources if len(sources) > 1 else reachable(sources[0], target)
            for dims, sharding in zip(DIMS[node], SHARDING[node], strict=True) if node.op != "output" else ():
                assert not sharding.problems(dims, MESH)
        check(InsertReshards().apply(found))


def test_the_only_result_of_an_op_that_gives_a_list_is_read_as_it_is() -> None:
    """A recurrent layer of one direction unbinds a dim of size 1."""
    start = with_atoms(traced(lambda x: [aten.exp.default(aten.unbind.int(x)[0])], torch.randn(1, 8, 12), mesh=MESH))
    for seed in range(20):
        found = InsertReshards().apply(RandomShardings(seed).apply(start, RandomShardings(seed).decide(start)))
        check(found)
        resharded = [operands(node)[0] for node in found.graph.nodes if node.target is reshard]
        assert all(isinstance(node.meta["val"], Tensor) for node in resharded)


def test_a_seed_is_a_plan() -> None:
    start = program()
    assert RandomShardings(3).decide(start) == RandomShardings(3).decide(program())
    plans = [RandomShardings(seed).decide(start) for seed in range(10)]
    assert len({str({name: str(strategy.results) for name, strategy in plan.items()}) for plan in plans}) == 10


def test_all_choices_occur() -> None:
    """Over many seeds every strategy of a product of inputs is drawn that needs no unreduced operand."""
    start = with_atoms(traced(lambda x, w: aten.mm.default(x, w), torch.randn(8, 12), torch.randn(12, 16), parameters=(1,)))
    (product,) = [node for node in start.graph.nodes if node.op == "call_function"]
    possible = {strategy for strategy in strategies_of(product, start.mesh) if not any(each.unreduced for each in strategy.operands)}
    drawn = {RandomShardings(seed).decide(start)[product.name] for seed in range(40 * len(possible))}
    assert len(possible) > 2 and drawn == possible


def test_the_batch_is_split_by_dp_only_and_dp_splits_nothing_else() -> None:
    start = program()
    for seed in range(20):
        found = run_passes(start, (RandomShardings(seed),))
        x, w, _ = found.placeholders
        assert {parent(axis) for axis in SHARDING[x][0].splits[0]} <= {"dp"}
        assert all(parent(axis) == "tp" for axis in SHARDING[w][0].axes)


def test_calm_plans_reshard_seldom() -> None:
    def num_reshards(calm: float) -> int:
        plans = [run_passes(program(), (RandomShardings(seed, calm), InsertReshards())) for seed in range(20)]
        return sum(node.target is reshard for plan in plans for node in plan.graph.nodes)

    assert num_reshards(calm=1.0) < 0.7 * num_reshards(calm=0.0)
