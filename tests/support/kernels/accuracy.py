"""FlashAttention's rule: how far from float64 a kernel may be, given how far PyTorch is in the same dtype."""

from __future__ import annotations

import torch
from torch import Tensor

OUTPUT_FACTOR, GRADIENT_FACTOR = 2.0, 3.0
FLOOR = 1e-6


def assert_accurate(ours: Tensor, pytorch: Tensor, exact: Tensor, factor: float = OUTPUT_FACTOR, largest: float = 0.0) -> None:
    """|ours − exact| ≤ factor · |pytorch − exact| + 1e-6 · max |exact|, in the largest error each.

    `pytorch` is a run of plain PyTorch ops in the dtype of `ours`, `exact` the same in float64. A gradient that cancels to zero is
    nothing but rounding: `largest`, of all gradients, is then what it is measured against.
    """
    assert ours.shape == exact.shape and ours.dtype == pytorch.dtype, (ours.shape, exact.shape, ours.dtype, pytorch.dtype)
    assert exact.dtype == torch.float64 and bool(ours.isfinite().all() or not exact.isfinite().all())
    if exact.numel() == 0:
        return
    largest = max(largest, float(exact.abs().max()))
    error, allowed = _largest(ours, exact), factor * _largest(pytorch, exact) + FLOOR * largest
    assert error <= allowed, f"off by {error:.3g}, allowed {allowed:.3g} (largest value {largest:.3g})"


def _largest(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact).abs().max())
