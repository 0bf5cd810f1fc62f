"""Ways to write cross entropy become one op, with the same values, dtypes and gradients; near misses stay, each with its reason."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.frontend.capture import capture
from autopar.ir.fusion import FusionDecision
from autopar.ir.mesh import virtual_mesh
from autopar.ir.program import Program
from autopar.kernels.cross_entropy import cross_entropy
from autopar.passes.forward.decompose_indices import DecomposeIndices
from autopar.passes.forward.fuse_cross_entropy import FuseCrossEntropy

Loss = Callable[[Tensor, Tensor], Tensor]
CLASSES = 7


class Scored(nn.Module):
    def __init__(self, scores: Tensor, loss: Loss) -> None:
        super().__init__()
        self.scores = nn.Parameter(scores)
        self.loss = loss

    def forward(self, labels: Tensor) -> Tensor:
        return self.loss(self.scores, labels)


def fused(loss: Loss, scores: Tensor, labels: Tensor) -> tuple[FusionDecision, Program]:
    program = DecomposeIndices().apply(capture(Scored(scores, loss), (labels,), {}, virtual_mesh(dp=1), outputs="all"))
    decision = FuseCrossEntropy().decide(program)
    return decision, FuseCrossEntropy().apply(program, decision)


def run(program: Program, scores: Tensor, labels: Tensor) -> Tensor:
    constants = [program.constants[item.name] for item in program.signature.inputs_of("constant")]
    return program.module()(scores, *constants, labels)[0]


def rows(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0])


def wider(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def masked(x: Tensor) -> Tensor:
    x[:, 5:] = -30.0
    return x


def written_after(x: Tensor, labels: Tensor) -> Tensor:
    loss = F.nll_loss(x.log_softmax(-1), labels)
    x.zero_()
    return loss + x.sum()


WEIGHT = torch.tensor([0.5, 2.0, 1.0, 0.1, 3.0, 1.0, 0.7], dtype=torch.float64)
FORMS: dict[str, Loss] = {
    "mean": F.cross_entropy,
    "sum": functools.partial(F.cross_entropy, reduction="sum"),
    "none": functools.partial(F.cross_entropy, reduction="none"),
    "smooth": functools.partial(F.cross_entropy, label_smoothing=0.2),
    "ignored class": lambda x, y: F.cross_entropy(x, y, ignore_index=3),
    "weights": lambda x, y: F.cross_entropy(x, y, weight=WEIGHT.to(x.dtype)),
    "made wider": lambda x, y: F.cross_entropy(x.float() if x.dtype == torch.bfloat16 else x.double(), y),
    "written before": lambda x, y: F.cross_entropy(masked(x.clone()), y),
    "a log-softmax of a log-softmax": lambda x, y: F.cross_entropy(x.log_softmax(-1), y),
    "a log-softmax over rows": lambda x, y: F.cross_entropy(x.log_softmax(0), y),
    "classes moved to dim 1": lambda x, y: F.cross_entropy(x.view(2, 6, CLASSES).transpose(1, 2), y.view(2, 6), label_smoothing=0.1),
    "moved of as many positions": lambda x, y: F.cross_entropy(x[:7].view(1, 7, CLASSES).transpose(-2, -1).to(wider(x)), y[:7].view(1, 7)),
    "permuted images": lambda x, y: F.cross_entropy(
        x.view(2, 2, 3, CLASSES).permute(0, 3, 1, 2).to(wider(x)), y.view(2, 2, 3), reduction="none"
    ),
    "nll of a log-softmax, moved": lambda x, y: F.nll_loss(x.view(2, 6, CLASSES).transpose(-1, -2).log_softmax(1), y.view(2, 6)),
    "nll of a log-softmax": lambda x, y: F.nll_loss(F.log_softmax(x, -1), y),
    "nll of a log-softmax by dim 1, a sum": lambda x, y: F.nll_loss(x.log_softmax(1), y, reduction="sum"),
    "nll of a wide log-softmax": lambda x, y: F.nll_loss(F.log_softmax(x, -1, dtype=wider(x)), y),
    "gathered": lambda x, y: -x.log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1).mean(),
    "gathered, kept": lambda x, y: x.log_softmax(-1).gather(1, y[:, None]).sum(),
    "indexed": lambda x, y: -x.log_softmax(-1)[rows(x), y].mean(),
    "the softmax used elsewhere, too": lambda x, y: F.nll_loss(x.log_softmax(-1), y) + x.log_softmax(-1).exp().square().sum(),
}
NEAR_MISSES: dict[str, tuple[Loss, str]] = {
    "probabilities": (lambda x, y: F.cross_entropy(x, F.one_hot(y, CLASSES).to(x.dtype)), "targets are probabilities"),
    "smooth weights": (lambda x, y: F.cross_entropy(x, y, weight=WEIGHT, label_smoothing=0.1), "smoothing sums them"),
    "classes inside": (lambda x, y: F.cross_entropy(x[:6].view(2, 3, 7)[:, :, :3] + 0.0, y[:6].view(2, 3) % 3), "classes are dim 1 of 3"),
    "a position of each class": (
        lambda x, y: x[:9].view(3, 3, 7).transpose(1, 2).log_softmax(1).gather(1, y[:3].view(3, 1, 1).expand(3, 7, 1) % 3).sum(),
        "classes are dim 1 of 3",
    ),
    "positions turned round": (
        lambda x, y: F.cross_entropy(x.view(2, 2, 3, CLASSES).permute(0, 3, 2, 1), y.view(2, 2, 3).mT),
        "classes are dim 1 of 4",
    ),
    "the softmax over rows": (lambda x, y: x.log_softmax(0).gather(-1, y[:, None]).sum(), "the softmax is over dim 0"),
    "two of a row": (lambda x, y: x.log_softmax(-1).gather(-1, torch.stack((y, y), 1)).sum(), "not one class a row"),
    "a permuted row": (lambda x, y: -x.log_softmax(-1)[rows(x).flip(0), y].mean(), "one label in each row"),
    "the loss takes another dim": (
        lambda x, y: F.nll_loss(F.log_softmax(x[:6].view(2, 3, 7)[:, :, :3], -1), y[:6].view(2, 3) % 3),
        "takes dim 1 for the classes, and the softmax is over dim 2",
    ),
    "the softmax over positions": (
        lambda x, y: F.cross_entropy(F.log_softmax(x[:6].view(2, 3, 7)[:, :, :3], -1), y[:6].view(2, 3) % 3),
        "classes are dim 1 of 3",
    ),
    "written after it was made wider": (lambda x, y: F.cross_entropy(masked(x.to(torch.float64, copy=True)), y), "writes into its logits"),
    "written after the loss": (lambda x, y: written_after(x.clone(), y), "writes into its logits"),
    "whole rows": (lambda x, y: x.log_softmax(-1)[y].sum(), "one label in each row"),
}


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return 3 * torch.randn(12, CLASSES, dtype=dtype), torch.randint(0, CLASSES, (12,))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str, dtype: torch.dtype) -> None:
    scores, labels = inputs(dtype)
    if name in ("mean", "sum", "none", "smooth", "weights"):
        labels[::3] = -100
    loss = FORMS[name]
    decision, program = fused(loss, scores, labels)
    assert str(decision).startswith("cross entropy at test_fuse_cross_entropy.py:") and not decision.refused
    called = [node for node in program.graph.nodes if node.target is cross_entropy]
    assert len(called) == 1 and called[0].args[0].meta["val"].dtype == dtype, "the logits are read as they were"
    tensors = [scores.clone().requires_grad_() for _ in range(2)]
    got, wanted = run(program, tensors[0], labels), loss(tensors[1], labels)
    claimed = program.results[0].meta["val"]
    assert got.dtype == wanted.dtype == claimed.dtype and got.shape == wanted.shape == claimed.shape
    tolerance = 1e-12 if dtype == torch.float64 else 2e-2
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
    arriving = torch.randn_like(wanted)
    gradients = [torch.autograd.grad(value, tensor, arriving)[0] for value, tensor in zip((got, wanted), tensors, strict=True)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name: str) -> None:
    loss, reason = NEAR_MISSES[name]
    decision, program = fused(loss, *inputs())
    assert not decision.fused and reason in str(decision.refused[0])
    assert not any(node.target is cross_entropy for node in program.graph.nodes)


def test_a_loss_in_float64_of_narrower_logits_is_computed_in_float64() -> None:
    scores, labels = inputs(torch.float32)
    for loss in (lambda x, y: F.cross_entropy(x.double(), y), lambda x, y: F.nll_loss(F.log_softmax(x, -1, dtype=torch.float64), y)):
        _, program = fused(loss, scores, labels)
        torch.testing.assert_close(run(program, scores, labels), loss(scores, labels), rtol=1e-14, atol=0)


def test_other_uses_of_a_log_softmax_are_not_spoken_of() -> None:
    decision, _ = fused(lambda x, y: x.log_softmax(-1).exp().sum() + y.sum(), *inputs())
    assert not decision.found


def test_negative_indices_count_from_the_end() -> None:
    scores, labels = inputs()
    _, program = fused(FORMS["indexed"], scores, labels)
    torch.testing.assert_close(run(program, scores, labels - CLASSES), FORMS["indexed"](scores, labels))


def test_a_label_that_is_no_class_gives_nan() -> None:
    scores, labels = inputs()
    for name in ("mean", "gathered", "indexed"):
        _, program = fused(FORMS[name], scores, labels)
        assert run(program, scores, torch.where(labels == 2, CLASSES, labels)).isnan(), name


def test_an_ignored_row_has_no_gradient_even_where_it_is_not_finite() -> None:
    scores, labels = inputs()
    labels[3] = -100
    _, program = fused(F.cross_entropy, scores, labels)
    leaf = scores.index_fill(0, torch.tensor(3), torch.nan).requires_grad_()
    loss: Any = run(program, leaf, labels)
    loss.backward()
    assert leaf.grad is not None and bool(leaf.grad.isfinite().all()) and not leaf.grad[3].any()


@pytest.mark.parametrize("lowest", [-1e9, torch.finfo(torch.float32).min])
def test_rows_that_a_number_masks_wholly_keep_the_logarithm_of_their_classes(lowest: float) -> None:
    """−1e9 + log n is −1e9: the op would lose log n of the loss, and weigh each class 1."""
    torch.manual_seed(0)
    scores, labels = torch.randn(4, CLASSES), torch.tensor([0, 3, 6, 2])
    masked = torch.rand(4, CLASSES).gt(0.5).index_fill(0, torch.tensor([1]), True)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.masked_fill(masked, lowest), labels, reduction="none")[1]

    decision, program = fused(loss, scores, labels)
    assert not decision.fused and "which a row that is masked wholly would show" in str(decision)
    assert float(run(program, scores, labels)) == pytest.approx(torch.tensor(float(CLASSES)).log().item())
