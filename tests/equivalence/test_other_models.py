"""What the zoo does not have: statistics of the whole batch, buffers that change, 16-bit means, eight ranks on two heads."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import autopar
from tests.support.models.zoo import ZOO


class Normalised(nn.Module):
    """BatchNorm between two layers: in training its statistics are those of the global batch, whatever a rank holds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((self.last(torch.relu(self.norm(self.first(x)))) - y) ** 2).mean()


def test_batch_norm_sees_the_global_batch_and_its_buffers_follow() -> None:
    torch.manual_seed(0)
    model = Normalised().double()
    reference = copy.deepcopy(model)
    x, y = torch.randn(8, 16).double(), torch.randn(8, 4).double()
    parallel = autopar.compile(model, autopar.virtual_mesh(dp=2, tp=2), backend="eager")
    for _ in range(2):
        for module in (parallel, reference):
            module.zero_grad()
            module(x, y).backward()
        for (name, ours), theirs in zip(parallel.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12, msg=name)
    torch.testing.assert_close(dict(model.named_buffers()), dict(reference.named_buffers()), rtol=1e-12, atol=1e-12)
    assert parallel.verify(x, y)
    for module in (parallel.eval(), reference.eval()):
        module.zero_grad()
    torch.testing.assert_close(parallel(x, y), reference(x, y), rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(parallel(x, y), reference(x, y), rtol=1e-12, atol=1e-12)


class HalfMean(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).mean()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_mean_of_16_bit_numbers_does_not_overflow(dtype: torch.dtype) -> None:
    parallel = autopar.compile(HalfMean(dtype), autopar.virtual_mesh(dp=2), backend="eager")
    assert parallel(torch.full((8192, 4), 30.0, dtype=dtype)).item() == 30.0


def test_two_key_heads_on_eight_ranks_train_and_then_evaluate() -> None:
    """The second capture keeps the sub-axes that the first one made."""
    case = ZOO["llama"]()
    parallel = autopar.compile(case.model, autopar.virtual_mesh(tp=8), backend="eager")
    trained = parallel(**case.batch).loss
    assert parallel.summary()["flops_split"] >= 0.98
    parallel.eval()
    with torch.no_grad():
        torch.testing.assert_close(parallel(**case.batch).loss, trained.detach(), rtol=1e-5, atol=1e-6)


class WritesIntoItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return (x * self.weight).sum()


def test_a_model_that_writes_into_its_input_is_refused() -> None:
    parallel = autopar.compile(WritesIntoItsInput(), autopar.virtual_mesh(dp=2), backend="eager")
    with pytest.raises(autopar.CaptureError, match=r"its batch input 0 in forward\n  where: .*x\.mul_\(2\)\n.*: write out of place"):
        parallel(torch.ones(8, 4))


def test_example_inputs_must_say_what_they_are() -> None:
    with pytest.raises(autopar.InputError, match="example_inputs is a Tensor; pass a dict of keyword arguments or a tuple"):
        autopar.compile(HalfMean(torch.float32), autopar.virtual_mesh(dp=2), example_inputs=torch.ones(8, 4))  # type: ignore[arg-type]
