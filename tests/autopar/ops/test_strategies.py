"""Factors of ops on atoms, and which strategies a mesh allows."""

import operator

import pytest
import torch
from torch.fx import Graph, Node

from autopar.ir.keys import BATCH, DIMS
from autopar.ir.mesh import Mesh
from autopar.ir.program import operands
from autopar.ir.sharding import Dims, Sharding, Strategy, shape_of
from autopar.ops.lookup import rule_of
from autopar.ops.strategies import factors_of, placeholder_strategies, signature_of, space_of, strategies_of
from autopar.testing.prove import instance, prove, prove_strategy
from tests.support.kernels.attention import PLAIN

aten = torch.ops.aten
DP, TP = Mesh((("dp", 2),)), Mesh((("tp", 2),))
BOTH = Mesh((("dp", 2), ("tp", 2)))


def on_atoms(target: object, sources: list[Dims], result: Dims, *literals: object) -> Node:
    """A call of `target` on operands of the given atoms."""
    node = instance(target, *(torch.empty(shape_of(dims)) for dims in sources), *literals)  # type: ignore[arg-type]
    for operand, dims in zip(operands(node), sources, strict=True):
        DIMS[operand] = (dims,)
    DIMS[node] = (result,)
    return node


def mark_batch(node: Node, *positions: tuple[int, ...]) -> Node:
    """Set BATCH of the operands in order, then of the result."""
    for tensor, batch in zip((*operands(node), node), positions, strict=True):
        BATCH[tensor] = (batch,)
    return node


def texts(found: tuple[Strategy, ...]) -> list[str]:
    return [str(strategy) for strategy in found]


def test_a_label_of_several_atoms_is_several_factors() -> None:
    node = on_atoms(aten.mm.default, [((4, 8), (6,)), ((6,), (3, 2))], ((4, 8), (3, 2)))
    assert [(factor.name, factor.size, factor.operands, factor.results) for factor in factors_of(node)] == [
        ("m.0", 4, (0, None), (0,)),
        ("m.1", 8, (1, None), (1,)),
        ("k", 6, (2, 0), (None,)),
        ("n.0", 3, (None, 1), (2,)),
        ("n.1", 2, (None, 2), (3,)),
    ]
    assert prove(node) == []


def test_unequal_atoms_of_one_label_are_blocked() -> None:
    node = on_atoms(aten.add.Tensor, [((4, 2), (6,)), ((2, 4), (6,))], ((4, 2), (6,)))
    assert [factor.name for factor in factors_of(node)] == ["d1"]


def test_a_view_is_the_identity_on_atoms() -> None:
    node = on_atoms(aten.view.default, [((4,), (8,), (3, 2))], ((4, 8), (3,), (2,)), [32, 3, 2])
    assert [(factor.size, factor.operands, factor.results) for factor in factors_of(node)] == [
        (4, (0,), (0,)),
        (8, (1,), (1,)),
        (3, (2,), (2,)),
        (2, (3,), (3,)),
    ]
    assert prove(node) == []


def test_atoms_that_a_view_breaks_otherwise_are_blocked() -> None:
    node = on_atoms(aten.view.default, [((4,), (6,), (5,))], ((6,), (4,), (5,)), [6, 4, 5])
    assert [(factor.operands, factor.results) for factor in factors_of(node)] == [((2,), (2,))]
    assert prove(node) == []


def test_grouped_heads_share_the_key_heads() -> None:
    q, kv = torch.empty(2, 6, 4, 8), torch.empty(2, 2, 5, 8)
    node = instance(torch.ops.autopar.attention.default, q, kv, kv, *[None] * 6, **PLAIN)
    found = {factor.name: (factor.size, factor.operands, factor.results) for factor in factors_of(node)}
    assert found["g"] == (2, (1, 1, 1), (1, 1))
    assert found["r"] == (3, (2, None, None), (2, 2))


def test_heads_whose_atoms_straddle_the_groups_are_blocked() -> None:
    q, kv = torch.empty(2, 6, 4, 8), torch.empty(2, 2, 5, 8)
    node = instance(torch.ops.autopar.attention.default, q, kv, kv, *[None] * 6, **PLAIN)
    for tensor in (operands(node)[0], node):
        DIMS[tensor] = tuple((dims[0], (3, 2), *dims[2:]) for dims in DIMS[tensor])
    assert {factor.name for factor in factors_of(node)} == {"b", "s"}


def test_one_choice_per_axis_and_no_duplicates() -> None:
    node = on_atoms(aten.mm.default, [((4,), (6,)), ((6,), (8,))], ((4,), (8,)))
    found = strategies_of(node, TP)
    assert texts(found) == ["replicated", "tp:m", "tp:k", "tp:n", "tp:sum", "tp:sum"]
    assert len({(strategy.operands, strategy.results) for strategy in found}) == len(found)
    by_name = dict(zip(texts(found), found, strict=True))
    assert by_name["tp:k"].results == (Sharding(((), ()), (("tp", "sum"),)),)
    assert by_name["tp:k"].operands == (Sharding(((), ("tp",))), Sharding((("tp",), ())))
    assert [by_name[name].num_shards for name in ("replicated", "tp:m", "tp:sum")] == [1, 2, 1]


def test_the_batch_axis_splits_the_batch_and_no_other_axis_does() -> None:
    node = mark_batch(on_atoms(aten.mm.default, [((4, 8), (6,)), ((6,), (8,))], ((4, 8), (8,))), (0,), (), (0,))
    found = strategies_of(node, BOTH)
    assert {dict(strategy.factors)["dp"] for strategy in found} == {"m.0"}
    assert {dict(strategy.factors).get("tp") for strategy in found} == {None, "m.1", "k", "n", "sum"}


def test_the_batch_axis_passes_sums_where_there_is_no_batch() -> None:
    node = mark_batch(on_atoms(aten.add.Tensor, [((4,),), ((4,),)], ((4,),)), (), (), ())
    assert texts(strategies_of(node, DP)) == ["replicated", "dp:sum"]


def test_a_batch_that_does_not_divide_stays_whole() -> None:
    node = mark_batch(on_atoms(aten.exp.default, [((3,), (4,))], ((3,), (4,))), (0,), (0,))
    assert texts(strategies_of(node, DP)) == ["replicated"]


def test_reducing_over_the_batch_leaves_a_sum() -> None:
    node = mark_batch(on_atoms(aten.sum.dim_IntList, [((4,), (6,))], ((6,),), [0]), (0,), ())
    (strategy,) = strategies_of(node, DP)
    assert strategy.results == (Sharding(((),), (("dp", "sum"),)),)


def test_several_axes_on_one_factor_lie_in_mesh_order() -> None:
    mesh = Mesh((("tp.0", 2), ("tp.1", 2)))
    node = on_atoms(aten.exp.default, [((4,), (2,))], ((4,), (2,)))
    splits = {strategy.results[0].splits for strategy in strategies_of(node, mesh)}
    assert (("tp.0", "tp.1"), ()) in splits
    assert (("tp.0",), ("tp.1",)) in splits
    assert ((), ("tp.0", "tp.1")) not in splits
    assert not any(split == ("tp.1", "tp.0") for found in splits for split in found)


def test_sub_axes_of_the_batch_axis_split_the_batch_only() -> None:
    mesh = Mesh((("dp.0", 2), ("dp.1", 2)))
    node = mark_batch(on_atoms(aten.exp.default, [((4,), (8,))], ((4,), (8,))), (0,), (0,))
    assert [strategy.results[0].splits for strategy in strategies_of(node, mesh)] == [(("dp.0", "dp.1"), ())]


def test_axes_of_one_rank_and_pipeline_axes_do_nothing() -> None:
    node = on_atoms(aten.exp.default, [((4,),)], ((4,),))
    assert texts(strategies_of(node, Mesh((("pp", 2), ("dp", 1), ("tp", 1))))) == ["replicated"]


def test_an_op_without_a_rule_is_replicated() -> None:
    node = on_atoms(aten.diagonal_copy.default, [((4,), (4,))], ((4,),))
    assert texts(strategies_of(node, BOTH)) == ["replicated"]


def test_every_strategy_is_legal() -> None:
    node = on_atoms(aten.bmm.default, [((4, 2), (3,), (6,)), ((4, 2), (6,), (5,))], ((4, 2), (3,), (5,)))
    mesh = Mesh((("dp", 2), ("tp.0", 2), ("tp.1", 3)))
    for strategy in strategies_of(node, mesh):
        for tensor, sharding in zip((*operands(node), node), strategy.operands + strategy.results, strict=True):
            assert sharding.problems(DIMS[tensor][0], mesh) == []


@pytest.mark.parametrize("index", range(8))
def test_sums_of_both_operands_on_different_axes_multiply(index: int) -> None:
    mesh = Mesh((("x", 2), ("y", 3)))
    node = on_atoms(aten.mm.default, [((4,), (6,)), ((6,), (9,))], ((4,), (9,)))
    found = [strategy for strategy in strategies_of(node, mesh) if "sum" in str(strategy)]
    assert prove_strategy(node, found[index], mesh) == []


def test_getitem_is_the_identity_on_the_result_that_it_selects() -> None:
    graph = Graph()
    source = graph.placeholder("x")
    source.meta["val"] = (torch.empty(4, 6), torch.empty(4))
    DIMS[source], BATCH[source] = (((4,), (6,)), ((4,),)), ((0,), (0,))
    node = graph.call_function(operator.getitem, (source, 1))
    node.meta["val"] = source.meta["val"][1]
    DIMS[node], BATCH[node] = (((4,),),), ((0,),)
    found = strategies_of(node, DP)
    assert all(strategy.operands == strategy.results for strategy in found)
    # Split over the batch, whole (a statistic of the whole batch), or an unreduced sum: it takes what it is given.
    expected = {Sharding((("dp",),)), Sharding(((),)), Sharding(((),), (("dp", "sum"),))}
    assert {strategy.results[0] for strategy in found} == expected


def test_a_result_that_is_left_out_has_an_empty_sharding() -> None:
    x, weight, gradient = torch.empty(4, 6, 8, 8), torch.empty(2, 6, 3, 3), torch.empty(4, 2, 8, 8)
    literals = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False])
    node = instance(aten.convolution_backward.default, gradient, x, weight, *literals)
    for strategy in strategies_of(node, TP):
        assert strategy.results[0] == strategy.results[2] == Sharding(())


def test_placeholders() -> None:
    dims: Dims = ((4,), (6,))

    def splits(kind: str, batch: tuple[int, ...] = ()) -> list[tuple[tuple[str, ...], ...]]:
        return [strategy.results[0].splits for strategy in placeholder_strategies(kind, dims, BOTH, batch)]  # type: ignore[arg-type]

    assert splits("parameter") == [((), ()), (("tp",), ()), ((), ("tp",))]
    assert splits("batch", (0,)) == [(("dp",), ())]
    assert splits("tangent", (0,)) == [(("dp",), ())]
    assert splits("batch") == splits("buffer") == splits("random_key") == [((), ())]


def test_the_signature_of_a_call_tells_apart_what_its_space_depends_on() -> None:
    def product(rows: tuple[int, ...] = (4, 2)) -> Node:
        return mark_batch(on_atoms(aten.mm.default, [(rows, (6,)), ((6,), (3,))], (rows, (3,))), (0,), (), (0,))

    calls = [
        product(),
        product((2, 4)),
        mark_batch(product(), (1,), (), (1,)),
        on_atoms(aten.sum.dim_IntList, [((4,), (6,))], ((4,),), [1]),
        on_atoms(aten.sum.dim_IntList, [((4,), (6,))], ((6,),), [0]),
        on_atoms(aten.mul.Scalar, [((4,),)], ((4,),), 2),
        on_atoms(aten.mul.Scalar, [((4,),)], ((4,),), 2.0),
    ]
    assert len({signature_of(node) for node in calls}) == len(calls)
    assert signature_of(product()) == signature_of(product())
    assert space_of(product()) == space_of(product())


def test_the_signature_of_a_selection_tells_how_what_it_selects_is_reduced() -> None:
    """A logarithm of sums over classes and a part of a tensor, both [4] of three: one may be unreduced, the other may not."""
    logits = instance(torch.ops.autopar.cross_entropy.default, torch.empty(4, 6), torch.empty(4), torch.empty(6))
    parts = instance(aten.split.Tensor, torch.empty(12), 4)
    selected: list[Node] = []
    for producer in (logits, parts):
        producer.meta["val"], DIMS[producer] = tuple(torch.empty(4) for _ in range(3)), (((4,),),) * 3
        node = producer.graph.call_function(operator.getitem, (producer, 0))
        node.meta["val"], DIMS[node] = torch.empty(4), (((4,),),)
        selected.append(node)
    assert [space_of(node) for node in selected][0] != space_of(selected[1])
    assert signature_of(selected[0]) != signature_of(selected[1])


def test_the_signature_of_a_call_tells_zeros_from_other_operands() -> None:
    graph = Graph()
    ids, values = graph.placeholder("ids"), graph.placeholder("values")
    zeros = graph.call_function(aten.zeros.default, ([4, 3],))
    ones = graph.call_function(aten.ones.default, ([4, 3],))
    onto_zeros, onto_ones = (graph.call_function(aten.index_add.default, (start, 0, ids, values)) for start in (zeros, ones))
    ids.meta["val"], values.meta["val"] = torch.zeros(5, dtype=torch.int64), torch.zeros(5, 3)
    DIMS[ids], DIMS[values] = (((5,),),), (((5,), (3,)),)
    for node in (zeros, ones, onto_zeros, onto_ones):
        node.meta["val"], DIMS[node] = torch.zeros(4, 3), (((4,), (3,)),)
    first, second = rule_of(onto_zeros), rule_of(onto_ones)
    assert first is not None and second is not None and first.linear != second.linear
    assert signature_of(onto_zeros) != signature_of(onto_ones)
