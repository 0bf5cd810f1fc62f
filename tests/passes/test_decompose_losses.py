"""Losses in plain ops: values, gradients, dtypes and corner cases as torch's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import capture
from autopar.mesh import virtual_mesh
from autopar.passes.decompose_losses import DecomposeLosses
from autopar.program import Program

Loss = Callable[[Tensor, Tensor], Tensor]


class Scored(nn.Module):
    """A loss of a parameter, so that the gradient of the scores can be asked for."""

    def __init__(self, scores: Tensor, loss: Loss) -> None:
        super().__init__()
        self.scores = nn.Parameter(scores)
        self.loss = loss

    def forward(self, target: Tensor) -> Tensor:
        return self.loss(self.scores, target)


def decomposed(scores: Tensor, target: Tensor, loss: Loss) -> Program:
    program = capture(Scored(scores, loss), (target,), {}, virtual_mesh(dp=1), outputs="all")
    return DecomposeLosses().apply(program)


def assert_as_torch(scores: Tensor, target: Tensor, loss: Loss, tolerance: float = 1e-12) -> None:
    program = decomposed(scores, target, loss)
    left = [str(node.target) for node in program.graph.nodes if "loss" in str(node.target) or "cross_entropy" in str(node.target)]
    assert not left
    tensors = [scores.clone().requires_grad_() for _ in range(2)]
    constants = [program.constants[item.name] for item in program.signature.inputs_of("constant")]
    (got,) = program.module()(tensors[0], *constants, target)
    wanted = loss(tensors[1], target)
    assert got.dtype == wanted.dtype == program.results[0].meta["val"].dtype
    assert got.shape == wanted.shape == program.results[0].meta["val"].shape
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
    incoming = torch.randn_like(wanted)
    grads = [torch.autograd.grad(value, tensor, incoming)[0] for value, tensor in zip((got, wanted), tensors, strict=True)]
    torch.testing.assert_close(grads[0], grads[1], rtol=tolerance, atol=tolerance, equal_nan=True)


def scores_and_labels(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    num_classes = shape[0] if len(shape) == 1 else shape[1]
    labels = torch.randint(0, num_classes, () if len(shape) == 1 else (shape[0], *shape[2:]))
    return 3 * torch.randn(shape, dtype=dtype), labels


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(9, 5), (4, 5, 3), (2, 5, 3, 2)])
def test_cross_entropy(shape: tuple[int, ...], weighted: bool, smoothing: float, reduction: str) -> None:
    scores, labels = scores_and_labels(shape)
    labels[labels == 2] = -100
    weight = torch.rand(5, dtype=torch.float64) if weighted else None
    assert (labels == -100).any() and (labels != -100).any()
    assert_as_torch(scores, labels, lambda x, y: F.cross_entropy(x, y, weight, reduction=reduction, label_smoothing=smoothing))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_with_probabilities(weighted: bool, reduction: str) -> None:
    scores, _ = scores_and_labels((4, 5, 3))
    weight = torch.rand(5, dtype=torch.float64) if weighted else None
    target = torch.rand(4, 5, 3, dtype=torch.float64)
    assert_as_torch(scores, target, lambda x, y: F.cross_entropy(x, y, weight, reduction=reduction, label_smoothing=0.1))


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
    assert_as_torch(scores, labels, F.cross_entropy, tolerance)
    assert_as_torch(100 * scores, torch.randn_like(scores), F.mse_loss, tolerance)


def test_the_count_is_a_node_of_its_own() -> None:
    scores, labels = scores_and_labels((6, 4))
    loss = decomposed(scores, labels, F.cross_entropy).results[0]
    assert loss.target is torch.ops.aten.div.Tensor
    total, count = loss.args
    assert total.target is count.target is torch.ops.aten.sum.default  # type: ignore[union-attr]
    assert count.meta["val"].dtype == torch.int64  # type: ignore[union-attr]


def test_new_nodes_know_their_source() -> None:
    from autopar.keys import SOURCE

    program = decomposed(*scores_and_labels((6, 4)), F.cross_entropy)
    assert all(SOURCE[node].line > 0 for node in program.graph.nodes if node.op == "call_function")


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(9, 5), (4, 5, 3), (2, 5, 3, 2)])
def test_nll(shape: tuple[int, ...], reduction: str) -> None:
    scores, labels = scores_and_labels(shape)
    labels[labels == 2] = -100
    weight = torch.rand(5, dtype=torch.float64)
    assert_as_torch(scores.log_softmax(1), labels, lambda x, y: F.nll_loss(x, y, weight, reduction=reduction))
    assert_as_torch(scores.log_softmax(1), labels, lambda x, y: F.nll_loss(x, y, reduction=reduction))


DISTANCES: dict[str, Callable[..., Tensor]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth": lambda x, y, reduction: F.smooth_l1_loss(x, y, beta=0.7, reduction=reduction),
    "smooth at 0": lambda x, y, reduction: F.smooth_l1_loss(x, y, beta=0.0, reduction=reduction),
    "huber": lambda x, y, reduction: F.huber_loss(x, y, delta=0.7, reduction=reduction),
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", sorted(DISTANCES))
def test_distances(name: str, reduction: str) -> None:
    torch.manual_seed(0)
    scores, target = torch.randn(6, 5, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64)
    target[0] = scores[0]
    assert_as_torch(scores, target, lambda x, y: DISTANCES[name](x, y, reduction=reduction))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_binary_cross_entropy_with_logits(weighted: bool, reduction: str) -> None:
    torch.manual_seed(0)
    scores, target = 20 * torch.randn(6, 5, dtype=torch.float64), torch.rand(6, 5, dtype=torch.float64)
    scores[0] = 0.0
    weight = torch.rand(6, 5, dtype=torch.float64) if weighted else None
    positive = 3 * torch.rand(5, dtype=torch.float64) if weighted else None
    assert_as_torch(
        scores, target, lambda x, y: F.binary_cross_entropy_with_logits(x, y, weight, pos_weight=positive, reduction=reduction)
    )


def test_the_given_program_is_left_as_it_was() -> None:
    scores, labels = scores_and_labels((6, 4))
    program = capture(Scored(scores, F.cross_entropy), (labels,), {}, virtual_mesh(dp=1))
    before = str(program.graph)
    DecomposeLosses().apply(program)
    assert str(program.graph) == before
