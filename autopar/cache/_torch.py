"""Private PyTorch API by which a run of a model is recorded; see `autopar/_torch.py`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.library import _impls
from torch.nn.modules import module as modules
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from autopar._torch import FakeTensor, attributes_replaced

_TENSORS = (torch.Tensor, nn.Parameter, FakeTensor)
_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
    "_global_buffer_registration_hooks",
    "_global_module_registration_hooks",
    "_global_parameter_registration_hooks",
)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is of no subclass, dense, and what torch would still do to its numbers is nothing."""
    is_dense = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
    return type(tensor) in _TENSORS and is_dense and not tensor.is_conj() and not tensor.is_neg()


def sequence_number() -> int:
    """How many nodes of backwards this thread has made: it tells which op has made a node."""
    return torch._C._autograd._get_sequence_nr()  # type: ignore[attr-defined]


def sequence_of(node: Any) -> int:
    """The number of a node of a backward."""
    return node._sequence_nr()


def is_custom(node: Any) -> bool:
    """Whether a node of a backward is of a `torch.autograd.Function`."""
    return isinstance(node, BackwardCFunction)


def has_modes_around() -> bool:
    """Whether somebody looks at every op, or changes what functions of torch do: a default device does."""
    return bool(_get_current_dispatch_mode_stack()) or bool(torch.overrides._get_current_function_mode_stack())


def has_global_hooks() -> bool:
    return any(getattr(modules, name) for name in _GLOBAL_HOOKS)


def has_hooks(tensor: torch.Tensor) -> bool:
    return bool(tensor._backward_hooks) or bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def unseen_noted(note: Callable[[], None]) -> AbstractContextManager[None]:
    """While this is entered `note` is called wherever something is used that changes gradients and leaves no op: hooks, functions of the
    user's, nodes of the backward. It must not raise: torch asks some of this itself, in the middle of things."""

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            note()
            return original(*args, **kwargs)

        return noted

    tensor, packing, function = torch.Tensor, torch.autograd.graph.saved_tensors_hooks, torch.autograd.Function
    methods = [(tensor, name) for name in ("register_hook", "register_post_accumulate_grad_hook", "retain_grad", "backward")]
    replaced: list[tuple[Any, str, Any]] = [
        (owner, name, noting(getattr(owner, name))) for owner, name in (*methods, (packing, "__enter__"))
    ]
    # A method of the class, which is written in C since torch 2.15.
    method, node_of = vars(function)["apply"], inspect.getattr_static(tensor, "grad_fn").__get__

    def applied(of: type, *args: Any, **kwargs: Any) -> Any:
        return method.__get__(None, of)(*args, **kwargs)

    replaced += [(function, "apply", classmethod(noting(applied))), (tensor, "grad_fn", property(noting(node_of)))]
    return attributes_replaced(replaced)


@contextmanager
def told_of_export() -> Generator[None]:
    """While this is entered, who asks torch whether it is compiling, or exporting, hears what code hears that Dynamo exports."""
    asked = torch.compiler.is_dynamo_compiling
    code = asked.__code__
    flags = [(torch.compiler, "_is_compiling_flag", True), (torch.compiler, "_is_exporting_flag", True)]
    with attributes_replaced(flags):
        asked.__code__ = _yes.__code__  # others have imported the function itself
        try:
            yield
        finally:
            asked.__code__ = code


def _yes() -> bool:
    return True


def overridden_ops() -> Sequence[str]:
    """What somebody has put in place of the gradients, or of what they are made of, of torch's own ops: "aten/add.Tensor/Autograd"."""
    return [name for name in _impls if name.startswith("aten/") and name.rpartition("/")[2].startswith(("Autograd", "Composite"))]


def settings() -> Sequence[object]:
    """What torch has been told that changes what it computes."""
    cuda, backends = torch.backends.cuda, torch.backends
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        backends.mkldnn.enabled,
        backends.cudnn.enabled,
        backends.cudnn.deterministic,
        torch.is_inference_mode_enabled(),
    )
