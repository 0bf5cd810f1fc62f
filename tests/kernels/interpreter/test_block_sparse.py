"""The block-sparse kernels against float64: layouts shared and not, grouped heads, ragged blocks, NaN where nothing may be loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from autopar.kernels.gpu import block_sparse as gpu
from autopar.kernels.gpu import block_sparse_backward as gpu_backward
from autopar.kernels.gpu.attention_tiles import Tiles
from autopar.kernels.gpu.block_sparse_tiles import cut
from tests.support.kernels.accuracy import GRADIENT_FACTOR, assert_accurate
from tests.support.kernels.attention import heads_of

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@dataclass(frozen=True)
class Form:
    """B, H, G, S, T, D, E; what the layout has before its blocks, and how many of these there are."""

    shape: tuple[int, ...] = (1, 2, 2, 96, 96, 16, 16)
    lead: tuple[int, ...] = (1,)
    block_size: int = 32
    is_causal: bool = False
    both: bool = False
    size: float = 1.0
    share: float = 0.5


FORMS = {
    "one layout": Form(),
    "one layout, causal": Form(is_causal=True),
    "a layout for each head": Form(lead=(2,)),
    "a layout for each head, causal": Form(lead=(2,), is_causal=True),
    "a layout for each sequence": Form((2, 2, 1, 64, 64, 16, 16), lead=(2, 1)),
    "a layout for each sequence and head": Form((2, 2, 1, 64, 64, 16, 16), lead=(2, 2), is_causal=True),
    "grouped heads": Form((2, 6, 2, 64, 96, 16, 16), lead=(6,)),
    "ragged": Form((1, 2, 1, 70, 41, 16, 16), lead=(2,)),
    "ragged, causal": Form((1, 2, 1, 70, 70, 16, 16), lead=(2,), is_causal=True),
    "causal, more queries": Form((1, 2, 1, 100, 41, 16, 16), is_causal=True),
    "causal, more keys": Form((1, 2, 1, 41, 100, 16, 16), is_causal=True),
    "one position": Form((1, 1, 1, 1, 1, 16, 16), share=1.0),
    "nothing": Form((1, 2, 2, 33, 33, 16, 16), share=0.0),
    "everything": Form(lead=(2,), share=1.0, is_causal=True),
    "blocks of 16": Form((1, 2, 1, 70, 60, 16, 16), lead=(2,), block_size=16, is_causal=True),
    "blocks of 64": Form((1, 2, 2, 130, 100, 32, 32), block_size=64),
    "blocks of 128": Form((1, 1, 1, 270, 200, 16, 16), block_size=128, share=0.7),
    "blocks of 128, causal": Form((1, 1, 1, 200, 200, 16, 16), block_size=128, is_causal=True, share=1.0),
    "both results": Form((2, 6, 2, 41, 65, 16, 16), lead=(6,), both=True),
    "both results, causal": Form((1, 2, 1, 70, 70, 16, 16), is_causal=True, both=True),
    "no power of two": Form((1, 2, 1, 40, 40, 80, 80), lead=(2,)),
    "values of another size": Form((1, 2, 1, 40, 40, 24, 48), lead=(2,), is_causal=True),
    "heads of 64": Form((1, 1, 1, 70, 70, 64, 64), is_causal=True),
    "heads of 128": Form((1, 1, 1, 100, 130, 128, 128), block_size=64),
    "heads of 256": Form((1, 1, 1, 40, 40, 256, 256), is_causal=True),
    "huge scores": Form(size=30.0),
}


def layout_of(form: Form) -> Tensor:
    grid = (-(-form.shape[3] // form.block_size), -(-form.shape[4] // form.block_size))
    return torch.rand(*form.lead, *grid) < form.share


def attends(layout: Tensor, form: Form) -> Tensor:
    """bool [B or 1, H or 1, S, T]."""
    length, key_length = form.shape[3:5]
    layout = layout.reshape((1,) * (4 - layout.dim()) + layout.shape)
    mask = layout.repeat_interleave(form.block_size, -2).repeat_interleave(form.block_size, -1)[..., :length, :key_length]
    return mask.tril() if form.is_causal else mask


def plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention written out, every op rounding to the dtype of the query, and the logarithms of its sums."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.mT * scale
    # A row that attends to nothing: a softmax over equal scores, then zero.
    weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~mask, 0.0)
    return weights @ value, scores.masked_fill(~mask, -torch.inf).logsumexp(-1).masked_fill(~mask.any(-1), 0.0)


def inputs_of(form: Form, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, groups, length, key_length, size, value_size = form.shape
    query, key = heads_of(batch, heads, length, size, dtype) * form.size, heads_of(batch, groups, key_length, size, dtype)
    return query, key, heads_of(batch, groups, key_length, value_size, dtype)


# Heads of more than 64 in float32 are the reference's.
CASES = [(name, dtype) for name in FORMS for dtype in DTYPES if dtype != torch.float32 or FORMS[name].shape[-1] <= 64]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_forms(name: str, dtype: torch.dtype) -> None:
    form = FORMS[name]
    query, key, value = inputs_of(form, dtype)
    layout, scale = layout_of(form), form.shape[5] ** -0.5
    mask = attends(layout, form)
    grad = torch.randn(*query.shape[:3], value.shape[-1]).to(dtype)
    grad_sum = torch.randn(query.shape[:3]) if form.both else None
    out, log_sum_exp = gpu.forward(query, key, value, layout, block_size=form.block_size, is_causal=form.is_causal, scale=scale)
    arguments = (grad, grad_sum, query, key, value, layout, out, log_sum_exp)
    grads = gpu_backward.backward(*arguments, block_size=form.block_size, is_causal=form.is_causal, scale=scale)
    runs: list[tuple[Tensor, ...]] = []
    for precision in (dtype, torch.float64):
        leaves = [item.detach().to(precision).requires_grad_() for item in (query, key, value)]
        results = plain(*leaves, mask, scale)[: 1 + form.both]
        incoming = [each.to(precision) for each in (grad, grad_sum) if each is not None]
        runs.append((results[0].detach(), *torch.autograd.grad(results, leaves, incoming)))
    same, exact = runs
    assert_accurate(out, same[0], exact[0])
    largest = max(float(item.abs().max()) for item in exact[1:])
    for ours, one, other in zip(grads, same[1:], exact[1:], strict=True):
        assert_accurate(ours, one, other, factor=GRADIENT_FACTOR, largest=largest)


def test_log_sum_exp_and_layouts_in_memory() -> None:
    form = Form((2, 4, 2, 41, 70, 16, 16), lead=(4,))
    inputs, layout = inputs_of(form, torch.float32), layout_of(form)
    layout[0, 0] = False
    out, log_sum_exp = gpu.forward(*inputs, layout, block_size=32, is_causal=False, scale=0.25)
    torch.testing.assert_close(log_sum_exp, plain(*inputs, attends(layout, form), 0.25)[1])
    grads = gpu_backward.backward(out, None, *inputs, layout, out, log_sum_exp, block_size=32, is_causal=False, scale=0.25)
    assert all(item.transpose(1, 2).is_contiguous() for item in (out, log_sum_exp, *grads))
    assert not out[:, 0, :32].any() and not log_sum_exp[:, 0, :32].any()


def test_very_negative_scores_beside_a_ragged_end() -> None:
    """Beyond the last key a score of 0 would be far above all others, and its exponential infinite."""
    form = Form((1, 1, 1, 70, 41, 16, 16), share=1.0)
    query, key, value = inputs_of(form, torch.float32)
    grad = torch.randn_like(query)
    leaves = [item.detach().requires_grad_() for item in (query + 8.0, key - 8.0, value)]
    layout = layout_of(form)
    wanted, _ = plain(*leaves, attends(layout, form), 0.25)
    out, _, *found = run(*(item.detach() for item in leaves), grad, layout, False)
    torch.testing.assert_close(out, wanted, atol=1e-4, rtol=1e-4)
    # A log_sum_exp of −256 is rounded to 1.5e-5, and so is what its exponentials are multiplied by.
    torch.testing.assert_close(tuple(found), torch.autograd.grad(wanted, leaves, grad), atol=1e-3, rtol=1e-3)


def test_rows_that_are_not_contiguous() -> None:
    form = Form((1, 2, 2, 70, 70, 16, 16), is_causal=True)
    query, key, value, grad = (torch.randn(1, 2, 16, 70).mT for _ in range(4))
    layout = torch.tensor([[[1, 0, 0], [1, 1, 1], [0, 0, 1]]], dtype=torch.bool).mT.contiguous().mT
    out, log_sum_exp = gpu.forward(query, key, value, layout, block_size=32, is_causal=True, scale=0.25)
    leaves = [item.detach().requires_grad_() for item in (query, key, value)]
    wanted, _ = plain(*leaves, attends(layout, form), 0.25)
    torch.testing.assert_close(out, wanted)
    found = gpu_backward.backward(grad, None, query, key, value, layout, out, log_sum_exp, block_size=32, is_causal=True, scale=0.25)
    torch.testing.assert_close(found, torch.autograd.grad(wanted, leaves, grad), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("is_causal", [False, True])
def test_masked_blocks_are_never_loaded(is_causal: bool) -> None:
    """NaN in keys and values of the second block, that head 1 alone attends to, and in queries that attend to the first alone."""
    form = Form((1, 2, 1, 96, 96, 16, 16), lead=(2,), is_causal=is_causal)
    layout = torch.tensor([[[1, 0, 0], [1, 0, 0], [1, 0, 1]], [[1, 0, 0], [0, 1, 0], [0, 1, 1]]], dtype=torch.bool)
    query, key, value = inputs_of(form, torch.float32)
    grad = torch.randn_like(query)
    clean = run(query, key, value, grad, layout, is_causal)
    for item in (key, value):
        item[:, :, 32:64] = torch.nan
    query[:, 1, 32:64] = torch.nan
    out, log_sum_exp, grad_query, grad_key, grad_value = run(query, key, value, grad, layout, is_causal)
    for found, wanted in zip((out, log_sum_exp, grad_query), clean[:3], strict=True):
        torch.testing.assert_close(found[:, 0], wanted[:, 0], rtol=0, atol=0)
        assert found[:, 1, 32:].isnan().all()
        torch.testing.assert_close(found[:, 1, :32], wanted[:, 1, :32], rtol=0, atol=0)
    for found in (grad_key, grad_value):
        assert found[:, :, 32:64].isnan().all() and found[:, :, :32].isfinite().all()


def run(query: Tensor, key: Tensor, value: Tensor, grad: Tensor, layout: Tensor, is_causal: bool) -> tuple[Tensor, ...]:
    out, log_sum_exp = gpu.forward(query, key, value, layout, block_size=32, is_causal=is_causal, scale=0.25)
    arguments = (grad, None, query, key, value, layout, out, log_sum_exp)
    return out, log_sum_exp, *gpu_backward.backward(*arguments, block_size=32, is_causal=is_causal, scale=0.25)


def test_the_lists_of_a_layout() -> None:
    layout = torch.tensor([[[1, 0, 0], [1, 1, 0], [0, 1, 1]]], dtype=torch.bool)
    for of_keys, each in ((False, layout), (True, layout.mT)):
        lists = gpu.listed(layout, 2, 3, is_causal=False, of_keys=of_keys)
        assert lists.blocks.shape == (2, 3, 3, 3) and lists.counts.shape == (2, 3, 3)
        for row in range(3):
            count = int(lists.counts[1, 2, row])
            assert lists.blocks[1, 2, row, :count].tolist() == each[0, row].nonzero().flatten().tolist()
    full = torch.ones(2, 4, dtype=torch.bool).expand(1, 2, 4)
    assert gpu.listed(full, 1, 1, is_causal=True).counts.tolist() == [[[1, 2]]]
    assert gpu.listed(full, 1, 1, is_causal=True, of_keys=True).counts.tolist() == [[[2, 1, 0, 0]]]


def test_a_tile_is_no_larger_than_a_block() -> None:
    tiles = Tiles(128, 64, 8, 2)
    assert cut(tiles, 32, 128) == replace(tiles, queries=32, keys=32, num_warps=2)
    assert cut(tiles, 32, 128, by_keys=True) == replace(tiles, queries=32, keys=32, num_warps=4)
    assert cut(tiles, 32, 256) == replace(tiles, queries=32, keys=32)
    assert cut(Tiles(128, 64, 4, 2), 64, 64) == Tiles(64, 64, 4, 2)
    assert cut(tiles, 128, 128) == tiles
