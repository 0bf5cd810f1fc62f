"""Soft caps, windows and the gradient of log_sum_exp: attention written out, its gradients by autograd, and torch's fused CPU kernel."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.kernels import attention as module
from autopar.kernels.attention import attention
from autopar.kernels.attention_masks import Masks
from autopar.kernels.attention_reference import attended, attention_reference
from tests.support.kernels.attention import DROPS, NO_DRAWS, NOTHING, PLAIN, draws_of, kept_of

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = {
    f"{'causal' if is_causal else 'full'}, cap {soft_cap:g}, window {window}": PLAIN
    | {"is_causal": is_causal, "soft_cap": soft_cap, "window": window}
    for is_causal, soft_cap, window in itertools.product((False, True), (0.0, 1.5), (0, 1, 3))
}
MASKS = ["none", "bool", "empty rows", "additive"]


def make_inputs(length: int = 5, key_length: int = 7, value_size: int = 4) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(2, 4, length, 4), (2, 2, key_length, 4), (2, 2, key_length, value_size)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def make_mask(kind: str, length: int = 5, key_length: int = 7) -> Tensor | None:
    if kind == "additive":
        return torch.randn(2, 1, length, key_length, dtype=torch.float64, requires_grad=True)
    if kind == "none":
        return None
    mask = (torch.rand(2, 4, length, key_length) > 0.4).index_fill(-1, torch.tensor([0]), True)
    return mask.index_fill(-2, torch.tensor([1]), False) if kind == "empty rows" else mask


def written_out(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Position by position, and row by row."""
    rows = [[[]] * query.shape[1] for _ in range(query.shape[0])]
    sums = [[[]] * query.shape[1] for _ in range(query.shape[0])]
    whole = None if mask is None else mask.expand(*query.shape[:3], key.shape[2])
    for b, h in itertools.product(range(query.shape[0]), range(query.shape[1])):
        group = h // (query.shape[1] // key.shape[1])
        found = [
            row(query[b, h, s], key[b, group], value[b, group], s, None if whole is None else whole[b, h, s], options)
            for s in range(query.shape[2])
        ]
        rows[b][h], sums[b][h] = torch.stack([out for out, _ in found]), torch.stack([total for _, total in found])  # type: ignore[call-overload]
    return torch.stack([torch.stack(each) for each in rows]), torch.stack([torch.stack(each) for each in sums])  # type: ignore[arg-type]


def row(query: Tensor, key: Tensor, value: Tensor, s: int, mask: Tensor | None, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    cap, window = options["soft_cap"], options["window"]
    weights, values = [], []
    for t in range(len(key)):
        is_masked = mask is not None and mask.dtype == torch.bool and not mask[t]
        if is_masked or (options["is_causal"] and t > s) or (window and abs(s - t) >= window):
            continue
        score = (query * key[t]).sum() * options["scale"]
        score = cap * torch.tanh(score / cap) if cap else score
        weights.append((score + mask[t] if mask is not None and mask.dtype != torch.bool else score).exp())
        values.append(value[t])
    if not weights:
        return value[0] * 0.0, value[0, 0] * 0.0
    total = torch.stack(weights).sum()
    return sum((weight * each for weight, each in zip(weights, values, strict=True)), value[0] * 0.0) / total, total.log()


@pytest.mark.parametrize("mask_kind", MASKS)
@pytest.mark.parametrize("name", list(OPTIONS))
def test_both_results_and_their_gradients(name: str, mask_kind: str) -> None:
    options, inputs, mask = OPTIONS[name], make_inputs(), make_mask(mask_kind)
    leaves = [*inputs, mask] if mask is not None and mask.requires_grad else inputs
    runs: list[list[Tensor]] = []
    for results in (attention(*inputs, mask, *NOTHING[1:], **options), written_out(*inputs, mask, options)):
        torch.manual_seed(1)
        total = sum((result * torch.randn(result.shape, dtype=result.dtype)).sum() for result in results)
        runs.append([*results, *torch.autograd.grad(total, leaves)])  # type: ignore[arg-type]
    for one, other in zip(*runs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", list(OPTIONS))
@pytest.mark.parametrize("drops", [False, True])
def test_gradients_by_small_steps(name: str, drops: bool) -> None:
    """With dropout too, and values of another size: the plain path."""
    inputs, bias = make_inputs(3, 4, 6), torch.randn(1, 4, 3, 1, dtype=torch.float64, requires_grad=True)
    draws = draws_of((2, 4, 3, 4), "a word a row") if drops else NO_DRAWS
    options = OPTIONS[name] | (DROPS if drops else {})

    def call(*operands: Tensor) -> tuple[Tensor, Tensor]:
        return attention(*operands, None, None, *draws, **options)

    assert torch.autograd.gradcheck(call, (*inputs, bias), fast_mode=True)


def masked_wholly(kind: str, dtype: torch.dtype) -> Tensor:
    """[2, 1, 7, 7], added: causal, with one and five keys of padding on the left, whose rows have low numbers alone."""
    lowest = -1e4 if kind == "-1e4" else -1e9 if kind == "-1e9" else torch.finfo(dtype).min
    causal = torch.ones(7, 7, dtype=torch.bool).tril().logical_not()
    padding = (torch.arange(7) < torch.tensor([[1], [5]]))[:, None, None]
    if kind == "added twice":
        return torch.zeros(7, 7, dtype=dtype).masked_fill(causal, lowest) + torch.zeros(2, 1, 1, 7, dtype=dtype).masked_fill(
            padding, lowest
        )
    return torch.zeros(2, 1, 7, 7, dtype=dtype).masked_fill(causal | padding, lowest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["-1e4", "-1e9", "lowest", "added twice"])
@pytest.mark.parametrize("path", ["fused", "plain", "both results", "dropout"])
def test_rows_that_an_added_mask_masks_wholly(path: str, kind: str, dtype: torch.dtype) -> None:
    """Their keys have equal weights of the sum 1, forward and backward: log n does not survive in log_sum_exp there."""
    inputs = [item.detach().to(dtype).requires_grad_() for item in make_inputs(7, 7, 6 if path == "plain" else 4)]
    bias = masked_wholly(kind, torch.float32 if dtype == torch.bfloat16 or kind == "-1e9" else dtype).requires_grad_()
    draws = draws_of((2, 4, 7, 7)) if path == "dropout" else NO_DRAWS
    results = attention(*inputs, bias, None, None, *draws, **PLAIN | (DROPS if path == "dropout" else {}))
    grads = [torch.randn_like(each) for each in results[: 1 + (path == "both results")]]
    ours = [results[0], *torch.autograd.grad(results[: len(grads)], [*inputs, bias], grads)]
    # Scores rounded where the op rounds them, all else in float64. (torch.logsumexp's own backward loses log n, too.)
    leaves = [item.detach().double().requires_grad_() for item in inputs]
    plain, exact = leaves[0] @ leaves[1].repeat_interleave(2, 1).mT * PLAIN["scale"], results[1].dtype
    masks = ((plain.to(exact) + bias.detach().to(exact)).double() - plain).detach().requires_grad_()
    largest = (plain + masks).amax(-1, keepdim=True).detach()
    weights, sums = (plain + masks).softmax(-1), (plain + masks - largest).exp().sum(-1).log() + largest.squeeze(-1)
    kept = kept_of((2, 4, 7, 7), draws, DROPS["keep_below"], DROPS["keep_scale"]) if path == "dropout" else 1.0
    truth = [(weights * kept) @ leaves[2].repeat_interleave(2, 1), sums][: len(grads)]
    theirs = [truth[0], *torch.autograd.grad(truth, [*leaves, masks], [each.double() for each in grads])]
    theirs[-1] = theirs[-1].sum_to_size(bias.shape)
    tolerance = {torch.float64: 1e-6 if kind == "-1e9" else 1e-10, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}[dtype]
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("which", [0, 1])
def test_either_result_alone_has_gradients(which: int) -> None:
    inputs = make_inputs()
    runs = []
    for results in (attention(*inputs, *NOTHING, **PLAIN), attention_reference(*inputs, Masks(**PLAIN))):  # type: ignore[call-arg]
        result = results[which]
        runs.append(torch.autograd.grad(result.square().sum(), inputs[: 3 - which]))
    for one, other in zip(*runs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask_kind", MASKS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_windows_of_the_fused_kernel(dtype: torch.dtype, mask_kind: str, is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    options = PLAIN | {"window": 3, "is_causal": is_causal}
    inputs = [item.detach().to(dtype).requires_grad_() for item in make_inputs(20, 33)]
    mask = make_mask(mask_kind, 20, 33)
    mask = mask if mask is None or mask.dtype == torch.bool else mask.detach().to(dtype)
    runs = []
    for has_flash in (True, False):
        monkeypatch.setattr(module, "_has_flash", lambda *_, answer=has_flash: answer)
        out, log_sum_exp = attention(*inputs, mask, *NOTHING[1:], **options)
        runs.append([out, log_sum_exp, *torch.autograd.grad(out.sum(), inputs)])
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2}[dtype]
    for one, other in zip(*runs, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


# By name: ids of the five queries and of the seven keys. "alone": each document has one token; "unequal": some lack keys, some queries.
DOCUMENTS = {
    "packed": ([[0, 0, 1, 1, 2], [0, 0, 0, 0, 1]], [[0, 0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 1, 1, 1]]),
    "for all samples": ([[0, 0, 1, 1, 2]], [[0, 0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 1, 1, 1]]),
    "alone": ([[0, 1, 2, 3, 4]], [[0, 1, 2, 3, 4, 5, 6]]),
    "unequal": ([[-1, 7, 2, 2, 0], [9, 9, 9, 9, 9]], [[2, 0, 5, 7, 0, 5, 2]]),
}


@pytest.mark.parametrize("mask_kind", MASKS)
@pytest.mark.parametrize("name", list(DOCUMENTS))
def test_documents_are_the_mask_of_equal_ids(name: str, mask_kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both results, and all gradients, in the fused kernel and in the plain path, with every option."""
    of_query, of_key = torch.tensor(DOCUMENTS[name][0]), torch.tensor(DOCUMENTS[name][1], dtype=torch.int32)
    same = (of_query[:, :, None] == of_key[:, None, :])[:, None]
    inputs, mask = make_inputs(), make_mask(mask_kind)
    leaves = [*inputs, mask] if mask is not None and mask.requires_grad else inputs
    for has_flash, options in itertools.product((True, False), OPTIONS.values()):
        monkeypatch.setattr(module, "_has_flash", lambda *arguments, answer=has_flash: answer and not arguments[2].soft_cap)
        whole = same if mask is None else same & mask if mask.dtype == torch.bool else mask.masked_fill(~same, -torch.inf)
        runs: list[list[Tensor]] = []
        for call in ((mask, of_query, of_key), (whole, None, None)):
            torch.manual_seed(1)
            results = attention(*inputs, *call, *NOTHING[3:], **options)
            total = sum((result * torch.randn(result.shape, dtype=result.dtype)).sum() for result in results)
            runs.append([*results, *torch.autograd.grad(total, leaves)])  # type: ignore[arg-type]
        for one, other in zip(*runs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_documents_are_attended_to_one_by_one() -> None:
    """Causal attention over a packed sequence is that over each document, cut out; what has no key of its own is zero."""
    inputs, ids = make_inputs(7, 7), torch.tensor([[4, 4, 4, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1]])
    out, log_sum_exp = attention(*inputs, None, ids, ids, *NOTHING[3:], **PLAIN | {"is_causal": True})
    for sample, start, end in ((0, 0, 3), (0, 3, 7), (1, 0, 1), (1, 1, 7)):
        cut = [item[sample : sample + 1, :, start:end] for item in inputs]
        alone = attention(*cut, *NOTHING, **PLAIN | {"is_causal": True})
        torch.testing.assert_close(out[sample, :, start:end], alone[0][0])
        torch.testing.assert_close(log_sum_exp[sample, :, start:end], alone[1][0])
    out, log_sum_exp = attention(*inputs, None, ids, ids + 10, *NOTHING[3:], **PLAIN)
    assert not bool(out.any()) and not bool(log_sum_exp.any())
    assert all(not bool(each.any()) for each in torch.autograd.grad(out.sum() + log_sum_exp.sum(), inputs))


@pytest.mark.parametrize(
    ("of_query", "of_key", "message"),
    [
        (torch.zeros(2, 5, dtype=torch.int64), None, "query_documents are given alone"),
        (None, torch.zeros(2, 7, dtype=torch.int64), "key_documents are given alone"),
        (torch.zeros(2, 7, dtype=torch.int64), torch.zeros(2, 7, dtype=torch.int64), r"query_documents are \(2, 7\), not \(2, 5\)"),
        (torch.zeros(2, 5, dtype=torch.int64), torch.zeros(7, dtype=torch.int64), r"key_documents are \(7,\), not \(2, 7\) or \(1, 7\)"),
        (torch.zeros(2, 5), torch.zeros(2, 7, dtype=torch.int64), "query_documents are of torch.float32: ids are integers"),
    ],
)
def test_documents_that_do_not_fit_are_refused_when_traced(of_query: Tensor | None, of_key: Tensor | None, message: str) -> None:
    operands = [item.detach().to("meta") for item in make_inputs()]
    documents = [None if ids is None else ids.to("meta") for ids in (of_query, of_key)]
    with pytest.raises((ValueError, RuntimeError), match=message):
        attention(*operands, None, *documents, *NOTHING[3:], **PLAIN)


def test_sinks_by_the_sum() -> None:
    """out · sigmoid(log_sum_exp − sink) is attention with one more key of score `sink` and of no value."""
    inputs, sinks = make_inputs(), torch.randn(4, dtype=torch.float64, requires_grad=True)
    out, log_sum_exp = attention(*inputs, *NOTHING, **PLAIN)
    ours = out * (log_sum_exp - sinks[:, None]).sigmoid()[..., None]
    query, key, value = inputs
    scores = query @ key.repeat_interleave(2, 1).mT * 0.3
    weights = torch.cat([scores, sinks[:, None, None].expand(2, 4, 5, 1)], -1).softmax(-1)[..., :-1]
    theirs = weights @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    leaves = [*inputs, sinks]
    for one, other in zip(*(torch.autograd.grad(each.square().sum(), leaves) for each in (ours, theirs)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_which_positions_attend() -> None:
    text = ["".join("#" if each else "." for each in line) for line in attended(5, 6, False, 2, torch.device("cpu")).tolist()]
    assert text == ["##....", "###...", ".###..", "..###.", "...###"]
    assert bool((attended(4, 4, True, 0, torch.device("cpu")) == torch.ones(4, 4).tril().bool()).all())
    assert attended(4, 4, True, 2, torch.device("cpu")).sum(-1).tolist() == [1, 2, 2, 2]


def test_scores_near_the_cap_stay_finite() -> None:
    query, key, value = (item * 1e4 for item in make_inputs())
    out, log_sum_exp = attention(query, key, value, *NOTHING, **PLAIN | {"soft_cap": 30.0})
    assert bool(out.isfinite().all()) and float(log_sum_exp.detach().abs().max()) <= 30.0 + math.log(7)
    leaves = [query.detach().requires_grad_(), key.detach().requires_grad_()]
    out, _ = attention(*leaves, value.detach(), *NOTHING, **PLAIN | {"soft_cap": 30.0})
    assert all(bool(each.isfinite().all()) for each in torch.autograd.grad(out.sum(), leaves))


@pytest.mark.parametrize(("option", "message"), [({"window": -1}, "window is -1"), ({"soft_cap": -2.0}, "soft cap is -2")])
def test_options_without_a_meaning_are_refused_when_traced(option: dict[str, Any], message: str) -> None:
    with torch.device("meta"), pytest.raises((ValueError, RuntimeError), match=message):
        attention(torch.empty(1, 1, 2, 4), torch.empty(1, 1, 2, 4), torch.empty(1, 1, 2, 4), *NOTHING, **PLAIN | option)
