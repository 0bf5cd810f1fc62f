"""Shapes, dtypes and strides of an op's results, several times faster than by `FakeTensorMode` where they do not depend on the device.

`FakeTensorMode` makes many tests before it runs the meta kernel of an op. For the ops listed here the meta kernel alone gives the same
result. (Pointwise ops are not among them: `FakeTensorMode` has a fast path for these.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopar._torch import FakeTensorMode, by_meta_kernel, is_fake, pytree

aten = torch.ops.aten

_BY_META = frozenset(
    (
        aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.permute.default, aten.transpose.int, aten.t.default,
        aten.expand.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.slice.Tensor, aten.select.int,
        aten.clone.default, aten.index_select.default, aten.detach.default, aten.alias.default, aten.mm.default, aten.bmm.default,
        aten.addmm.default, aten.sum.default, aten.sum.dim_IntList, aten.amax.default, aten.logsumexp.default, aten.cat.default,
    )
)  # fmt: skip


def _histogram(values: torch.Tensor, bins: int = 100, min: Any = 0, max: Any = 0) -> torch.Tensor:
    return values.new_empty(bins)


# torch has no kernel for the shape of a histogram and runs the CPU's, which knows no integers; models on meta count by them, as on a GPU.
_META = torch.library.Library("aten", "IMPL")
_META.impl("histc", _histogram, "Meta", allow_override=True)


def fake_call(mode: FakeTensorMode, target: Any, args: Any, kwargs: Any) -> Any:
    """What the op `target` returns for `args` and `kwargs`, in which tensors are fake ones of `mode`, without autograd."""
    if target in _BY_META:
        found = _by_meta(mode, target, args, kwargs)
        if found is not None:
            return found
    with mode, torch.no_grad():
        return target(*args, **kwargs)


def _by_meta(mode: FakeTensorMode, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """None where the operands are not all fake and of one device, or the result is no new tensor."""
    leaves = pytree.tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1 or not all(map(is_fake, tensors)) or any(isinstance(leaf, torch.device) for leaf in leaves):
        return None
    with torch.no_grad():
        return by_meta_kernel(mode, target, args, kwargs, devices.pop())


def empty_as(value: torch.Tensor, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
    """With its shape, strides, dtype, and what torch would still do to its numbers: `x.conj()`, and its imaginary part, are marks."""
    found = torch.empty_strided(tuple(value.shape), value.stride(), dtype=dtype or value.dtype, device=device)
    found = found.conj() if value.is_conj() else found
    return torch.ops.aten._neg_view.default(found) if value.is_neg() else found
