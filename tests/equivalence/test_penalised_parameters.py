"""Parameters that a batch and a penalty read, each behind a view, a mask or a nonlinearity: several microbatches compute what one does."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.errors import MicrobatchError
from autopar.partition.whole_batch import Mixing
from tests.support.captures import compiled

Loss = Callable[["Penalised", Tensor], Tensor]


class Penalised(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.layer, self.scales, self.table, self.loss = nn.Linear(6, 4), nn.Parameter(torch.rand(4) + 0.2), nn.Embedding(5, 4), loss
        self.square = nn.Parameter(torch.rand(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self, torch.tanh(self.layer(x)))


def uncertainties(module: Penalised, h: Tensor) -> Tensor:
    """Kendall et al., Multi-Task Learning Using Uncertainty, equation 7."""
    first, second = h.square().mean(), h.exp().mean()
    return (-module.scales[0]).exp() * first + module.scales[0] + (-module.scales[1]).exp() * second + module.scales[1]


def sparse_gates(module: Penalised, h: Tensor) -> Tensor:
    gates = torch.sigmoid(module.square.sum(0))
    return (h * gates).square().mean() + gates.mean()


def bayesian(module: Penalised, h: Tensor) -> Tensor:
    mean, deviation = module.layer.weight[:, :4], F.softplus(module.square)
    return (h @ (mean + 0.3 * deviation)).square().mean() + ((deviation.square() + mean.square()) / 2 - deviation.log()).sum()


def masked(module: Penalised, h: Tensor) -> Tensor:
    kept = torch.where(module.scales > 0.5, module.scales, 0.1).flip(0)
    lower = module.square.masked_fill(torch.eye(4, dtype=torch.bool), 2.0).tril()
    return (h @ lower * kept).square().mean() + kept.square().sum() + lower.abs().sum() + F.pad(kept, (1, 1), value=2.0)[:3].prod()


def codes(module: Penalised, h: Tensor) -> Tensor:
    codebook = module.table.weight[None, :4]
    picked = module.table(torch.tensor([1, 1, 3]))
    return (h[:, None] - codebook).square().sum(-1).amin(1).mean() + (picked @ picked.t()).square().mean()


def activations(module: Penalised, h: Tensor) -> Tensor:
    made = [f(module.scales) for f in (F.gelu, F.silu, F.elu, F.mish, F.relu, F.hardswish, F.logsigmoid, F.leaky_relu)]
    weights = torch.softmax(torch.stack(made), 0).gather(0, torch.tensor([[0, 3, 1, 7]]))
    return (h * weights).square().mean() + weights.log_softmax(-1).sum() + sum(each.square().sum() for each in made)


def written(module: Penalised, h: Tensor) -> Tensor:
    weights = module.square.clone()
    weights[:, 1:] *= 2
    weights.t()[1:].mul_(0.5)
    weights[torch.tensor([3, 0])] = 3 * module.square[1:3]
    return (h @ weights @ torch.rot90(module.square, 1, (1, 0))).square().mean() + weights.square().sum()


CASES = (uncertainties, sparse_gates, bayesian, masked, codes, activations, written)


@pytest.mark.parametrize("axes", [{"dp": 2}, {"tp": 2}, {"pp": 2}], ids=str)
@pytest.mark.parametrize("loss", CASES)
def test_four_microbatches_are_the_whole_batch(loss: Loss, axes: dict[str, int]) -> None:
    torch.manual_seed(0)
    model, x = Penalised(loss).double(), torch.randn(8, 6, dtype=torch.float64)
    plain = copy.deepcopy(model)
    expected = plain(x)
    expected.backward()
    parallel = compiled(model, axes, (x,), num_microbatches=4)
    found = parallel(x)
    found.backward()
    assert parallel.compiled.program.mesh.num_microbatches == 4
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for (name, ours), theirs in zip(parallel.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-11, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    "loss",
    [
        lambda m, h: torch.where(h.mean() > 0, m.scales, 0.5 * m.scales).square().sum() + h.sum(),
        lambda m, h: F.softplus(h.mean(0)).sum() + m.scales.sum(),
        lambda m, h: (m.square.detach().index_select(0, (h.detach() > 2).sum(0)) * m.scales).sum() + h.sum(),
        lambda m, h: (h.detach().sum(0).cumsum(0, dtype=torch.int64).to(h.dtype) * m.scales).sum() + h.sum(),
        lambda m, h: (torch.sigmoid(m.scales) * h.mean(0)).tanh().sum(),
        lambda m, h: torch.zeros(4, dtype=torch.int64).copy_(1.3 * h.detach().sum(0)).double().sum() * m.scales.sum() + h.sum(),
    ],
)
def test_what_the_batch_as_a_whole_chooses_is_still_refused(loss: Loss) -> None:
    with pytest.raises(MicrobatchError) as caught:
        compiled(Penalised(loss).double(), {"dp": 2}, (torch.randn(8, 6, dtype=torch.float64),), num_microbatches=4)
    assert all(isinstance(each, Mixing) for each in caught.value.found) and "would change what the model computes" in str(caught.value)


class Seen(nn.Module):
    """Adds to a buffer what it has seen of marked samples, divided by how many there are, which is known ahead."""

    def __init__(self, share: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.share = nn.Linear(6, 4), share
        self.register_buffer("seen", torch.zeros(4))
        self.seen: Tensor

    def forward(self, x: Tensor, marks: Tensor) -> Tensor:
        h = self.layer(x)
        with torch.no_grad():
            self.seen += (h * marks[:, None]).sum(0) * self.share(marks.sum())
        return h.square().sum()


@pytest.mark.parametrize("share", [lambda number: 1 / number, lambda number: (number + 1).view(1).expand(4)], ids=["divided", "as a view"])
@pytest.mark.parametrize(("axes", "number"), [({"dp": 1}, 4), ({"dp": 2}, 2), ({"pp": 2}, 4)], ids=str)
def test_what_is_known_ahead_is_a_factor_of_what_buffers_take(share: Callable[[Tensor], Tensor], axes: dict[str, int], number: int) -> None:
    torch.manual_seed(0)
    model, x, marks = Seen(share).double(), torch.randn(8, 6, dtype=torch.float64), torch.tensor([1.0, 0, 1, 1, 0, 0, 1, 0]).double()
    plain = copy.deepcopy(model)
    expected = plain(x, marks)
    parallel = compiled(model, axes, (x, marks), num_microbatches=number)
    torch.testing.assert_close(parallel(x, marks), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(parallel.seen, plain.seen, rtol=1e-12, atol=1e-12)
