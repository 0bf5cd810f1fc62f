"""Dropout of attention: what is dropped is what plain ops draw; all of it, and nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.kernels.attention import attention
from tests.support.kernels.attention import DROPS, KINDS, NOTHING, PLAIN, draws_of, kept_of


def make_inputs(length: int, key_length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, each, 8, dtype=dtype) for heads, each in ((4, length), (2, key_length), (2, key_length)))
    return query, key, value


@pytest.mark.parametrize("kind", list(KINDS))
def test_what_is_dropped_is_drawn_as_by_plain_ops(kind: str) -> None:
    """Bit by bit, whatever of rows and words is broadcast: values that are the identity make the output the probabilities."""
    query, key, _ = make_inputs(33, 65, torch.float32)
    draws, value = draws_of((2, 4, 33, 65), kind), torch.eye(65).expand(2, 2, 65, 65)
    whole, sums = attention(query, key, value, *NOTHING, **PLAIN)
    out, log_sum_exp = attention(query, key, value, None, None, None, *draws, **PLAIN | DROPS)
    keep = kept_of((2, 4, 33, 65), draws, **DROPS)
    assert torch.equal(out != 0, keep != 0) and 0.65 < float((keep != 0).double().mean()) < 0.75
    torch.testing.assert_close(out, whole * keep.float())
    torch.testing.assert_close(log_sum_exp, sums)


def test_dropout_of_everything_is_zero() -> None:
    """Its scale is 0 then, for there is nothing to scale, and one draw in 2³² would be kept."""
    inputs = [item.requires_grad_() for item in make_inputs(6, 7, torch.float32)]
    draws = draws_of((2, 4, 6, 7))
    out, _ = attention(*inputs, None, None, None, *draws, **PLAIN | {"keep_below": 1, "keep_scale": 0.0})
    grads = torch.autograd.grad(out.sum(), inputs)
    assert all(bool((item == 0).all()) for item in (out, *grads))


def test_dropout_of_nothing_is_attention() -> None:
    inputs = make_inputs(6, 7, torch.float64)
    kept = attention(*inputs, None, None, None, *draws_of((2, 4, 6, 7)), **PLAIN | {"keep_below": 2**32, "keep_scale": 1.0})
    for one, other in zip(kept, attention(*inputs, *NOTHING, **PLAIN), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
