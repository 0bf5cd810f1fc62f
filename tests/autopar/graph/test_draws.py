"""Draws of the words at the ends of their range, planted, in every dtype: all numbers are what the distribution can give."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from autopar.errors import CaptureError
from autopar.frontend.capture import capture
from autopar.graph.draws import Draws
from autopar.graph.emit import Emitter
from autopar.ir.mesh import virtual_mesh
from autopar.passes.forward.key_random import KeyRandom
from tests.support.models.layer import Calls

aten = torch.ops.aten
# The ends, and what float32, float16 and bfloat16 round up to 2**32.
WORDS = [0, 1, 2**31, 2**32 - 2**24, 2**32 - 2**23, 2**32 - 2**21, 2**32 - 257, 2**32 - 129, 2**32 - 128, 2**32 - 2, 2**32 - 1]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def drawn(function: Callable[[Tensor], object], x: Tensor) -> tuple[Tensor, ...]:
    program = KeyRandom().apply(capture(Calls(function).train(), (x,), {}, virtual_mesh(dp=1), outputs="all"))
    return program.module()(x, torch.tensor(0))


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draw along a last dim of their number is of `WORDS`."""

    def bits(self: Draws, emit: Emitter, shape: Sequence[int]) -> Node:
        assert shape[-1] == len(WORDS)
        each = [emit.call(aten.full.default, [], word, dtype=torch.int64, device=torch.device("cpu")) for word in WORDS]
        return emit.call(aten.expand.default, emit.call(aten.stack.default, each), list(shape))

    monkeypatch.setattr(Draws, "bits", bits)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_ends_of_every_distribution(dtype: torch.dtype, planted: None) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return (
            torch.rand(len(WORDS), dtype=dtype),
            torch.randn(len(WORDS), dtype=dtype),
            torch.empty_like(x).exponential_(),
            torch.empty_like(x).exponential_(0.5).log(),
            torch.bernoulli(torch.ones_like(x)),
            torch.bernoulli(torch.zeros_like(x)),
            torch.empty_like(x).bernoulli_(1.0),
            torch.empty_like(x).bernoulli_(0.0),
            torch.randint(-3, 4, (len(WORDS),)).to(dtype),
            torch.randint(2**31, (len(WORDS),)),
            F.dropout(torch.ones_like(x), 1.0),
            F.dropout(torch.ones_like(x), 1e-12),
            F.gumbel_softmax(x, tau=0.1),
        )

    found = drawn(function, torch.linspace(-1.0, 1.0, len(WORDS), dtype=dtype))
    uniform, normal, exponential, logarithm, always, never, surely, hardly, small, wide, nothing, everything, gumbel = found
    assert bool((uniform >= 0).all()) and bool((uniform < 1).all())
    assert bool(normal.isfinite().all()) and float(normal.abs().max()) < 7.0
    assert bool((exponential > 0).all()) and float(exponential.max()) < 22.3 and bool(logarithm.isfinite().all())
    for ones, zeros in ((always, never), (surely, hardly), (everything, nothing)):
        assert bool(((ones.double() - 1).abs() < 1e-9).all()) and bool((zeros == 0).all())
    assert bool((small >= -3).all()) and bool((small <= 3).all()) and bool((wide >= 0).all()) and bool((wide < 2**31).all())
    assert bool(gumbel.isfinite().all()) and float(gumbel.sum()) == pytest.approx(1.0, abs=1e-2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_samplers_of_torch_distributions_are_finite(dtype: torch.dtype, planted: None) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        one = torch.ones_like(x)
        return (
            torch.distributions.Exponential(one).rsample(),
            torch.distributions.Gumbel(one, one).rsample(),
            torch.distributions.Laplace(one, one).rsample(),
            torch.distributions.Uniform(one - 1, one).rsample(),
            torch.distributions.RelaxedBernoulli(one, logits=x).rsample(),
        )

    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        found = drawn(function, torch.linspace(-1.0, 1.0, len(WORDS), dtype=dtype))
    finally:
        torch.distributions.Distribution.set_default_validate_args(True)
    assert all(bool(each.isfinite().all()) for each in found)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x + torch.randint(-(2**40), 2**40, (3,)), r"aten.randint.low at .*test_draws.py.*, of 2199023255552 integers.*2\*\*31"),
        (lambda x: x + torch.randn(3, dtype=torch.complex64).real, r"aten.randn.default at .*, of torch.complex64, where draws are real"),
    ],
)
def test_what_words_cannot_say_is_refused(function: Callable[[Tensor], object], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        drawn(function, torch.zeros(3))
