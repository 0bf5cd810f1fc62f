"""Batch norm as sums over the batch: the same numbers in forward, backward and buffers, and ops that may be split."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.ir.program import Program
from autopar.passes.global_.decompose_batch_norm import DecomposeBatchNorm
from tests.support.graphs import ops, traced, values

aten = torch.ops.aten
SHAPES = [(8, 6), (4, 6, 5), (4, 6, 3, 5), (2, 6, 3, 2, 4)]


def channels(*, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Weight, bias, running mean and running variance of 6 channels."""
    draw = torch.Generator().manual_seed(1)
    return tuple(torch.rand(6, generator=draw, dtype=torch.float64).to(dtype) + 0.5 for _ in range(4))


def image(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    return (3 + 2 * torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).to(dtype)


def decomposed(function: Callable[..., object], *tensors: Tensor, tolerance: float = 1e-12) -> Program:
    """The program after the pass, whose results are close to those before, in the same dtypes."""
    before = traced(function, *tensors)
    after = DecomposeBatchNorm().apply(before)
    for want, found in zip(values(before, *tensors), values(after, *tensors), strict=True):
        torch.testing.assert_close(found, want, rtol=tolerance, atol=tolerance)
    assert not [name for name in ops(after) if "batch_norm" in name]
    return after


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("affine", [True, False])
def test_forward_and_buffers(shape: tuple[int, ...], affine: bool) -> None:
    def function(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> object:
        weights = (weight, bias) if affine else (None, None)
        return aten._native_batch_norm_legit_functional(x, *weights, mean, variance, True, 0.3, 1e-5)

    decomposed(function, image(shape), *channels())


def test_forward_without_buffers() -> None:
    decomposed(lambda x, weight: aten._native_batch_norm_legit.no_stats(x, weight, None, True, 0.1, 1e-5), image(SHAPES[2]), channels()[0])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_backward(shape: tuple[int, ...], training: bool) -> None:
    def function(gradient: Tensor, x: Tensor, weight: Tensor, deviation: Tensor, mean: Tensor, variance: Tensor) -> object:
        return aten.native_batch_norm_backward(
            gradient, x, weight, mean, variance, x.transpose(0, 1).flatten(1).mean(1), deviation, training, 1e-5, [True, True, True]
        )

    decomposed(function, image(shape).cos(), image(shape), *channels())


def test_a_gradient_that_nobody_wants_is_not_computed() -> None:
    def function(gradient: Tensor, x: Tensor, mean: Tensor, deviation: Tensor) -> object:
        return aten.native_batch_norm_backward(gradient, x, None, None, None, mean, deviation, True, 1e-5, [False, False, True])[2]

    after = decomposed(function, image(SHAPES[2]), image(SHAPES[2]), *channels()[:2])
    assert ops(after) == ["aten.sum.dim_IntList"]


def test_16_bit_inputs_are_normalised_in_float32() -> None:
    """The saved statistics, too: torch's own op has them in float32 when it runs, whatever it says when it is traced."""

    def function(x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        return aten._native_batch_norm_legit_functional(x, *others, True, 0.1, 1e-5)

    x, others = image((4, 6, 8, 8), torch.bfloat16), channels(dtype=torch.float32)
    found = values(DecomposeBatchNorm().apply(traced(function, x, *others)), x, *others)
    for ours, theirs in zip(found, function(x, *others), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2 if ours.dtype == torch.bfloat16 else 1e-5, atol=1e-2)


def test_a_variance_far_from_zero_does_not_cancel() -> None:
    decomposed(
        lambda x, *others: aten._native_batch_norm_legit_functional(x, *others, True, 0.1, 1e-5), image(SHAPES[1]) + 1e7, *channels(),
        tolerance=1e-6,
    )  # fmt: skip


def test_evaluation_is_left_as_it_is() -> None:
    before = traced(lambda x, *others: aten._native_batch_norm_legit_no_training(x, *others, 0.1, 1e-5), image(SHAPES[2]), *channels())
    assert ops(DecomposeBatchNorm().apply(before)) == ops(before)


class Frozen(nn.Module):
    """A frozen batch norm between layers that train, and an instance norm, whose channels are those of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)
        self.instance = nn.InstanceNorm2d(4, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        return (self.instance(self.last(self.frozen(self.first(x)))) ** 3).mean()


def test_frozen_and_instance_norms_split_and_are_exact() -> None:
    torch.manual_seed(0)
    model = Frozen().double()
    model.frozen.running_mean, model.frozen.running_var = torch.rand(8).double(), torch.rand(8).double() + 0.5
    model.frozen.eval()
    reference, x = copy.deepcopy(model), torch.randn(8, 3, 8, 8).double()
    parallel = autopar.compile(model, autopar.virtual_mesh(dp=2, tp=2), backend="eager")
    parallel(x).backward()
    reference(x).backward()
    for (name, ours), theirs in zip(parallel.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12, msg=name)
    torch.testing.assert_close(dict(model.named_buffers()), dict(reference.named_buffers()))
    assert parallel.summary()["flops_split"] == 1.0


class Tracked(nn.Module):
    """An instance norm that tracks statistics, of which torch makes a batch norm of one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.InstanceNorm1d(3, affine=True, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(self.linear(x)) ** 3).mean()


class Turned(nn.Module):
    """A batch norm of one sample, whose positions are the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(self.linear(x).t()[None]) ** 3).mean()


@pytest.mark.parametrize(("kind", "shape"), [(Tracked, (8, 3, 6)), (Turned, (8, 6))], ids=["instances", "positions"])
def test_the_running_variance_in_microbatches_is_that_of_what_each_has(kind: type[nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, x = kind().double(), torch.randn(shape).double()
    reference = copy.deepcopy(model)
    options = {"example_inputs": (x,), "backend": "eager", "num_microbatches": 2, "microbatch_statistics": "own"}
    autopar.compile(model, autopar.virtual_mesh(dp=1), **options)(x)
    for half in x.chunk(2):
        reference(half)
    torch.testing.assert_close(dict(model.named_buffers()), dict(reference.named_buffers()), rtol=1e-12, atol=1e-12)
