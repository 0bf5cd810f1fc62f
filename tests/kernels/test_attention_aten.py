"""Torch's GPU kernels behind our op: what they are asked for, and that what comes back is of the shapes, dtypes and layout the op claims.

On meta tensors: the calls' schemas and shapes are torch's own, values need a GPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from autopar.kernels.attention_masks import Masks
from autopar.kernels.gpu import attention_aten

MASKS = Masks(is_causal=True, scale=0.3, implementation="aten")


@pytest.fixture(params=["FLASH_ATTENTION", "CUDNN_ATTENTION"])
def chosen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What torch's dispatch is made to choose."""
    monkeypatch.setattr(attention_aten, "_choice", lambda *_: SDPBackend.__members__[request.param].value)
    return request.param


def operands(groups: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    def heads(number: int) -> Tensor:
        return torch.empty(2, 48, number, 64, dtype=dtype, device="meta").transpose(1, 2)

    return heads(8), heads(groups), heads(groups)


@pytest.mark.parametrize("groups", [8, 2])
def test_results_are_as_the_op_claims(chosen: str, groups: int) -> None:
    query, key, value = operands(groups)
    assert attention_aten.serves(query, key, value, MASKS)
    out, log_sum_exp = attention_aten.forward(query, key, value, MASKS)
    assert out.shape == query.shape and out.dtype == query.dtype and out.transpose(1, 2).is_contiguous()
    assert log_sum_exp.shape == query.shape[:3] and log_sum_exp.dtype == torch.float32 and log_sum_exp.transpose(1, 2).is_contiguous()
    grads = attention_aten.backward(torch.empty_like(out), query, key, value, out, log_sum_exp, MASKS)
    for grad, of in zip(grads, (query, key, value), strict=True):
        assert grad.shape == of.shape and grad.dtype == of.dtype and grad.transpose(1, 2).is_contiguous()


def test_the_math_path_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_aten, "_choice", lambda *_: SDPBackend.MATH.value)
    assert not attention_aten.serves(*operands(8), MASKS)
