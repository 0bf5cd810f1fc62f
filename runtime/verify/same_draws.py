"""Draws that do not depend on how many there are, so that a model can be compared with itself on a batch of another length."""

from __future__ import annotations

from typing import Any

import torch

from autopar.runtime._torch import TorchDispatchMode

aten = torch.ops.aten

_KEPT = (aten.bernoulli.default, aten.bernoulli.p, aten.bernoulli_.float, aten.bernoulli_.Tensor)
_REAL = (
    aten.rand.default,
    aten.rand_like.default,
    aten.randn.default,
    aten.randn_like.default,
    aten.normal_.default,
    aten.exponential_.default,
)


class SameDraws(TorchDispatchMode):
    """While this is entered each draw gives one number wherever it stands: dropout keeps all, a number is the middle of its range, or 0.5
    where that has no ends, an integer the smallest. Training stays training: modes of modules, statistics, and what else they decide.

    What draws in another way (`torch.multinomial`, `torch.randperm`) draws on.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is aten.native_dropout.default:
            value, probability = args[:2]
            scale = 1.0 / (1.0 - probability) if probability < 1.0 else 0.0
            return value * scale, torch.ones_like(value, dtype=torch.bool)
        given = func(*args, **(kwargs or {}))
        if func in _KEPT:
            return given.fill_(1)
        if func in _REAL:
            return given.fill_(0.5)
        if func is aten.uniform_.default:
            low, high = (*args[1:], *(0.0, 1.0)[len(args) - 1 :])
            return given.fill_((low + high) / 2)
        if func in (aten.randint.default, aten.randint.low):
            return given.fill_(args[0] if func is aten.randint.low else 0)
        return given
