"""Gated activations (SwiGLU, GeGLU and their kin: Shazeer, 2020) and a bias with its activation, and their backward.

    gated           out = f(gate) · up              dgate, dup = dout · up · f′(gate), dout · f(gate)
    bias_activation out = f(x + bias)               dx = dout · f′(x + bias), dbias = Σ dx over all rows, before it is rounded

f is "silu", "gelu", "gelu_tanh", "relu" or "sigmoid". gate and up have one shape and dtype; x is [..., N], bias [N]. Computed
in float32 (float64 for float64) and rounded once. dbias is of that dtype, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from autopar.kernels.by_rows import by_rows
from autopar.kernels.registration import (
    DECOMPOSITIONS,
    OpTraits,
    Shape,
    SplitRule,
    accumulation_dtype,
    positional,
    register_op,
    runs_triton,
)

aten = torch.ops.aten
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "sigmoid": torch.sigmoid,
}
# (gradient, operand, where it may be written, which may be the gradient's memory)
_BACKWARD: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "silu": lambda grad, x, out: aten.silu_backward.grad_input(grad, x, grad_input=out),
    "gelu": lambda grad, x, out: aten.gelu_backward.grad_input(grad, x, grad_input=out),
    "gelu_tanh": lambda grad, x, out: aten.gelu_backward.grad_input(grad, x, approximate="tanh", grad_input=out),
    "relu": lambda grad, x, out: aten.threshold_backward.grad_input(grad, x, 0, grad_input=out),
    "sigmoid": lambda grad, x, out: aten.sigmoid_backward.grad_input(grad, x.sigmoid(), grad_input=out),
}


def gated_reference(gate: Tensor, up: Tensor, *, activation: str) -> Tensor:
    """The op in plain ops."""
    exact, out = accumulation_dtype(gate), gate.new_empty(gate.shape)
    by_rows(lambda gate, up: (ACTIVATIONS[activation](gate.to(exact)).mul_(up),), (out,), (gate, up))
    return out


def gated_backward_reference(grad_out: Tensor, gate: Tensor, up: Tensor, *, activation: str) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up in plain ops."""
    results = gate.new_empty(gate.shape), up.new_empty(up.shape)
    by_rows(partial(_gated_gradients, activation=activation), results, (grad_out, gate, up))
    return results


def _gated_gradients(grad_out: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    exact = accumulation_dtype(gate)
    arrives, inner = grad_out.to(exact), gate.to(exact)
    through = arrives * up
    return _BACKWARD[activation](through, inner, through), ACTIVATIONS[activation](inner).mul_(arrives)


def bias_activation_reference(x: Tensor, bias: Tensor, *, activation: str) -> Tensor:
    """The op in plain ops."""
    exact, out = accumulation_dtype(x), x.new_empty(x.shape)
    bias = bias.to(exact)
    by_rows(lambda x: (ACTIVATIONS[activation](x + bias),), (out,), (x,))
    return out


def bias_activation_backward_reference(grad_out: Tensor, x: Tensor, bias: Tensor, *, activation: str) -> tuple[Tensor, Tensor]:
    """Gradients of x and bias in plain ops."""
    exact = accumulation_dtype(x)
    bias = bias.to(exact)
    grad_x, grad_bias = x.new_empty(x.shape), torch.zeros_like(bias)

    def gradient(grad_out: Tensor, x: Tensor) -> tuple[Tensor]:
        total = x + bias
        grad = _BACKWARD[activation](grad_out.to(exact), total, total)
        grad_bias.add_(grad.sum(0))
        return (grad,)

    by_rows(gradient, (grad_x,), (grad_out, x))
    return grad_x, grad_bias


def gated_decomposition(gate: Tensor, up: Tensor, *, activation: str) -> Tensor:
    """The op, of all rows at once."""
    return (ACTIVATIONS[activation](gate.to(accumulation_dtype(gate))) * up).to(gate.dtype).contiguous()


def gated_backward_decomposition(grad_out: Tensor, gate: Tensor, up: Tensor, *, activation: str) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up, of all rows at once."""
    grad_gate, grad_up = _gated_gradients(grad_out, gate, up, activation)
    return grad_gate.to(gate.dtype).contiguous(), grad_up.to(up.dtype).contiguous()


def bias_activation_decomposition(x: Tensor, bias: Tensor, *, activation: str) -> Tensor:
    """The op, of all rows at once."""
    return ACTIVATIONS[activation](x + bias.to(accumulation_dtype(x))).to(x.dtype).contiguous()


def bias_activation_backward_decomposition(grad_out: Tensor, x: Tensor, bias: Tensor, *, activation: str) -> tuple[Tensor, Tensor]:
    """Gradients of x and bias, of all rows at once."""
    exact = accumulation_dtype(x)
    total = x + bias.to(exact)
    grad = _BACKWARD[activation](grad_out.to(exact), total, torch.empty_like(total))
    return grad.to(x.dtype).contiguous(), grad.reshape(-1, x.shape[-1]).sum(0)


def _gated(gate: Tensor, up: Tensor, *, activation: str) -> Tensor:
    if not runs_triton(gate):
        return gated_reference(gate, up, activation=activation)
    from autopar.kernels.gpu import gated as gpu

    return gpu.gated(gate, up, activation=activation)


def _gated_backward(grad_out: Tensor, gate: Tensor, up: Tensor, *, activation: str) -> tuple[Tensor, Tensor]:
    if not runs_triton(gate):
        return gated_backward_reference(grad_out, gate, up, activation=activation)
    from autopar.kernels.gpu import gated as gpu

    return gpu.gated_backward(grad_out, gate, up, activation=activation)


def _bias_activation(x: Tensor, bias: Tensor, *, activation: str) -> Tensor:
    if not runs_triton(x):
        return bias_activation_reference(x, bias, activation=activation)
    from autopar.kernels.gpu import gated as gpu

    return gpu.bias_activation(x, bias, activation=activation)


def _bias_activation_backward(grad_out: Tensor, x: Tensor, bias: Tensor, *, activation: str) -> tuple[Tensor, Tensor]:
    if not runs_triton(x):
        return bias_activation_backward_reference(grad_out, x, bias, activation=activation)
    from autopar.kernels.gpu import gated as gpu

    return gpu.bias_activation_backward(grad_out, x, bias, activation=activation)


def _gated_fake(gate: Tensor, up: Tensor, *, activation: str) -> Tensor:
    _require_activation(activation)
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(f"gate is {tuple(gate.shape)} of {gate.dtype}, and up {tuple(up.shape)} of {up.dtype}")
    return gate.new_empty(gate.shape)


def _gated_backward_fake(grad_out: Tensor, gate: Tensor, up: Tensor, *, activation: str) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _bias_activation_fake(x: Tensor, bias: Tensor, *, activation: str) -> Tensor:
    _require_activation(activation)
    if bias.shape != x.shape[-1:]:
        raise ValueError(f"a bias {tuple(bias.shape)} does not fit rows of {x.shape[-1]} columns")
    return x.new_empty(x.shape)


def _bias_activation_backward_fake(grad_out: Tensor, x: Tensor, bias: Tensor, *, activation: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), bias.new_empty(bias.shape, dtype=accumulation_dtype(x))


def _require_activation(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"no activation {activation!r}; there are {', '.join(ACTIVATIONS)}")


def _save(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)
    ctx.options = keyword_only_inputs


def _differentiate_gated(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor]:
    return gated_backward(grad_out, *ctx.saved_tensors, **ctx.options)


def _differentiate_bias_activation(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor]:
    x, bias = ctx.saved_tensors
    grad, grad_bias = bias_activation_backward(grad_out, x, bias, **ctx.options)
    return grad, grad_bias.to(bias.dtype)


def _gated_rule(gate: Shape, up: Shape, **_: Any) -> SplitRule:
    """Element by element, and linear in the second, which may be the first, too."""
    labels = positional(gate)
    return SplitRule((labels, labels), (labels,), linear=(frozenset({1}),))


def _gated_backward_rule(grad_out: Shape, gate: Shape, up: Shape, **_: Any) -> SplitRule:
    labels = positional(gate)
    return SplitRule((labels,) * 3, (labels, labels), linear=(frozenset({0}),))


def _bias_activation_rule(x: Shape, bias: Shape, **_: Any) -> SplitRule:
    labels = positional(x)
    return SplitRule((labels, labels[-1:]), (labels,))


def _bias_activation_backward_rule(grad_out: Shape, x: Shape, bias: Shape, **_: Any) -> SplitRule:
    """The gradient of the bias is summed over rows."""
    labels = positional(x)
    return SplitRule((labels, labels, labels[-1:]), (labels, labels[-1:]), linear=(frozenset({0}),))


def _is_zero_at_zero(activation: str) -> bool:
    return activation != "sigmoid"


_OPTIONS = "*, str activation"
register_op("gated", f"(Tensor gate, Tensor up, {_OPTIONS}) -> Tensor", _gated, _gated_fake, OpTraits(_gated_rule, is_finite=True))
register_op(
    "gated_backward",
    f"(Tensor grad_out, Tensor gate, Tensor up, {_OPTIONS}) -> (Tensor, Tensor)",
    _gated_backward,
    _gated_backward_fake,
    OpTraits(_gated_backward_rule, is_finite=True),
)
register_op(
    "bias_activation",
    f"(Tensor x, Tensor bias, {_OPTIONS}) -> Tensor",
    _bias_activation,
    _bias_activation_fake,
    OpTraits(_bias_activation_rule, keeps_zero=_is_zero_at_zero),
)
register_op(
    "bias_activation_backward",
    f"(Tensor grad_out, Tensor x, Tensor bias, {_OPTIONS}) -> (Tensor, Tensor)",
    _bias_activation_backward,
    _bias_activation_backward_fake,
    OpTraits(_bias_activation_backward_rule, is_finite=True),
)
torch.library.register_autograd("autopar::gated", _differentiate_gated, setup_context=_save)
torch.library.register_autograd("autopar::bias_activation", _differentiate_bias_activation, setup_context=_save)

gated = torch.ops.autopar.gated.default
gated_backward = torch.ops.autopar.gated_backward.default
bias_activation = torch.ops.autopar.bias_activation.default
bias_activation_backward = torch.ops.autopar.bias_activation_backward.default
DECOMPOSITIONS.update(
    {
        gated: gated_decomposition,
        gated_backward: gated_backward_decomposition,
        bias_activation: bias_activation_decomposition,
        bias_activation_backward: bias_activation_backward_decomposition,
    }
)
