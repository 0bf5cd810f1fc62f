"""Block-sparse attention against dense attention with the expanded mask: values, gradients, layouts, tracing, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar._torch import fake_mode
from autopar.kernels.block_sparse import block_sparse_attention
from tests.support.kernels.tracing import assert_traceable

pytestmark = pytest.mark.usefixtures("one_thread")

# B, H, G, S, T, D, E, the layout's batch and heads, block size
SHAPES = [
    (2, 4, 4, 64, 64, 8, 8, (1,), 16),
    (2, 4, 2, 70, 41, 8, 8, (4,), 16),
    (2, 6, 2, 41, 70, 8, 12, (2, 1), 32),
    (2, 4, 2, 64, 33, 8, 8, (2, 4), 16),
    (1, 2, 1, 1, 1, 4, 4, (1, 1), 16),
    (1, 2, 1, 150, 270, 8, 8, (2,), 128),
]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}
OPTIONS: dict[str, Any] = {"block_size": 16, "is_causal": False, "scale": 0.3}


def inputs_of(shape: tuple[Any, ...], dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor]:
    """Query, key and value as a model has them, heads split off the last dim, and a layout of which a half is true."""
    batch, num_heads, num_groups, length, key_length, head_size, value_size, lead, block_size = shape
    torch.manual_seed(0)
    sizes = ((length, num_heads, head_size), (key_length, num_groups, head_size), (key_length, num_groups, value_size))
    tensors = [torch.randn(batch, *size, dtype=dtype).transpose(1, 2).requires_grad_() for size in sizes]
    return tensors, torch.rand(*lead, -(-length // block_size), -(-key_length // block_size)) < 0.5


def expanded(layout: Tensor, block_size: int, length: int, key_length: int, is_causal: bool) -> Tensor:
    """bool [B or 1, H or 1, S, T], true where a query attends to a key."""
    mask = layout.reshape((1,) * (4 - layout.dim()) + layout.shape)
    mask = mask.repeat_interleave(block_size, -2).repeat_interleave(block_size, -1)[..., :length, :key_length]
    return mask.tril() if is_causal else mask


def dense(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(out, log_sum_exp), step by step in float64; 0 in rows that attend to nothing."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = (query @ key.mT * scale).masked_fill(~mask, -1e300)
    some = mask.any(-1).expand(scores.shape[:-1])
    out = (scores.softmax(-1) @ value).where(some.unsqueeze(-1), 0.0)
    return out, scores.logsumexp(-1).where(some, 0.0)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape: tuple[Any, ...], dtype: torch.dtype, is_causal: bool) -> None:
    """Of both results; half of the blocks are masked, and with them whole rows."""
    leaves, layout = inputs_of(shape, dtype)
    got = block_sparse_attention(*leaves, layout, block_size=shape[-1], is_causal=is_causal, scale=0.3)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    wanted = dense(*exact, expanded(layout, shape[-1], shape[3], shape[4], is_causal), 0.3)
    incoming = [torch.randn_like(each) for each in got]
    grads = torch.autograd.grad(got, leaves, incoming)
    wanted_grads = torch.autograd.grad(wanted, exact, [each.double() for each in incoming])
    assert [each.dtype for each in (*got, *grads)] == [dtype, torch.promote_types(dtype, torch.float32), *(dtype,) * 3]
    for name, one, other in zip(("out", "sum", "query", "key", "value"), (*got, *grads), (*wanted, *wanted_grads), strict=True):
        error = (one.double() - other).abs().max() / other.abs().max().clamp_min(1.0)
        assert error <= TOLERANCE[dtype], f"{name}: {error:.2e}"
        assert one.transpose(1, 2).is_contiguous()


def test_a_layout_of_everything_is_dense_attention() -> None:
    leaves, layout = inputs_of((2, 4, 2, 50, 50, 8, 8, (1,), 16))
    out, _ = block_sparse_attention(*leaves, torch.ones_like(layout), block_size=16, is_causal=True)
    wanted = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)


def test_gradients_by_finite_differences() -> None:
    leaves, layout = inputs_of((1, 2, 1, 20, 20, 3, 3, (2,), 16))
    layout |= torch.eye(2, dtype=torch.bool)
    assert torch.autograd.gradcheck(lambda *inputs: block_sparse_attention(*inputs, layout, block_size=16, is_causal=True), leaves)


def test_rows_that_attend_to_nothing_are_zero() -> None:
    leaves, layout = inputs_of(SHAPES[1])
    results = block_sparse_attention(*leaves, torch.zeros_like(layout), block_size=16)
    grads = torch.autograd.grad(results, leaves, [torch.ones_like(each) for each in results])
    assert not any(each.any() for each in (*results, *grads))


@pytest.mark.parametrize("is_causal", [False, True])
def test_nothing_of_a_masked_block_reaches_a_result(is_causal: bool) -> None:
    leaves, _ = inputs_of((1, 2, 1, 48, 48, 8, 8, (1,), 16))
    layout = torch.tensor([[[1, 0, 0], [1, 0, 0], [1, 0, 1]]], dtype=torch.bool)
    with torch.no_grad():
        for leaf in leaves[1:]:
            leaf[:, :, 16:32] = torch.nan
    out, _ = block_sparse_attention(*leaves, layout, block_size=16, is_causal=is_causal)
    assert all(each.isfinite().all() for each in (out, *torch.autograd.grad(out.sum(), leaves)))


@pytest.mark.parametrize("position", range(3))
def test_any_strides_of_the_inputs(position: int) -> None:
    leaves, layout = inputs_of(SHAPES[1])
    wanted = block_sparse_attention(*leaves, layout, block_size=16)
    leaves[position] = leaves[position].mT.contiguous().mT
    assert leaves[position].stride(-1) != 1
    torch.testing.assert_close(block_sparse_attention(*leaves, layout.mT.contiguous().mT, block_size=16), wanted, rtol=1e-12, atol=1e-12)


def test_one_node_each_way_in_a_trace() -> None:
    leaves, layout = inputs_of((2, 4, 2, 40, 33, 8, 8, (4,), 16), torch.float32)
    op = torch.ops.autopar.block_sparse_attention.default
    assert_traceable(op, (*leaves, layout), OPTIONS, backward="autopar.block_sparse_attention_backward.default")
    assert_traceable(op, (*leaves, layout), OPTIONS | {"is_causal": True})


BOTH_SHAPES = r"layout is \(3, 3, 3\); in blocks of 16, query \(2, 4, 40, 8\), key \(2, 2, 33, 8\).* want \[4 or 1, 3, 3\], or \[2 or 1, 4"


@pytest.mark.parametrize(
    ("change", "block_size", "message"),
    [
        ({"key": torch.empty(2, 3, 33, 8)}, 16, "H a multiple of G"),
        ({"value": torch.empty(2, 2, 32, 8)}, 16, "H a multiple of G"),
        ({"query": torch.empty(4, 40, 8)}, 16, r"got query \(4, 40, 8\)"),
        ({"layout": torch.ones(3, 3, 3, dtype=torch.bool)}, 16, BOTH_SHAPES),
        ({"layout": torch.ones(1, 3, 2, dtype=torch.bool)}, 16, r"layout is \(1, 3, 2\)"),
        ({"layout": torch.ones(3, 3, dtype=torch.bool)}, 16, r"layout is \(3, 3\)"),
        ({"layout": torch.ones(3, 4, 3, 3, dtype=torch.bool)}, 16, r"layout is \(3, 4, 3, 3\)"),
        ({"layout": torch.ones(1, 3, 3)}, 16, "layout is torch.float32, not torch.bool"),
        ({}, 24, "block_size is 24, not one of 16, 32, 64, 128"),
        ({}, 32, r"layout is \(1, 3, 3\); in blocks of 32"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Tensor], block_size: int, message: str) -> None:
    """Where it runs, and where it is traced."""
    given = {"query": torch.empty(2, 4, 40, 8), "key": torch.empty(2, 2, 33, 8), "value": torch.empty(2, 2, 33, 8)}
    given |= {"layout": torch.ones(1, 3, 3, dtype=torch.bool)} | change
    with pytest.raises(ValueError, match=message):
        block_sparse_attention(**given, block_size=block_size)
    with fake_mode() as mode, pytest.raises((ValueError, RuntimeError), match=message):
        block_sparse_attention(**{name: mode.from_tensor(value) for name, value in given.items()}, block_size=block_size)
