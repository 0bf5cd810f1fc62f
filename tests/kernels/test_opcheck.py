"""torch's own checks of every op of ours: schema, autograd's registration, fake values equal to real ones, AOTAutograd's trace."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar.kernels

pytestmark = pytest.mark.usefixtures("one_thread")

for _module in pkgutil.iter_modules(autopar.kernels.__path__):
    if not _module.ispkg:
        import_module(f"autopar.kernels.{_module.name}")

ops: Any = torch.ops.autopar
ATTENDS: dict[str, Any] = {"is_causal": False, "scale": 0.3, "soft_cap": 0.0, "window": 0}
ATTENDS |= {"keep_below": 0, "keep_scale": 1.0, "implementation": "triton"}
ATTENDS_SOME = ATTENDS | {"keep_below": 2**31, "keep_scale": 2.0}
PROBABILITIES: dict[str, Any] = {"scale": 0.5, "dtype": torch.float32}
NORM: dict[str, Any] = {"eps": 1e-5, "centred": True}
SILU: dict[str, Any] = {"activation": "silu"}
DROPPED: dict[str, Any] = {"keep_below": 2**31, "scale": 2.0}
SPARSE: dict[str, Any] = {"block_size": 16, "is_causal": False, "scale": 0.3}
# Only there while a model is exported, and bound to a function of that export.
NO_KERNELS = {"custom_function"}

Arguments = tuple[Any, ...]


def normal(*shape: int, trained: bool = False) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_(trained)


def heads(num_heads: int, length: int, size: int = 4, trained: bool = False) -> Tensor:
    """[B, H, S, D] as a model has it: heads split off the last dim, then transposed."""
    return normal(2, length, num_heads, size).transpose(1, 2).requires_grad_(trained)


def attention(trained: bool, mask: Tensor | None = None, has_documents: bool = False, drops: bool = False) -> Arguments:
    documents = (torch.tensor([[0, 1, 1], [3, 2, 7]]), torch.tensor([[0, 0, 1, 1, 2]])) if has_documents else (None, None)
    rows, word = torch.arange(24).reshape(2, 4, 3, 1) * 5, torch.tensor([12345, 678]).reshape(2, 1, 1, 1)
    draws = (rows, word, torch.arange(5)) if drops else (None, None, None)
    operands = (heads(4, 3, trained=trained), heads(2, 5, trained=trained), heads(2, 5, trained=trained))
    return *operands, mask, *documents, *draws


def attention_gradients(mask: Tensor | None, has_sum: bool, has_documents: bool = False, drops: bool = False) -> Arguments:
    operands = attention(False, mask, has_documents, drops)
    out, log_sum_exp = ops.attention(*operands, **ATTENDS_SOME if drops else ATTENDS)
    return (normal(2, 4, 3, 4), normal(2, 4, 3) if has_sum else None, *operands, out, log_sum_exp)


def block_sparse(trained: bool = False) -> Arguments:
    return heads(4, 20, trained=trained), heads(2, 33, trained=trained), heads(2, 33, trained=trained), normal(4, 2, 3) > 0


def block_sparse_gradients(has_sum: bool) -> Arguments:
    operands = block_sparse()
    out, log_sum_exp = ops.block_sparse_attention(*operands, **SPARSE)
    return (normal(2, 4, 20, 4), normal(2, 4, 20) if has_sum else None, *operands, out, log_sum_exp)


def labelled(trained: bool = False) -> Arguments:
    return normal(3, 4, 6, trained=trained), torch.randint(0, 6, (3, 4)), torch.arange(6)


def label_gradients(*given: bool) -> Arguments:
    operands = labelled()
    return (*(normal(3, 4) if each else None for each in given), *operands, ops.cross_entropy(*operands)[0])


def projected(trained: bool = False) -> Arguments:
    return normal(5, 4, trained=trained), normal(6, 4, trained=trained), torch.randint(0, 6, (5,)), torch.arange(6)


def projected_gradients(*given: bool) -> Arguments:
    operands = projected()
    return (*(normal(5) if each else None for each in given), *operands, ops.projected_cross_entropy(*operands)[0])


def angles() -> Arguments:
    return normal(2, 1, 6, 8), normal(2, 1, 6, 8)


def places() -> Arguments:
    """Rows, word and columns of [3, 4, 6]."""
    return torch.arange(0, 72, 6).reshape(3, 4, 1), torch.tensor(12345), torch.arange(6)


# By name: op, arguments, options.
INSTANCES: dict[str, tuple[Any, Callable[[], Arguments], dict[str, Any]]] = {
    "attention": (ops.attention, lambda: attention(True), ATTENDS),
    "attention, causal, window": (ops.attention, lambda: attention(True), ATTENDS | {"is_causal": True, "window": 2}),
    "attention, soft cap": (ops.attention, lambda: attention(True), ATTENDS | {"soft_cap": 2.0}),
    "attention, mask": (ops.attention, lambda: attention(True, normal(2, 1, 3, 5) > 0), ATTENDS),
    "attention, learned mask": (ops.attention, lambda: attention(True, normal(1, 4, 3, 5, trained=True)), ATTENDS),
    "attention, dropout": (ops.attention, lambda: attention(True, normal(1, 4, 3, 5, trained=True), True, True), ATTENDS_SOME),
    "attention, documents": (ops.attention, lambda: attention(True, normal(1, 4, 3, 5, trained=True), has_documents=True), ATTENDS),
    "attention backward": (ops.attention_backward, lambda: attention_gradients(None, False), ATTENDS),
    "attention backward, of both": (ops.attention_backward, lambda: attention_gradients(None, True), ATTENDS),
    "attention backward, documents": (ops.attention_backward, lambda: attention_gradients(None, False, True), ATTENDS),
    "attention backward, dropout": (ops.attention_backward, lambda: attention_gradients(None, True, False, True), ATTENDS_SOME),
    "attention's mask gradient": (ops.attention_mask_gradient, lambda: attention_gradients(normal(4, 3, 5), True), ATTENDS),
    "attention's mask gradient, dropout": (
        ops.attention_mask_gradient,
        lambda: attention_gradients(normal(4, 3, 5), False, False, True),
        ATTENDS_SOME,
    ),
    "block-sparse attention": (ops.block_sparse_attention, lambda: block_sparse(True), SPARSE),
    "block-sparse attention, causal": (ops.block_sparse_attention, lambda: block_sparse(True), SPARSE | {"is_causal": True}),
    "block-sparse attention backward": (ops.block_sparse_attention_backward, lambda: block_sparse_gradients(False), SPARSE),
    "block-sparse attention backward, of both": (ops.block_sparse_attention_backward, lambda: block_sparse_gradients(True), SPARSE),
    "cross entropy": (ops.cross_entropy, lambda: labelled(True), {}),
    "cross entropy backward": (ops.cross_entropy_backward, lambda: label_gradients(True, True, True), {}),
    "cross entropy backward, less": (ops.cross_entropy_backward, lambda: label_gradients(True, False, False), {}),
    "projected cross entropy": (ops.projected_cross_entropy, lambda: projected(True), {}),
    "projected cross entropy backward": (ops.projected_cross_entropy_backward, lambda: projected_gradients(True, True, False), {}),
    "norm": (ops.norm, lambda: (normal(3, 4, 6, trained=True), normal(6, trained=True), normal(6, trained=True)), NORM),
    "norm, plain": (ops.norm, lambda: (normal(3, 4, 6, trained=True), None, None), NORM | {"centred": False}),
    "norm of a sum": (
        ops.add_norm,
        lambda: (normal(3, 4, 6, trained=True), normal(3, 4, 6, trained=True), normal(6, trained=True), None),
        NORM,
    ),
    "norm backward": (
        ops.norm_backward,
        lambda: (normal(3, 4, 6), normal(3, 4, 6), normal(3, 4, 6), normal(3, 4), normal(3, 4).abs() + 1.0, normal(6)),
        {"centred": True, "has_bias": True},
    ),
    "softmax": (ops.softmax, lambda: (normal(3, 4, 6, trained=True), None), PROBABILITIES),
    "softmax, mask": (ops.softmax, lambda: (normal(3, 4, 6, trained=True), normal(4, 6) > 0), PROBABILITIES),
    "softmax backward": (ops.softmax_backward, lambda: (normal(3, 4, 6), normal(3, 4, 6).softmax(-1)), PROBABILITIES),
    "gated": (ops.gated, lambda: (normal(3, 4, 6, trained=True), normal(3, 4, 6, trained=True)), SILU),
    "gated backward": (ops.gated_backward, lambda: (normal(3, 4, 6), normal(3, 4, 6), normal(3, 4, 6)), SILU),
    "bias and activation": (ops.bias_activation, lambda: (normal(3, 4, 6, trained=True), normal(6, trained=True)), SILU),
    "bias and activation backward": (ops.bias_activation_backward, lambda: (normal(3, 4, 6), normal(3, 4, 6), normal(6)), SILU),
    "dropout": (ops.dropout, lambda: (normal(3, 4, 6, trained=True), *places()), DROPPED | {"dtype": torch.bfloat16}),
    "dropout and residual": (ops.add_dropout, lambda: (normal(3, 4, 6, trained=True), normal(3, 4, 6, trained=True), *places()), DROPPED),
    "rotary": (ops.rotary, lambda: (heads(4, 6, 8, trained=True), *angles()), {"interleaved": False}),
    "rotary, interleaved": (
        ops.rotary,
        lambda: (heads(4, 6, 8, trained=True), *(item[..., :4] for item in angles())),
        {"interleaved": True},
    ),
    "rotary backward": (ops.rotary_backward, lambda: (heads(4, 6, 8), *angles()), {"interleaved": False}),
}


@pytest.mark.parametrize("name", list(INSTANCES))
def test_opcheck(name: str) -> None:
    op, arguments, options = INSTANCES[name]
    torch.compiler.reset()
    torch.library.opcheck(op.default, arguments(), options)


def test_every_op_is_checked() -> None:
    registered = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("autopar::")}
    checked = {str(op.default).split(".")[1] for op, _, _ in INSTANCES.values()}
    assert checked == registered - NO_KERNELS
