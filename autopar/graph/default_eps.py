"""The eps of an `rms_norm` that names none: it follows from the dtype, so that whoever changes dtypes has to know it."""

from __future__ import annotations

from functools import cache

import torch


@cache
def default_eps(dtype: torch.dtype) -> float:
    """What `rms_norm` without an eps takes for `dtype`: torch took the rounding of that dtype first, later of the one it computes in."""
    small = 1e-3
    candidates = [torch.finfo(each).eps for each in (dtype, torch.promote_types(dtype, torch.float32))]
    got = float(torch.nn.functional.rms_norm(torch.full((1, 1), small, dtype=dtype), (1,)))
    return min(candidates, key=lambda eps: abs(small / (small**2 + eps) ** 0.5 - got))
