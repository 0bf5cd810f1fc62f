"""What a run in a lower dtype gives if its operations round otherwise: how far apart two runs are that compute the same."""

from __future__ import annotations

from typing import Any

import torch

from autopar._torch import OpOverload, TorchDispatchMode, gives_views, pytree, writes_operands

# At most so many samples of a run are taken: of a gradient most are alike, and one in ten several times as far off.
NUM_SAMPLES = 12
# They round what is given, which is the same in all runs.
_CASTS = (torch.ops.aten._to_copy.default, torch.ops.aten.copy.default)


class RoundedOtherwise(TorchDispatchMode):
    """While this is entered, what an operation gives in a dtype of 16 bits is, by chance, one of the neighbours of what it has rounded to.

    A sum in another order, or a product whose operands were kept in more digits, rounds to these as well. What is wrong in a program moves
    none of this: it is measured at the reference alone.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(func, OpOverload) or func in _CASTS or gives_views(func) or writes_operands(func):
            return result
        return pytree.tree_map(self._moved, result)

    def _moved(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype not in (torch.bfloat16, torch.float16) or value.device.type != "cpu":
            return value
        by = torch.rand(value.shape, generator=self._generator, dtype=torch.float32).sub_(0.5).mul_(torch.finfo(value.dtype).eps).add_(1)
        return torch.where(value.isfinite(), (value.float() * by).clamp_(*_range(value.dtype)), value.float()).to(value.dtype)


def _range(dtype: torch.dtype) -> tuple[float, float]:
    known = torch.finfo(dtype)
    return known.min, known.max
