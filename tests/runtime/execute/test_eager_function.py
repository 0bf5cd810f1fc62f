from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node, symbolic_trace

import autopar
from autopar.kernels.registration import IMPLEMENTATIONS
from autopar.runtime.execute.eager_function import DIRECT, EagerFunction, simplified
from tests.support.graphs import traced
from tests.support.models.zoo import ZOO

aten = torch.ops.aten
reshape, view, turn = aten.reshape.default, aten.view.default, aten.t.default
NAMES = {function: op for op, function in DIRECT.items() if function is not torch.sum}


def ops_of(function: Callable[..., Any], *inputs: Tensor) -> list[str]:
    """What is left of `function`, the values of which must not change."""
    module = traced(function, *inputs).module()
    return ops_left(module, *inputs)


def ops_of_calls(function: Callable[[Tensor], Any], x: Tensor) -> list[str]:
    """Likewise of a function in whole ops: the other tracing takes `reshape` apart."""
    module = symbolic_trace(function)
    Values(module).run(x)
    return ops_left(module, x)


class Values(Interpreter):
    """Writes the value of each node beside it."""

    def run_node(self, n: Node) -> Any:
        n.meta["val"] = super().run_node(n)
        return n.meta["val"]


def ops_left(module: GraphModule, *inputs: Tensor) -> list[str]:
    before = str(module.graph)
    with torch.no_grad():
        for ours, theirs in zip(EagerFunction(module).run([*inputs], {}), module(*inputs), strict=True):
            torch.testing.assert_close(ours, theirs)
    assert str(module.graph) == before
    return [str(NAMES.get(node.target, node.target)) for node in simplified(module).graph.nodes if node.op == "call_function"]


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 6)


def test_reorders_that_undo_each_other_are_gone(x: Tensor) -> None:
    assert ops_of(lambda x: aten.neg(aten.t(aten.t(x))), x) == ["aten.neg.default"]
    assert ops_of(lambda x: aten.neg(aten.transpose(aten.transpose(x, 0, 1), -1, 0)), x) == ["aten.neg.default"]
    y = torch.randn(2, 3, 4)
    assert ops_of(lambda y: aten.neg(aten.permute(aten.permute(y, [1, 2, 0]), [2, 0, 1])), y) == ["aten.neg.default"]
    assert ops_of(lambda y: aten.neg(aten.permute(aten.permute(y, [1, 2, 0]), [1, 2, 0])), y)[:2] == ["aten.permute.default"] * 2
    assert ops_of(lambda y: aten.neg(aten.transpose(aten.transpose(y, 0, 1), 1, 2)), y)[:2] == ["aten.transpose.int"] * 2
    assert ops_of(lambda y: aten.neg(aten.permute(aten.transpose(y, 0, 2), [2, 1, 0])), y) == ["aten.neg.default"]
    one = torch.randn(3)
    assert ops_of(lambda one: aten.neg(aten.t(aten.t(one))), one) == ["aten.neg.default"]


def test_one_reshape_does_for_a_chain(x: Tensor) -> None:
    def chain(x: Tensor) -> tuple[Tensor]:
        return (reshape(view(reshape(x, [24]), [2, 12]), [3, 8]),)

    assert ops_of_calls(chain, x) == ["aten.reshape.default"]
    # The first copies; by itself the second could not look at what is no row after row.
    assert ops_of_calls(lambda x: (view(reshape(turn(x), [24]), [3, 8]),), x) == ["aten.t.default", "aten.reshape.default"]


def test_what_others_read_is_copied_once(x: Tensor) -> None:
    def two(x: Tensor) -> tuple[Tensor, Tensor]:
        flat = reshape(turn(x), [24])
        return view(flat, [3, 8]), flat

    assert ops_of_calls(two, x) == ["aten.t.default", "aten.reshape.default", "aten.view.default"]


def test_a_view_in_the_same_shape_is_gone(x: Tensor) -> None:
    assert ops_of(lambda x: (aten.reshape(aten.neg(x), [4, 6]), aten.expand(aten.exp(x), [-1, 6])), x) == [
        "aten.neg.default",
        "aten.exp.default",
    ]
    assert ops_of(lambda x: aten.neg(aten.expand(x, [2, 4, 6])), x) == ["aten.expand.default", "aten.neg.default"]


def test_results_that_nobody_reads_are_gone(x: Tensor) -> None:
    w = torch.ones(6)
    names = ops_of(lambda x, w: aten.native_layer_norm(x, [6], w, None, 1e-5)[0], x, w)
    assert names == ["aten.native_layer_norm.default", "<built-in function getitem>"]


@pytest.mark.parametrize("swapped", [False, True])
def test_a_product_and_its_bias_are_one_op(x: Tensor, swapped: bool) -> None:
    def linear(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        product = aten.mm(x, aten.t(w))
        return aten.add(bias, product) if swapped else aten.add(product, bias)

    assert ops_of(linear, x, torch.randn(5, 6), torch.randn(5)) == [str(torch.nn.functional.linear)]


def test_a_product_with_a_transposed_matrix_is_linear(x: Tensor) -> None:
    linear = str(torch.nn.functional.linear)
    assert ops_of(lambda x, w: aten.mm(x, aten.t(w)), x, torch.randn(5, 6)) == [linear]
    assert ops_of(lambda x, w: aten.mm(aten.t(x), w), x, torch.randn(4, 5)) == ["aten.t.default", "aten.mm.default"]
    # A whole matrix that is added is no bias.
    assert linear not in ops_of(lambda x, w, y: aten.addmm(y, x, aten.t(w)), x, torch.randn(5, 6), torch.randn(4, 5))


def test_an_op_of_ours_is_called_past_the_dispatcher(x: Tensor) -> None:
    op = torch.ops.autopar.norm.default
    options = {"eps": 1e-5, "centred": True}
    assert ops_of_calls(lambda x: op(x, None, None, **options), x) == [str(IMPLEMENTATIONS[op])]


@pytest.mark.parametrize(
    "add",
    [
        lambda product, bias: aten.add(product, bias, alpha=2),
        lambda product, bias: aten.add(product, bias[:1]),
        lambda product, bias: aten.add(product, bias.unsqueeze(1)),
        lambda product, bias: aten.add(product, bias.double()),
        lambda product, bias: aten.add(product, 1.0),
        lambda product, bias: (aten.add(product, bias), product),
        lambda product, bias: aten.add(product, product),
        lambda product, bias: aten.add(product, bias.expand(3, 4, 4)),
    ],
    ids=["scaled", "one number", "a column", "another dtype", "a number", "read twice", "itself", "more dims"],
)
def test_what_is_no_bias_is_added_by_itself(x: Tensor, add: Callable[..., Any]) -> None:
    names = ops_of(lambda x, w, bias: add(aten.mm(x, w), bias), x, torch.randn(6, 4), torch.randn(4))
    assert "aten.add.Tensor" in names and "aten.addmm.default" not in names


def test_a_graph_that_writes_into_operands_keeps_its_views(x: Tensor) -> None:
    graph = Graph()
    flat = graph.call_function(aten.reshape.default, (graph.call_function(aten.clone.default, (graph.placeholder("x"),)), [24]))
    flat.meta["val"] = torch.empty(24)
    same = graph.call_function(aten.view.default, (flat, [24]))
    same.meta["val"] = torch.empty(24)
    graph.call_function(aten.mul_.Tensor, (same, 2.0))
    graph.output((flat,))
    assert ops_left(GraphModule({}, graph), x)[1:] == ["aten.reshape.default", "aten.view.default", "aten.mul_.Tensor"]


A, B, V, W = (torch.rand(shape) + 0.5 for shape in ((3, 4), (3, 4), (4,), (4, 3)))
C, D = torch.rand(2, 3, 4), torch.rand(2, 4, 3)
ARGUMENTS: dict[Any, tuple[Any, dict[str, Any]]] = {
    aten.add.Tensor: ((A, 2), {"alpha": 3}),
    aten.addmm.default: ((V, A, torch.rand(4, 4)), {}),
    aten.amax.default: ((A, [-1], True), {}),
    aten.bmm.default: ((C, D), {}),
    aten.cat.default: (([A, B], 1), {}),
    aten.clone.default: ((A,), {"memory_format": torch.contiguous_format}),
    aten.div.Tensor: ((A, 3), {}),
    aten.embedding.default: ((W, torch.tensor([3, 0, 3]), 1), {}),
    aten.exp.default: ((A,), {}),
    aten.expand.default: ((A, [2, -1, 4]), {}),
    aten.gelu.default: ((A,), {"approximate": "tanh"}),
    aten.mean.dim: ((A, [0], True), {"dtype": torch.float64}),
    aten.mm.default: ((A, W), {}),
    aten.mul.Tensor: ((A, B.double()), {}),
    aten.native_layer_norm.default: ((A, [4], None, V, 1e-3), {}),
    aten.neg.default: ((A,), {}),
    aten.permute.default: ((C, [2, 0, 1]), {}),
    aten.pow.Tensor_Scalar: ((A, 2), {}),
    aten.reshape.default: ((C, [-1, 4]), {}),
    aten.rsqrt.default: ((A,), {}),
    aten.select.int: ((C, -2, 1), {}),
    aten.sigmoid.default: ((A,), {}),
    aten.sqrt.default: ((A,), {}),
    aten.squeeze.dim: ((A[:1], 0), {}),
    aten.stack.default: (([A, B], 1), {}),
    aten.sub.Tensor: ((A, B), {"alpha": 2}),
    aten.sum.default: ((A,), {"dtype": torch.float64}),
    aten.sum.dim_IntList: ((A, [0], True), {"dtype": torch.float64}),
    aten.t.default: ((A,), {}),
    aten.tanh.default: ((A,), {}),
    aten.transpose.int: ((C, 0, -1), {}),
    aten.unsqueeze.default: ((A, 1), {}),
    aten.view.default: ((C, [6, -1]), {}),
    aten.where.self: ((A > 1, A, B.double()), {}),
}


@pytest.mark.parametrize("op", DIRECT, ids=str)
def test_torchs_own_function_is_the_op(op: Any) -> None:
    args, kwargs = ARGUMENTS[op]
    ours, theirs = DIRECT[op](*args, **kwargs), op(*args, **kwargs)
    for one, other in zip(*((found,) if isinstance(found, Tensor) else found for found in (ours, theirs)), strict=True):
        assert torch.equal(one, other) and (one.dtype, one.stride()) == (other.dtype, other.stride())


def test_results_are_tensors_like_any_other(x: Tensor) -> None:
    module = traced(lambda x: (aten.neg(x), aten.t(x)), x).module()
    with torch.no_grad():
        negated, turned = EagerFunction(module).run([x], {})
        version = x._version
        turned.add_(1)
    assert x._version == version + 1 and turned._base is x
    assert not negated.requires_grad
    negated.requires_grad_().sum().backward()
    assert negated.grad is not None


@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_every_fragment_of_a_model_computes_what_it_did(name: str) -> None:
    torch.manual_seed(0)
    case = ZOO[name]()
    parallel = autopar.compile(case.model, autopar.virtual_mesh(dp=2, tp=2), example_inputs=case.batch, backend="eager")
    fewer = 0
    for fragment in parallel.compiled.schedule.fragments.values():
        inputs = [_like(node.meta["val"]) for node in fragment.module.graph.find_nodes(op="placeholder")]
        with torch.no_grad():
            for ours, theirs in zip(EagerFunction(fragment.module).run([*inputs], {}), fragment.module(*inputs), strict=True):
                torch.testing.assert_close(ours, theirs, equal_nan=True)
        fewer += len(fragment.module.graph.nodes) - len(simplified(fragment.module).graph.nodes)
    assert fewer > 20


def _like(value: Tensor) -> Tensor:
    made = torch.rand(value.shape) if value.is_floating_point() else torch.zeros(value.shape)
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(made)
