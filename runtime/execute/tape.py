"""A call on autograd's tape, and the way of gradients into `.grad`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.errors import BackwardError
from autopar.runtime._torch import has_gradient_hooks, is_accumulating, is_made_like, lies_as, local_part, plain_parts
from autopar.runtime.execute.call import Call
from autopar.runtime.module.outputs import refuse_detached


class _Differentiable(torch.autograd.Function):
    """Puts a `Call` on autograd's tape: parameters in, results out."""

    @staticmethod
    def forward(ctx: Any, call: Call, named: Mapping[str, torch.Tensor], *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = call.forward()
        # One that is detached is on the tape, too, so that a backward through it is refused instead of lost.
        taped = {item.name for item in (*call.signature.inputs_of("tangent"), *call.detached)}
        ctx.call, ctx.named, ctx.results = call, named, tuple(results)
        # Saved for their version counters only: torch refuses a backward through parameters changed since.
        ctx.save_for_backward(*plain_parts(parameters))
        ctx.set_materialize_grads(False)  # None says that nothing comes back this way; zeros would not
        ctx.mark_non_differentiable(*(tensor for name, tensor in results.items() if name not in taped))
        return tuple(results.values())

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise BackwardError(_SECOND_DERIVATIVE)
        if ctx.call is None:
            raise BackwardError(_SECOND_TIME)
        given = {name: _plain(tangent) for name, tangent in zip(ctx.results, tangents, strict=True)}
        refuse_detached(ctx.call.signature, [item.name for item in ctx.call.detached if given[item.name] is not None])
        _ = ctx.saved_tensors
        are_equal = ctx.call.meet(given)
        call, ctx.call = ctx.call, None
        gradients = call.backward(given, are_equal)
        if call.meeting is not None:
            call.meeting.is_over()
        leaves = zip(ctx.next_functions, ctx.named.items(), strict=True)
        put = _look_and_put if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled() else _put
        return (None, None, *[put(name, parameter, gradients.get(name), node) for (node, _), (name, parameter) in leaves])


def _plain(tangent: torch.Tensor | None) -> torch.Tensor | None:
    """What torch hands back where the user computed on with parameters, which are DTensors: a penalty on them, added to the loss."""
    return tangent.full_tensor() if isinstance(tangent, DTensor) else tangent


_SECOND_DERIVATIVE = (
    "backward was asked for with create_graph=True, but the gradients of a parallel module have no graph of their own: a gradient penalty "
    "would be a constant. Leave create_graph out; for a penalty let the model itself compare its outputs at two inputs, "
    "(f(x + h * v) - f(x)) / h, or train that model without autopar"
)
_SECOND_TIME = (
    "backward ran a second time through one call of a parallel module; what it saved is gone after the first, with retain_graph=True, too: "
    "add up the losses of one call and run backward once, or call the module again"
)


def differentiate(call: Call, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`call.forward()` with its results on autograd's tape; `parameters` are those that get gradients.

    A stage of a pipeline may hold none of these: what it returns can be differentiated as on the others.
    """
    leaves = parameters or {"": torch.empty(0, requires_grad=True)}
    results = _Differentiable.apply(call, leaves, *leaves.values())
    return dict(zip((item.name for item in call.results), results, strict=True))


def _put(name: str, parameter: torch.Tensor, gradient: torch.Tensor | None, node: Any) -> torch.Tensor | None:
    """Let the parameter have its gradient where it has none and nobody waits for one; else the gradient, for autograd to hand on to
    `node`. Autograd would make a second tensor of it, which for a DTensor takes longer than a small op."""
    if gradient is None or parameter.grad is not None or has_gradient_hooks(parameter) or not is_accumulating(node):
        return gradient
    if not is_made_like(gradient, parameter) and (gradient.dtype, gradient.stride()) != (parameter.dtype, parameter.stride()):
        return gradient  # autograd has a rule for it
    parameter.grad = gradient
    return None


def _look_and_put(name: str, parameter: torch.Tensor, gradient: torch.Tensor | None, node: Any) -> torch.Tensor | None:
    """In anomaly mode, where torch looks for NaN in all that comes by the tape: it cannot in DTensors, so they are looked at here, and do
    not come by it. Raises `RuntimeError`, as torch does, for NaN, on the ranks that hold one, and `BackwardError` for what the tape alone
    could hand on."""
    if not isinstance(gradient, DTensor):
        return gradient
    if local_part(gradient).isnan().any():
        raise RuntimeError(f"the gradient of {name!r} has nan values on this rank")
    is_added = is_accumulating(node)
    if is_added is False:
        return None
    before = parameter.grad
    if isinstance(before, DTensor) and lies_as(before, parameter) and is_added and not has_gradient_hooks(parameter):
        local_part(before).add_(local_part(gradient))
        return None
    if _put(name, parameter, gradient, node) is not None:
        raise BackwardError(
            f"the gradient of {name!r}, a DTensor, was to be handed to a hook, out of autograd.grad, or added to one that lies otherwise, "
            "in anomaly mode, where torch looks for NaN in it and cannot in DTensors: set_detect_anomaly(True, check_nan=False)"
        )
    return None
