"""What one rank calls: literals in local shapes, offset ranges, tables split over their rows."""

import pytest
import torch
from torch.fx import Graph, Interpreter, Node

from autopar.ir.keys import DIMS
from autopar.ir.mesh import Mesh
from autopar.ir.program import operands
from autopar.ir.sharding import Dims, Sharding, Strategy
from autopar.ops.localise import LocalBuilder, localise
from autopar.ops.strategies import factors_of, strategies_of
from autopar.testing.prove import instance, prove, prove_strategy

aten = torch.ops.aten
TP = Mesh((("tp", 2),))


def local(node: Node, mesh: Mesh, name: str) -> tuple[LocalBuilder, Node]:
    """The local graph of `node` by the strategy called `name`."""
    strategy = next(found for found in strategies_of(node, mesh) if str(found) == name)
    return by(node, mesh, strategy)


def by(node: Node, mesh: Mesh, strategy: Strategy) -> tuple[LocalBuilder, Node]:
    builder = LocalBuilder(Graph())
    inputs = []
    for operand, sharding in zip(operands(node), strategy.operands, strict=True):
        shape = sharding.local_shape(DIMS[operand][0], mesh)
        inputs.append(builder.placeholder("x", shape, operand.meta["val"].dtype))
    return builder, localise(node, strategy, tuple(inputs), builder, mesh)


def calls(builder: LocalBuilder) -> list[str]:
    return [str(node.target).removeprefix("aten.") for node in builder.graph.nodes if node.op == "call_function"]


def test_a_view_reshapes_to_the_local_shape() -> None:
    builder, node = local(instance(aten.view.default, torch.empty(4, 6), [4, 6, 1]), TP, "tp:a0")
    assert node.args[1] == [2, 6, 1] and tuple(node.meta["val"].shape) == (2, 6, 1)
    assert calls(builder) == ["reshape.default"]


def test_literal_shapes_become_local() -> None:
    _, node = local(instance(aten.expand.default, torch.empty(1, 6), [4, -1]), TP, "tp:d0")
    assert node.args[1] == [2, 6]
    _, node = local(instance(aten.full.default, [4, 6], 1.0), TP, "tp:d1")
    assert node.args[0] == [4, 3]
    _, node = local(instance(aten.select_backward.default, torch.empty(4, 6), [4, 3, 6], 1, 2), TP, "tp:d0")
    assert node.args[1] == [2, 3, 6]


def test_everything_else_is_the_same_call() -> None:
    source = instance(aten.add.Tensor, torch.empty(4, 6), torch.empty(4, 6), alpha=2)
    builder, node = local(source, TP, "tp:d0")
    assert calls(builder) == ["add.Tensor"] and node.kwargs == {"alpha": 2} and not builder.coordinates


def test_replicated_ranges_and_tables_need_no_coordinate() -> None:
    ids = torch.empty(4, dtype=torch.int64)
    for source in (instance(aten.arange.default, 4), instance(aten.embedding.default, torch.empty(8, 6), ids)):
        builder, _ = local(source, TP, "replicated")
        assert not builder.coordinates and len(calls(builder)) == 1


def with_dims(node: Node, dims: Dims) -> Node:
    DIMS[node] = (dims,)
    return node


def test_a_range_over_several_atoms_counts_logical_positions() -> None:
    """24 = (2, 3, 4) with the last atom split: rank 1 holds 2, 3 of every 4."""
    node = with_dims(instance(aten.arange.default, 24), ((2, 3, 4),))
    strategy = Strategy((), (Sharding(((), (), ("tp",))),))
    builder, result = by(node, TP, strategy)
    builder.graph.output(result)
    (part,) = [Interpreter(torch.nn.Module(), graph=builder.graph).run(torch.tensor(1))]
    assert part.tolist() == [4 * group + offset for group in range(6) for offset in (2, 3)]


def test_ranges_over_atoms_are_exact_on_every_mesh() -> None:
    node = with_dims(instance(aten.arange.start_step, 3, 75, 3), ((2, 3, 4),))
    assert len(factors_of(node)) == 3 and prove(node) == []
    mesh = Mesh((("x", 2), ("y", 2)))
    assert all(prove_strategy(node, strategy, mesh) == [] for strategy in strategies_of(node, mesh))


def test_tables_split_over_several_atoms_look_up_their_own_rows() -> None:
    ids = torch.empty(5, dtype=torch.int64)
    forward = instance(aten.embedding.default, torch.empty(24, 6), ids)
    DIMS[operands(forward)[0]] = (((4, 6), (6,)),)
    backward = instance(aten.embedding_dense_backward.default, torch.empty(5, 6), ids, 24, 7, False)
    DIMS[backward] = (((4, 6), (6,)),)
    mesh = Mesh((("x", 2), ("y", 2)))
    for node in (forward, backward):
        rows = [strategy for strategy in strategies_of(node, mesh) if "v." in str(strategy)]
        assert len(rows) > 8
        assert [failure for strategy in rows for failure in prove_strategy(node, strategy, mesh)] == []


@pytest.mark.parametrize("row", [-1, 24, 31])
def test_an_id_that_no_rank_holds_is_refused_on_every_rank(row: int) -> None:
    forward = instance(aten.embedding.default, torch.empty(24, 6), torch.empty(5, dtype=torch.int64))
    DIMS[operands(forward)[0]] = (((4, 6), (6,)),)
    ids = torch.tensor([0, 7, 23, 12, row])
    split = [each for each in strategies_of(forward, TP) if "v." in str(each)]
    assert split
    for strategy in split:
        builder, result = by(forward, TP, strategy)
        builder.graph.output(result)
        for rank in (0, 1):
            with pytest.raises(IndexError, match="out of range"):
                Interpreter(torch.nn.Module(), graph=builder.graph).run(torch.zeros(12, 6), ids, torch.tensor(rank))


def test_gathers_and_scatters_over_several_atoms_meet_the_ids_that_are_there() -> None:
    scores, ids = torch.empty(5, 24), torch.empty(5, 3, dtype=torch.int64)
    forward = instance(aten.gather.default, scores, -1, ids)
    DIMS[operands(forward)[0]] = (((5,), (4, 6)),)
    backward = instance(aten.scatter_add.default, scores, -1, ids, torch.empty(5, 3))
    for node in (operands(backward)[0], backward):
        DIMS[node] = (((5,), (4, 6)),)
    mesh = Mesh((("x", 2), ("y", 2)))
    for node in (forward, backward):
        split = [strategy for strategy in strategies_of(node, mesh) if "v." in str(strategy)]
        assert len(split) > 3
        assert [failure for strategy in split for failure in prove_strategy(node, strategy, mesh)] == []


def test_coordinates_are_inputs_made_once_per_tuple_of_axes() -> None:
    builder = LocalBuilder(Graph())
    x = builder.placeholder("x", (4,), torch.float32)
    builder.call(aten.exp.default, x)
    first, second = builder.coordinate(("tp.0", "tp.1")), builder.coordinate(("tp.0", "tp.1"))
    other = builder.coordinate(("tp.0",))
    assert first is second and first.name == "coordinate_tp_0_tp_1" and first.meta["val"].dtype == torch.int64
    assert [node.op for node in builder.graph.nodes] == ["placeholder"] * 3 + ["call_function"]
    assert list(builder.coordinates.values()) == [first, other]


def test_layer_norm_backward_reads_contiguous_statistics_only() -> None:
    x, statistics, weight = torch.empty(2, 4, 6), torch.empty(2, 4, 1), torch.empty(6)
    node = instance(aten.native_layer_norm_backward.default, x, x, [6], statistics, statistics, weight, weight, [True] * 3)
    builder = LocalBuilder(Graph())
    inputs = [builder.placeholder("x", operand.meta["val"].shape, torch.float32) for operand in operands(node)]
    strided = builder.call(aten.transpose.int, builder.placeholder("mean", (4, 2, 1), torch.float32), 0, 1)
    strategy = strategies_of(node, TP)[0]
    result = localise(node, strategy, (*inputs[:2], strided, *inputs[3:]), builder, TP)
    mean = result.args[3]
    assert isinstance(mean, Node) and mean.target is aten.clone.default and mean.meta["val"].is_contiguous()


def test_squeeze_keeps_a_dim_that_is_1_only_on_a_rank() -> None:
    node = instance(aten.squeeze.default, torch.empty(2, 1, 6))
    _, result = local(node, TP, "tp:a0")
    assert tuple(result.meta["val"].shape) == (1, 6)


def test_a_group_norm_is_right_for_operands_of_any_strides() -> None:
    """On CPU its kernels refuse strides that are not contiguous (forward), or read past them without a word (backward)."""
    x, gradient, weight = torch.randn(2, 4, 3), torch.randn(3, 4, 2), torch.randn(4)
    _, mean, deviation = aten.native_group_norm.default(x, weight, weight, 2, 4, 3, 2, 0.1)
    forward = instance(aten.native_group_norm.default, x, weight, weight, 2, 4, 3, 2, 0.1)
    backward = instance(aten.native_group_norm_backward.default, x, x, mean, deviation, weight, 2, 4, 3, 2, [True, True, True])
    for source, others in ((forward, (weight, weight)), (backward, (x, mean, deviation, weight))):
        builder = LocalBuilder(Graph())
        turned = builder.call(aten.permute.default, builder.placeholder("x", (3, 4, 2), torch.float32), [2, 1, 0])
        rest = tuple(builder.placeholder("y", value.shape, value.dtype) for value in others)
        (strategy,) = (found for found in strategies_of(source, TP) if str(found) == "replicated")
        builder.graph.output(localise(source, strategy, (turned, *rest), builder, TP))
        got = Interpreter(torch.nn.Module(), graph=builder.graph).run(gradient, *others)
        contiguous = gradient.permute(2, 1, 0).contiguous()
        wanted = source.target(contiguous, *others, *source.args[1 + len(others) :])
        for one, other in zip(got, wanted, strict=True):
            assert torch.allclose(one, other, atol=1e-6)
