"""The attention kernels against float64: masks of every kind, grouped heads, unequal lengths, head sizes of every block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.kernels.attention_masks import Masks
from autopar.kernels.attention_reference import (
    attention_backward_reference,
    attention_mask_gradient_reference,
    attention_reference,
)
from autopar.kernels.gpu import attention as gpu
from autopar.kernels.gpu import attention_backward as gpu_backward
from autopar.kernels.gpu import attention_mask_gradient as gpu_mask
from autopar.kernels.gpu.attention_scores import require_addressable
from tests.support.kernels.accuracy import GRADIENT_FACTOR, assert_accurate
from tests.support.kernels.attention import KINDS, draws_of, heads_of, kept_of

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DROPS: dict[str, Any] = {"keep_below": round(0.7 * 2**32), "keep_scale": 1 / 0.7}


@dataclass(frozen=True)
class Form:
    """B, H, G, S, T, D, E, and what is masked; whether log_sum_exp gets a gradient, too."""

    shape: tuple[int, ...] = (1, 2, 2, 70, 70, 16, 16)
    mask: str = ""
    is_causal: bool = False
    window: int = 0
    soft_cap: float = 0.0
    drops: str = ""
    both: bool = False
    size: float = 1.0
    documents: str = ""


FORMS = {
    "full": Form(),
    "causal": Form(is_causal=True),
    "causal, more queries": Form((1, 2, 1, 150, 70, 16, 16), is_causal=True),
    "causal, more keys": Form((1, 2, 1, 70, 150, 16, 16), is_causal=True),
    "grouped heads": Form((2, 6, 2, 33, 65, 16, 16)),
    "one position": Form((1, 1, 1, 1, 1, 16, 16)),
    "one query": Form((2, 4, 2, 1, 130, 32, 32)),
    "window": Form((1, 2, 1, 150, 150, 16, 16), is_causal=True, window=20),
    "window on both sides": Form((1, 1, 1, 150, 140, 16, 16), window=7),
    "window of one": Form((1, 1, 1, 33, 40, 16, 16), window=1),
    "window, more queries": Form((1, 2, 1, 150, 70, 16, 16), is_causal=True, window=9),
    "window, more keys, and a mask": Form((1, 2, 1, 40, 150, 16, 16), mask="bool", window=33),
    "window and an added mask": Form((2, 2, 1, 70, 70, 16, 16), mask="added", is_causal=True, window=20),
    "soft-cap": Form(is_causal=True, soft_cap=2.0, size=3.0),
    "soft-cap and an added mask": Form((2, 2, 2, 33, 70, 16, 16), mask="added", soft_cap=1.5),
    "soft-cap and a window": Form((1, 2, 1, 150, 150, 16, 16), is_causal=True, soft_cap=2.0, window=20),
    "soft-cap and dropout": Form(drops="one word", soft_cap=2.0),
    "both results": Form((2, 6, 2, 33, 65, 16, 16), both=True),
    "both results, causal": Form((1, 2, 1, 70, 70, 24, 16), is_causal=True, both=True),
    "both results, rows that attend to nothing": Form(mask="empty rows", both=True),
    "both results, with all options": Form((2, 2, 1, 70, 70, 16, 16), "added", True, 20, 2.0, "a word a row", both=True),
    "bool mask": Form(mask="bool"),
    "rows that attend to nothing": Form(mask="empty rows"),
    "mask of keys": Form((2, 2, 1, 33, 70, 16, 16), mask="keys"),
    "added mask": Form((2, 2, 2, 33, 70, 16, 16), mask="added"),
    "causal with an added mask": Form((2, 2, 1, 70, 70, 16, 16), mask="added", is_causal=True),
    "dropout": Form(drops="one word", is_causal=True),
    "dropout, grouped heads, a ragged end": Form((2, 6, 2, 33, 65, 16, 16), drops="rows for all heads, a word a sample"),
    "dropout, rows for all samples": Form((2, 2, 1, 70, 150, 16, 16), drops="rows for all samples"),
    "dropout, a word a row": Form((2, 2, 1, 70, 33, 24, 48), drops="a word a row"),
    "dropout and rows that attend to nothing": Form((2, 2, 1, 70, 70, 16, 16), mask="empty rows", drops="one word", both=True),
    "dropout and an added mask": Form((2, 2, 1, 70, 70, 16, 16), mask="added", drops="one word"),
    "dropout and a window": Form((1, 2, 1, 150, 150, 16, 16), is_causal=True, window=20, drops="one word"),
    "no power of two": Form((1, 2, 1, 40, 40, 80, 80)),
    "values of another size": Form((1, 2, 1, 40, 40, 24, 48)),
    "heads of 64": Form((1, 1, 1, 40, 70, 64, 64), is_causal=True),
    "heads of 128": Form((1, 1, 1, 40, 70, 128, 128), is_causal=True),
    "heads of 256": Form((1, 1, 1, 40, 40, 256, 256), is_causal=True),
    "documents": Form((2, 2, 1, 150, 150, 16, 16), documents="in order"),
    "documents, causal": Form((2, 2, 1, 150, 150, 16, 16), is_causal=True, documents="in order"),
    "documents in any order": Form((1, 2, 1, 150, 70, 16, 16), documents="mixed"),
    "documents in any order, causal": Form((2, 4, 2, 70, 70, 16, 16), is_causal=True, documents="mixed", both=True),
    "documents for all samples, more keys": Form((2, 2, 1, 40, 150, 16, 16), documents="for all"),
    "documents and a window": Form((1, 2, 1, 150, 150, 16, 16), is_causal=True, window=20, documents="in order"),
    "documents, a soft cap and dropout": Form((1, 2, 1, 70, 70, 16, 16), soft_cap=2.0, drops="one word", documents="in order"),
    "documents and dropout, a word a row": Form((2, 2, 1, 70, 150, 16, 16), drops="a word a row", documents="mixed"),
    "documents and an added mask": Form((2, 2, 1, 70, 150, 16, 16), mask="added", documents="mixed"),
    "documents and a bool mask": Form((2, 2, 1, 70, 70, 16, 16), mask="bool", is_causal=True, documents="in order"),
    "huge scores": Form(size=30.0),
    "tiny scores": Form(size=1e-4),
}


def mask_of(form: Form, dtype: torch.dtype) -> Tensor | None:
    batch, heads, _, length, key_length = form.shape[:5]
    if form.mask == "bool":
        return torch.rand(batch, heads, length, key_length) > 0.4
    if form.mask == "empty rows":
        return (torch.rand(batch, 1, length, key_length) > 0.4).index_fill(-2, torch.tensor([0, length - 1]), False)
    if form.mask == "keys":
        return (torch.rand(batch, 1, 1, key_length) > 0.4).index_fill(-1, torch.tensor([0]), True)
    return torch.randn(1, heads, length, key_length).to(dtype) if form.mask else None


def documents_of(form: Form) -> tuple[Tensor | None, Tensor | None]:
    """Ids of queries and of keys; of the former some that no key has."""
    batch, _, _, length, key_length = form.shape[:5]
    batch = 1 if form.documents == "for all" else batch
    of_query, of_key = torch.randint(-1, 4, (batch, length)), torch.randint(0, 4, (batch, key_length), dtype=torch.int32)
    if form.documents == "mixed":
        return of_query, of_key
    of_query, of_key = of_query.sort().values, of_key.sort().values
    return (of_query, of_query if length == key_length else of_key) if form.documents else (None, None)


def plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    keep: Tensor | None,
    form: Form,
    scale: float,
    documents: tuple[Tensor | None, Tensor | None] = (None, None),
) -> list[Tensor]:
    """Attention written out, every op rounding to the dtype of the query, and the logarithms of its sums."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.mT * scale
    if form.soft_cap:
        scores = form.soft_cap * (scores / form.soft_cap).tanh()
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask
    attends = torch.ones(scores.shape[-2:], dtype=torch.bool).expand(scores.shape)
    s, t = torch.arange(scores.shape[-2])[:, None], torch.arange(scores.shape[-1])
    attends = attends & (t <= s) if form.is_causal else attends
    attends = attends & ((s - t).abs() < form.window) if form.window else attends
    attends = attends & mask if mask is not None and mask.dtype == torch.bool else attends
    if documents[0] is not None and documents[1] is not None:
        attends = attends & (documents[0][:, None, :, None] == documents[1][:, None, None, :])
    # A row that attends to nothing: a softmax over equal scores, then zero.
    scores = scores.masked_fill(~attends, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1).masked_fill(~attends, 0.0)
    # −inf only where the row has a key: the gradient of a logarithm of nothing is NaN.
    empty = ~attends.any(-1, keepdim=True)
    log_sum_exp = scores.masked_fill(~attends & ~empty, -torch.inf).logsumexp(-1).masked_fill(empty.squeeze(-1), 0.0)
    return [(weights if keep is None else weights * keep.to(weights.dtype)) @ value, log_sum_exp]


# Heads of more than 64 in float32 are the reference's.
CASES = [(name, dtype) for name in FORMS for dtype in DTYPES if dtype != torch.float32 or FORMS[name].shape[-1] <= 64]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_forms(name: str, dtype: torch.dtype) -> None:
    form = FORMS[name]
    batch, heads, groups, length, key_length, size, value_size = form.shape
    query = heads_of(batch, heads, length, size, dtype) * form.size
    key, value = heads_of(batch, groups, key_length, size, dtype), heads_of(batch, groups, key_length, value_size, dtype)
    mask, scale = mask_of(form, dtype), size**-0.5
    scores = (batch, heads, length, key_length)
    draws = draws_of(scores, form.drops) if form.drops else (None, None, None)
    keep = kept_of(scores, draws, **DROPS) if form.drops else None  # type: ignore[arg-type]
    grad, grad_sum = torch.randn(batch, heads, length, value_size).to(dtype), torch.randn(batch, heads, length) if form.both else None
    documents = documents_of(form)
    options: dict[str, Any] = {"is_causal": form.is_causal, "scale": scale, "soft_cap": form.soft_cap, "window": form.window}
    masks = Masks(mask, *documents, *draws, **options | (DROPS if form.drops else {}))
    out, log_sum_exp = gpu.forward(query, key, value, masks)
    has_bias = mask is not None and mask.dtype != torch.bool
    grads = gpu_backward.backward(grad, grad_sum, query, key, value, out, log_sum_exp, masks)
    if has_bias:
        grads = (*grads, gpu_mask.mask_gradient(grad, grad_sum, query, key, value, out, log_sum_exp, masks))
    runs: list[tuple[Tensor, ...]] = []
    for precision in (dtype, torch.float64):
        leaves: list[Any] = [item.detach().to(precision).requires_grad_() for item in (query, key, value)]
        bias = mask.to(precision).requires_grad_() if mask is not None and has_bias else mask
        results = plain(*leaves, bias, keep, form, scale, documents)[: 1 + form.both]
        wanted = [*leaves, bias] if has_bias else leaves
        incoming = [each.to(precision) for each in (grad, grad_sum) if each is not None]
        runs.append((results[0].detach(), *torch.autograd.grad(results, wanted, incoming)))  # type: ignore[arg-type]
    same, exact = runs
    assert_accurate(out, same[0], exact[0])
    largest = max(float(item.abs().max()) for item in exact[1:])
    for ours, one, other in zip(grads, same[1:], exact[1:], strict=True):
        assert_accurate(ours.to(dtype), one, other, factor=GRADIENT_FACTOR, largest=largest)


PADDED = {
    "a mask of keys, causal": Form((2, 2, 1, 70, 70, 16, 16), is_causal=True, both=True),
    "full": Form((2, 2, 2, 33, 70, 16, 24)),
    "soft-cap and dropout": Form((2, 2, 2, 33, 70, 16, 16), soft_cap=1.5, drops="a word a row", both=True),
    "a window": Form((2, 2, 1, 70, 70, 16, 16), is_causal=True, window=9),
    "documents": Form((2, 2, 1, 70, 70, 16, 16), documents="in order", both=True),
}


@pytest.mark.parametrize("lowest", [-1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("name", list(PADDED))
def test_rows_that_an_added_mask_masks_wholly(name: str, lowest: float) -> None:
    """As in the reference, forward and backward: their keys weigh alike, and their log_sum_exp cannot say how much."""
    form = PADDED[name]
    batch, heads, groups, length, key_length, size, value_size = form.shape
    query, key = heads_of(batch, heads, length, size, torch.float32), heads_of(batch, groups, key_length, size, torch.float32)
    value, grad = heads_of(batch, groups, key_length, value_size, torch.float32), torch.randn(batch, heads, length, value_size)
    grad_sum = torch.randn(batch, heads, length) if form.both else None
    if form.is_causal:
        mask = torch.zeros(batch, 1, 1, key_length)
        mask[1, ..., :40] = lowest
    else:
        mask = torch.where(torch.rand(batch, 1, length, key_length) > 0.5, lowest, torch.randn(()))
        mask[:, :, 3:20] = lowest
    draws = draws_of((batch, heads, length, key_length), form.drops) if form.drops else (None, None, None)
    options: dict[str, Any] = {"is_causal": form.is_causal, "scale": 0.25, "soft_cap": form.soft_cap, "window": form.window}
    masks = Masks(mask, *documents_of(form), *draws, **options | (DROPS if form.drops else {}))
    runs: list[list[Tensor]] = []
    for forward, backward, mask_gradient in (
        (gpu.forward, gpu_backward.backward, gpu_mask.mask_gradient),
        (attention_reference, attention_backward_reference, attention_mask_gradient_reference),
    ):
        results = forward(query, key, value, masks)
        operands = (grad, grad_sum, query, key, value, *results, masks)
        runs.append([*results, *backward(*operands), mask_gradient(*operands)])
    for one, other in zip(*runs, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


def test_log_sum_exp_and_layouts() -> None:
    query, key = heads_of(2, 4, 33, 16, torch.float32), heads_of(2, 2, 70, 16, torch.float32)
    masks = Masks(torch.rand(2, 1, 33, 70) > 0.5, is_causal=False, scale=0.25)
    out, log_sum_exp = gpu.forward(query, key, key, masks)
    scores = (query @ key.repeat_interleave(2, 1).mT * 0.25).masked_fill(~masks.mask, -torch.inf)  # type: ignore[operator]
    torch.testing.assert_close(log_sum_exp, scores.logsumexp(-1))
    assert out.transpose(1, 2).is_contiguous() and log_sum_exp.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("kind", list(KINDS))
def test_what_is_dropped_is_drawn_as_by_plain_ops(kind: str) -> None:
    """Bit by bit, at the ends of what is kept: values that are the identity make the output the probabilities."""
    query, key, value = heads_of(2, 4, 33, 16, torch.float32), heads_of(2, 2, 50, 16, torch.float32), torch.eye(50).expand(2, 2, 50, 50)
    draws = draws_of((2, 4, 33, 50), kind)
    for keep_below in (1, round(0.3 * 2**32), 2**32):
        masks = Masks(None, None, None, *draws, is_causal=False, scale=0.25, keep_below=keep_below, keep_scale=3.0)
        out, log_sum_exp = gpu.forward(query, key, value, masks)
        keep = kept_of((2, 4, 33, 50), draws, keep_below, 3.0)
        whole, sums = gpu.forward(query, key, value, Masks(is_causal=False, scale=0.25))
        assert torch.equal(out != 0, keep != 0) and torch.equal(log_sum_exp, sums)
        torch.testing.assert_close(out, whole * keep.float())


def test_dropout_of_everything_is_zero() -> None:
    query, key, grad = heads_of(1, 2, 33, 16, torch.float32), heads_of(1, 2, 40, 16, torch.float32), torch.randn(1, 2, 33, 16)
    masks = Masks(None, None, None, *draws_of((1, 2, 33, 40)), is_causal=True, scale=0.25, keep_below=1, keep_scale=0.0)
    out, log_sum_exp = gpu.forward(query, key, key, masks)
    found = gpu_backward.backward(grad, None, query, key, key, out, log_sum_exp, masks)
    assert all(bool((each == 0).all()) for each in (out, *found)) and bool((log_sum_exp != 0).any())


@pytest.mark.parametrize("shape", [(2, 4, 33, 40), (1, 4, 33, 40), (2, 1, 33, 40), (33, 40), (1, 1, 1, 40), (2, 1, 33, 1)])
def test_the_gradient_of_a_mask_is_summed_to_its_shape(shape: tuple[int, ...]) -> None:
    query, key = heads_of(2, 4, 33, 16, torch.float32), heads_of(2, 2, 40, 16, torch.float32)
    mask = torch.randn(shape, requires_grad=True)
    masks, grad = Masks(mask.detach(), is_causal=False, scale=0.25), torch.randn(2, 4, 33, 16)
    found = gpu_mask.mask_gradient(grad, None, query, key, key, *gpu.forward(query, key, key, masks), masks)
    (expected,) = torch.autograd.grad(plain(query, key, key, mask, None, Form(), 0.25)[0], mask, grad)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_very_negative_scores_beside_a_ragged_end() -> None:
    """Beyond the last key a score of 0 is far above all others, and its exponential would be infinite."""
    query, key, value, grad = (torch.randn(1, 1, length, 16) for length in (70, 41, 41, 70))
    leaves = [item.requires_grad_() for item in (query + 8.0, key - 8.0, value)]
    masks = Masks(is_causal=False, scale=0.25)
    expected = torch.autograd.grad(plain(*leaves, None, None, Form(), 0.25)[0], leaves, grad)
    operands = [item.detach() for item in leaves]
    found = gpu_backward.backward(grad, None, *operands, *gpu.forward(*operands, masks), masks)
    # A log_sum_exp of −256 is rounded to 1.5e-5, and so is what its exponentials are multiplied by.
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def test_rows_that_are_not_contiguous() -> None:
    query, key, value = (torch.randn(1, 2, 16, 33).mT for _ in range(3))
    out, log_sum_exp = gpu.forward(query, key, value, masks := Masks(is_causal=True, scale=0.25))
    torch.testing.assert_close(out, plain(query, key, value, None, None, Form(is_causal=True), 0.25)[0])
    grad = torch.randn(1, 2, 16, 33).mT
    leaves = [item.detach().requires_grad_() for item in (query, key, value)]
    expected = torch.autograd.grad(plain(*leaves, None, None, Form(is_causal=True), 0.25)[0], leaves, grad)
    found = gpu_backward.backward(grad, None, query, key, value, out, log_sum_exp, masks)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("is_causal", [False, True])
def test_tiles_that_no_document_reaches_are_not_loaded(is_causal: bool) -> None:
    """NaN in them shows nowhere: neither in keys 32 to 96, whose document no query has, nor in queries 64 to 96, whose no key has."""
    query, key, value = (heads_of(1, 2, 160, 16, torch.float32) for _ in range(3))
    grad = torch.randn(1, 2, 160, 16)
    of_query = torch.tensor([0] * 64 + [9] * 32 + [1] * 64)[None]
    of_key = torch.tensor([0] * 32 + [5] * 64 + [1] * 64)[None]
    leaves = [item.detach().requires_grad_() for item in (query, key, value)]
    results = plain(*leaves, None, None, Form(is_causal=is_causal), 0.25, (of_query, of_key))
    expected = torch.autograd.grad(results[0], leaves, grad)
    for item, planted in ((query, slice(64, 96)), (grad, slice(64, 96)), (key, slice(32, 96)), (value, slice(32, 96))):
        item[:, :, planted] = torch.nan
    masks = Masks(None, of_query, of_key, is_causal=is_causal, scale=0.25)
    out, log_sum_exp = gpu.forward(query, key, value, masks)
    found = gpu_backward.backward(grad, None, query, key, value, out, log_sum_exp, masks)
    for one, other in zip((out, log_sum_exp, *found), (*results, *expected), strict=True):
        torch.testing.assert_close(one, other.detach(), atol=1e-5, rtol=1e-4)


def test_rows_beyond_32_bit_offsets_are_refused() -> None:
    far = torch.empty_strided((1, 1, 64, 16), (1, 1, 34_100_000, 1), device="meta")
    with pytest.raises(ValueError, match=r"rows of one sample of \(1, 1, 64, 16\) span 2182400000 elements"):
        require_addressable(far)
