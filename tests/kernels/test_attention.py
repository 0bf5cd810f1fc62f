"""The attention op against attention written out in float64: values, gradients, layouts, tracing, dispatch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.kernels import attention as module
from autopar.kernels.attention import attention, attention_backward, attention_mask_gradient
from autopar.kernels.attention_masks import Draws, Masks
from autopar.kernels.attention_reference import attention_backward_reference, attention_reference
from autopar.kernels.gpu import attention_aten
from tests.support.kernels.attention import DROPS, NO_DRAWS, NOTHING, PLAIN, draws_of, kept_of
from tests.support.kernels.tracing import assert_traceable

pytestmark = pytest.mark.usefixtures("one_thread")

# B, H, G, S, T, D, E
SHAPES = [
    (2, 4, 4, 6, 6, 8, 8),
    (2, 4, 2, 5, 9, 8, 8),
    (2, 6, 2, 9, 5, 8, 8),
    (1, 1, 1, 1, 1, 4, 4),
    (1, 2, 1, 33, 65, 16, 16),
    (2, 4, 2, 5, 7, 8, 12),
]
MASKS = ["none", "bool", "empty rows", "keys", "additive", "two dims"]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}


def written_out(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, keep: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    """Attention, step by step, in float64."""
    query, key, value = query.double(), key.double(), value.double()
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.mT * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    weights = (scores - scores.amax(-1, keepdim=True).detach().nan_to_num(neginf=0.0)).exp()
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)
    return (weights if keep is None else weights * keep.double()) @ value


def make_mask(kind: str, batch: int, num_heads: int, length: int, key_length: int, dtype: torch.dtype) -> Tensor | None:
    if kind == "bool":
        return (torch.rand(batch, num_heads, length, key_length) > 0.4).index_fill(-1, torch.tensor([0]), True)
    if kind == "empty rows":
        return (torch.rand(batch, 1, length, key_length) > 0.4).index_fill(-2, torch.tensor([0, length // 2]), False)
    if kind == "keys":
        return (torch.rand(batch, 1, 1, key_length) > 0.4).index_fill(-1, torch.tensor([0]), True)
    if kind == "additive":
        return torch.randn(batch, 1, length, key_length, dtype=dtype)
    return torch.randn(length, key_length) if kind == "two dims" else None


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value as a model has them: heads split off the last dim, then transposed."""
    batch, num_heads, num_groups, length, key_length, head_size, value_size = shape
    torch.manual_seed(0)
    query = torch.randn(batch, length, num_heads, head_size, dtype=dtype).transpose(1, 2)
    key = torch.randn(batch, key_length, num_groups, head_size, dtype=dtype).transpose(1, 2)
    value = torch.randn(batch, key_length, num_groups, value_size, dtype=dtype).transpose(1, 2)
    return query, key, value


def results(
    op_inputs: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, draws: Draws | None, grad: Tensor, is_causal: bool
) -> list[Tensor]:
    options = PLAIN | (DROPS if draws else {}) | {"is_causal": is_causal}
    operands = (*op_inputs, mask, None, None, *(draws or NO_DRAWS))
    out, log_sum_exp = attention(*operands, **options)
    return [out, *attention_backward(grad, None, *operands, out, log_sum_exp, **options)]


def wanted_results(
    op_inputs: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, draws: Draws | None, grad: Tensor, is_causal: bool
) -> list[Tensor]:
    leaves = [item.detach().double().requires_grad_() for item in op_inputs]
    keep = kept_of((*op_inputs[0].shape[:3], op_inputs[1].shape[2]), draws, **DROPS) if draws else None
    out = written_out(*leaves, mask, keep, is_causal, 0.3)
    return [out, *torch.autograd.grad(out, leaves, grad.double())]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    batch, num_heads, _, length, key_length, _, value_size = shape
    torch.manual_seed(1)
    for kind, is_causal, drops in itertools.product(MASKS, (False, True), (False, True)):
        inputs = make_inputs(shape, dtype)
        mask = make_mask(kind, batch, num_heads, length, key_length, dtype)
        draws = draws_of((batch, num_heads, length, key_length)) if drops else None
        grad = torch.randn(batch, num_heads, length, value_size, dtype=dtype)
        got, wanted = results(inputs, mask, draws, grad, is_causal), wanted_results(inputs, mask, draws, grad, is_causal)
        for name, one, other in zip(("out", "query", "key", "value"), got, wanted, strict=True):
            assert one.dtype == dtype
            error = (one.double() - other).abs().max() / other.abs().max().clamp_min(1.0)
            assert error <= TOLERANCE[dtype], f"{name} with mask {kind!r}, causal {is_causal}, dropout {drops}: {error:.2e}"


def test_the_plain_path_is_what_the_fused_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """So is log_sum_exp, which the one may be given by the other."""
    inputs = make_inputs((2, 4, 2, 6, 7, 8, 8), torch.float64)
    mask = make_mask("empty rows", 2, 4, 6, 7, torch.float64)
    fused = attention(*inputs, mask, *NOTHING[1:], **PLAIN | {"is_causal": True})
    monkeypatch.setattr(module, "_has_flash", lambda *_: False)
    plain = attention(*inputs, mask, *NOTHING[1:], **PLAIN | {"is_causal": True})
    for one, other in zip(fused, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        assert one.stride() == other.stride()


def test_rows_that_attend_to_nothing_are_zero() -> None:
    inputs = make_inputs((2, 4, 2, 6, 7, 8, 8), torch.float32)
    mask = torch.zeros(6, 7, dtype=torch.bool)
    for draws in (None, draws_of((2, 4, 6, 7))):
        assert all(not item.any() for item in results(inputs, mask, draws, torch.randn(2, 4, 6, 8), False))


@pytest.mark.parametrize("kernel", ["triton", "aten"])
def test_which_kernel_a_gpu_runs_is_nothing_to_a_cpu(kernel: str) -> None:
    inputs = make_inputs((2, 4, 2, 6, 7, 8, 8), torch.float32)
    for one, other in zip(
        attention(*inputs, *NOTHING, **PLAIN | {"implementation": kernel}), attention(*inputs, *NOTHING, **PLAIN), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("position", range(3))
def test_any_strides_of_the_inputs(position: int) -> None:
    """torch's kernel is silently wrong when the last stride is not 1."""
    inputs = list(make_inputs((2, 4, 2, 6, 7, 8, 8), torch.float64))
    grad = torch.randn((), dtype=torch.float64).expand(2, 4, 6, 8)
    wanted = wanted_results(tuple(inputs), None, None, grad, False)
    inputs[position] = inputs[position].mT.contiguous().mT
    assert inputs[position].stride(-1) != 1
    for one, other in zip(results(tuple(inputs), None, None, grad, False), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3]], ids=str)
def test_torchs_own_checks(shape: tuple[int, ...], drops: bool) -> None:
    """Schema, autograd registration, and fake values equal to real ones down to the strides, forward and backward."""
    batch, num_heads, _, length, key_length, _, value_size = shape
    inputs = tuple(item.requires_grad_() for item in make_inputs(shape, torch.float32))
    options = PLAIN | (DROPS if drops else {})
    masking = (None, None, None, *(draws_of((batch, num_heads, length, key_length)) if drops else NO_DRAWS))
    torch.library.opcheck(attention, (*inputs, *masking), options)
    out, log_sum_exp = (item.detach() for item in attention(*inputs, *masking, **options))
    grad = torch.randn(batch, num_heads, length, value_size)
    detached = tuple(item.detach() for item in inputs)
    torch.library.opcheck(attention_backward, (grad, None, *detached, *masking, out, log_sum_exp), options)


def test_torchs_gpu_kernel_runs_where_it_is_asked_for_and_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for a gradient of log_sum_exp, which it does not take."""
    calls: list[str] = []

    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        calls.append("forward")
        return attention_reference(*arguments)

    def backward(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        calls.append("backward")
        return attention_backward_reference(grad, None, *arguments)

    monkeypatch.setattr(module, "_runs_aten", lambda query, key, value, masks: masks.implementation == "aten")
    monkeypatch.setattr(attention_aten, "forward", forward)
    monkeypatch.setattr(attention_aten, "backward", backward)
    for kernel, which, expected in (("aten", 0, ["forward", "backward"]), ("aten", 1, ["forward"]), ("triton", 0, [])):
        calls.clear()
        inputs = [item.requires_grad_() for item in make_inputs(SHAPES[1], torch.float64)]
        results = attention(*inputs, *NOTHING, **PLAIN | {"implementation": kernel})
        found = torch.autograd.grad(results[which].square().sum(), inputs[:2])
        assert calls == expected
        plain = attention_reference(*inputs, Masks(is_causal=False, scale=0.3))
        for one, other in zip(found, torch.autograd.grad(plain[which].square().sum(), inputs[:2]), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_one_node_each_way_in_a_trace() -> None:
    inputs = tuple(item.requires_grad_() for item in make_inputs(SHAPES[0], torch.float32))

    def step(*operands: Tensor) -> tuple[Tensor, ...]:
        out, _ = attention(*operands, *NOTHING, **PLAIN | {"is_causal": True})
        return torch.autograd.grad(out.sum(), operands)

    targets = [node.target for node in make_fx(step, tracing_mode="fake")(*inputs).graph.nodes]
    assert targets.count(attention) == targets.count(attention_backward) == 1
    assert not any("matmul" in str(target) or "softmax" in str(target) or "flash" in str(target) for target in targets)


@pytest.mark.parametrize("shape", [(6, 6), (4, 6, 6), (1, 4, 6, 6), (2, 1, 6, 6), (2, 1, 1, 6), (2, 4, 6, 1)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_an_added_mask_has_a_gradient_of_its_shape(shape: tuple[int, ...], is_causal: bool) -> None:
    """T5's and Swin's learned biases."""
    inputs = [item.requires_grad_() for item in make_inputs((2, 4, 2, 6, 6, 8, 8), torch.float64)]
    bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)

    def call(*inputs: Tensor) -> Tensor:
        return attention(*inputs, *NOTHING[1:], **PLAIN | {"is_causal": is_causal})[0]

    assert torch.autograd.gradcheck(call, (*inputs, bias))


def test_documents_trace() -> None:
    inputs = tuple(item.requires_grad_() for item in make_inputs((2, 4, 2, 6, 7, 8, 8), torch.float32))
    documents = (torch.tensor([[0, 0, 1, 1, 1, 2]]), torch.tensor([[0, 0, 1, 1, 2, 2, 3], [1, 1, 1, 0, 0, 0, 0]]))
    assert_traceable(attention, (*inputs, None, *documents, *NO_DRAWS), PLAIN, backward="autopar.attention_backward.default")


def test_dropout_traces() -> None:
    inputs = tuple(item.requires_grad_() for item in make_inputs((2, 4, 2, 6, 7, 8, 8), torch.float32))
    masking = (None, None, None, *draws_of((2, 4, 6, 7), "a word a row"))
    assert_traceable(attention, (*inputs, *masking), PLAIN | DROPS, backward="autopar.attention_backward.default")


def test_the_gradient_of_a_mask_traces() -> None:
    query, key, value = make_inputs((2, 4, 2, 6, 7, 8, 8), torch.float32)
    bias = torch.randn(4, 6, 7, requires_grad=True)
    nothing, operands = NOTHING[1:], (query, key, value, bias.detach())
    assert_traceable(attention, (query, key, value, bias, *nothing), PLAIN, backward="autopar.attention_mask_gradient.default")
    out, log_sum_exp = attention(*operands, *nothing, **PLAIN)
    assert_traceable(attention_mask_gradient, (torch.randn_like(out), None, *operands, *nothing, out, log_sum_exp), PLAIN)
