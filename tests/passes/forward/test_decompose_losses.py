"""Losses in plain ops: values, gradients, dtypes and corner cases as torch's own."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.frontend.capture import capture
from autopar.ir.keys import SOURCE
from autopar.ir.mesh import virtual_mesh
from autopar.ir.program import Program
from autopar.passes.forward.decompose_losses import DecomposeLosses

Loss = Callable[[Tensor, Tensor], Tensor]


class Scored(nn.Module):
    """Losses of a parameter, so that the gradient of the scores can be asked for."""

    def __init__(self, scores: Tensor, losses: Sequence[Loss]) -> None:
        super().__init__()
        self.scores = nn.Parameter(scores)
        self.losses = tuple(losses)

    def forward(self, target: Tensor) -> tuple[Tensor, ...]:
        return tuple(loss(self.scores, target) for loss in self.losses)


def decomposed(scores: Tensor, target: Tensor, *losses: Loss) -> Program:
    program = capture(Scored(scores, losses), (target,), {}, virtual_mesh(dp=1), outputs="all")
    return DecomposeLosses().apply(program)


def assert_as_torch(scores: Tensor, target: Tensor, *losses: Loss, tolerance: float = 1e-12) -> None:
    """Values, shapes, dtypes and gradients of the decomposed losses are those of `losses`."""
    program = decomposed(scores, target, *losses)
    calls = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert not any("loss" in call or "cross_entropy" in call for call in calls)
    constants = [program.constants[item.name] for item in program.signature.inputs_of("constant")]
    for position, loss in enumerate(losses):
        tensors = [scores.clone().requires_grad_() for _ in range(2)]
        got = program.module()(tensors[0], *constants, target)[position]
        wanted = loss(tensors[1], target)
        claimed = program.results[position].meta["val"]
        assert got.dtype == wanted.dtype == claimed.dtype
        assert got.shape == wanted.shape == claimed.shape
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
        incoming = torch.randn_like(wanted)
        grads = [torch.autograd.grad(value, tensor, incoming)[0] for value, tensor in zip((got, wanted), tensors, strict=True)]
        torch.testing.assert_close(grads[0], grads[1], rtol=tolerance, atol=tolerance, equal_nan=True)


def for_each(function: Callable[..., Tensor], **options: Sequence[object]) -> list[Loss]:
    """`function` under every combination of `options` and every reduction."""
    options = {**options, "reduction": ("mean", "sum", "none")}
    combinations = [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]
    return [functools.partial(function, **chosen) for chosen in combinations]


def scores_and_labels(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    num_classes = shape[0] if len(shape) == 1 else shape[1]
    labels = torch.randint(0, num_classes, () if len(shape) == 1 else (shape[0], *shape[2:]))
    return 3 * torch.randn(shape, dtype=dtype), labels


@pytest.mark.parametrize("shape", [(9, 5), (4, 5, 3), (2, 5, 3, 2)])
def test_cross_entropy(shape: tuple[int, ...]) -> None:
    scores, labels = scores_and_labels(shape)
    labels[labels == 2] = -100
    assert (labels == -100).any() and (labels != -100).any()
    weight = torch.rand(5, dtype=torch.float64)
    assert_as_torch(scores, labels, *for_each(F.cross_entropy, weight=(None, weight), label_smoothing=(0.0, 0.2)))


def test_cross_entropy_with_probabilities() -> None:
    scores, _ = scores_and_labels((4, 5, 3))
    weight, target = torch.rand(5, dtype=torch.float64), torch.rand(4, 5, 3, dtype=torch.float64)
    assert_as_torch(scores, target, *for_each(F.cross_entropy, weight=(None, weight), label_smoothing=(0.0, 0.1)))


def test_a_single_sample() -> None:
    assert_as_torch(*scores_and_labels((7,)), F.cross_entropy)


def test_an_ignored_class_inside_the_range() -> None:
    scores, labels = scores_and_labels((20, 4))
    assert (labels == 3).any()
    assert_as_torch(scores, labels, lambda x, y: F.cross_entropy(x, y, ignore_index=3))


def test_all_ignored_gives_nan_and_no_gradient() -> None:
    scores, labels = scores_and_labels((6, 4))
    labels[:] = -100
    assert decomposed(scores, labels, F.cross_entropy).module()(scores, labels)[0].isnan()
    assert_as_torch(scores, labels, F.cross_entropy)


def test_large_and_infinite_logits() -> None:
    scores, labels = scores_and_labels((6, 4))
    scores *= 1e4
    scores[torch.arange(6), (labels + 1) % 4] = -torch.inf
    assert_as_torch(scores, labels, F.cross_entropy)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtype_of_the_result(dtype: torch.dtype) -> None:
    scores, labels = scores_and_labels((300, 5), dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert_as_torch(scores, labels, F.cross_entropy, tolerance=tolerance)
    assert_as_torch(100 * scores, torch.randn_like(scores), F.mse_loss, tolerance=tolerance)


def test_the_count_is_a_node_of_its_own() -> None:
    scores, labels = scores_and_labels((6, 4))
    loss = decomposed(scores, labels, F.cross_entropy).results[0]
    assert loss.target is torch.ops.aten.div.Tensor
    total, count = loss.args
    assert total.target is count.target is torch.ops.aten.sum.default  # type: ignore[union-attr]
    assert count.meta["val"].dtype == torch.int64  # type: ignore[union-attr]


def test_new_nodes_know_their_source() -> None:
    program = decomposed(*scores_and_labels((6, 4)), F.cross_entropy)
    assert all(SOURCE[node].line > 0 for node in program.graph.nodes if node.op == "call_function")


@pytest.mark.parametrize("shape", [(9, 5), (4, 5, 3), (2, 5, 3, 2)])
def test_nll(shape: tuple[int, ...]) -> None:
    scores, labels = scores_and_labels(shape)
    labels[labels == 2] = -100
    assert_as_torch(scores.log_softmax(1), labels, *for_each(F.nll_loss, weight=(None, torch.rand(5, dtype=torch.float64))))


def test_distances() -> None:
    torch.manual_seed(0)
    scores, target = torch.randn(6, 5, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64)
    target[0] = scores[0]
    losses = (
        for_each(F.mse_loss) + for_each(F.l1_loss) + for_each(F.smooth_l1_loss, beta=(0.7, 0.0)) + for_each(F.huber_loss, delta=(0.7, 2.0))
    )
    assert_as_torch(scores, target, *losses)


def test_binary_cross_entropy_with_logits() -> None:
    torch.manual_seed(0)
    scores, target = 20 * torch.randn(6, 5, dtype=torch.float64), torch.rand(6, 5, dtype=torch.float64)
    scores[0] = 0.0
    weight, positive = torch.rand(6, 5, dtype=torch.float64), 3 * torch.rand(5, dtype=torch.float64)
    assert_as_torch(scores, target, *for_each(F.binary_cross_entropy_with_logits, weight=(None, weight), pos_weight=(None, positive)))


def test_soft_margin() -> None:
    torch.manual_seed(0)
    scores, target = 20 * torch.randn(6, 5, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64).sign()
    scores[0] = 0.0
    assert_as_torch(scores, target, *for_each(F.soft_margin_loss))


def test_the_given_program_is_left_as_it_was() -> None:
    scores, labels = scores_and_labels((6, 4))
    program = capture(Scored(scores, [F.cross_entropy]), (labels,), {}, virtual_mesh(dp=1))
    before = str(program.graph)
    DecomposeLosses().apply(program)
    assert str(program.graph) == before
