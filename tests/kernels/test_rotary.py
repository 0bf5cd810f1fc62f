"""The rotary op against rotations written out: values, gradients, partly turned heads, tracing, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar._torch import fake_mode
from autopar.kernels.rotary import rotary, rotary_backward
from tests.support.kernels.tracing import assert_traceable


def inputs(rotated: int, shape: tuple[int, ...] = (2, 3, 5, 8), dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    cos, sin = (torch.randn(5, rotated, dtype=dtype) for _ in range(2))
    return torch.randn(shape, dtype=dtype).requires_grad_(), cos, sin


def by_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As transformers' Llama writes it, the tail untouched as in GPT-NeoX."""
    turning, tail = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turning.chunk(2, -1)
    return torch.cat((turning * cos + torch.cat((-second, first), -1) * sin, tail), -1)


def by_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As GPT-J writes it."""
    turning, tail = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    turned = torch.stack((-turning[..., 1::2], turning[..., ::2]), -1).flatten(-2)
    return torch.cat((turning * cos + turned * sin, tail), -1)


@pytest.mark.parametrize("rotated", [8, 4, 2])
@pytest.mark.parametrize("interleaved", [False, True])
def test_equals_the_rotation_written_out(rotated: int, interleaved: bool) -> None:
    x, cos, sin = inputs(rotated)
    written_out = by_pairs if interleaved else by_halves
    torch.testing.assert_close(rotary(x, cos, sin, interleaved=interleaved), written_out(x, cos, sin))
    assert torch.autograd.gradcheck(lambda x: rotary(x, cos, sin, interleaved=interleaved), (x,))


def test_positions_of_each_sequence() -> None:
    x, _, _ = inputs(8)
    cos, sin = torch.randn(2, 1, 5, 8, dtype=x.dtype), torch.randn(2, 1, 5, 8, dtype=x.dtype)
    torch.testing.assert_close(rotary(x, cos, sin, interleaved=False), by_halves(x, cos, sin))


def test_the_result_lies_as_the_heads_are_merged() -> None:
    assert rotary(*inputs(8), interleaved=False).transpose(1, 2).is_contiguous()


def test_what_does_not_fit_is_refused() -> None:
    x, cos, sin = inputs(8, dtype=torch.float32)
    with fake_mode(), pytest.raises(ValueError, match=r"got x \(2, 3, 5, 8\), cos \(4, 8\)"):
        rotary(torch.empty(2, 3, 5, 8), torch.empty(4, 8), torch.empty(4, 8), interleaved=False)
    with pytest.raises(NotImplementedError, match="no gradient for cos and sin"):
        rotary(x, cos.requires_grad_(), sin, interleaved=False)


def test_traces() -> None:
    x, cos, sin = inputs(6, dtype=torch.float32)
    x = x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    assert_traceable(rotary, (x, cos, sin), {"interleaved": False}, backward="autopar.rotary_backward.default")
    assert_traceable(rotary_backward, (x.detach(), cos, sin), {"interleaved": True})
