"""Gradients between the backward and their update, where they may be held in a lower dtype than their parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from autopar.runtime._torch import scale_in_place
from autopar.runtime.execute.world import local_of
from autopar.runtime.module.placement import widened

# In how many parts they are cast one after another, as many as a step has updates where nothing is agreed first.
NUM_PARTS = 16


def parts_of(gradients: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Names, a sixteenth of the bytes at a time."""
    limit = sum(local_of(each).nbytes for each in gradients.values()) / NUM_PARTS
    parts: list[list[str]] = [[]]
    held = 0
    for name, each in gradients.items():
        if parts[-1] and held >= limit:
            parts.append([])
            held = 0
        parts[-1].append(name)
        held += local_of(each).nbytes
    return parts


def finish(parameters: Sequence[nn.Parameter], factor: torch.Tensor | None) -> None:
    """Give each parameter its gradient in its own dtype, times `factor`: only there, since a product may vanish in float16."""
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and gradient.dtype != parameter.dtype:
            drop((parameter,))
            parameter.grad = widened(gradient, parameter)
    if factor is not None:
        gradients = [local_of(each.grad) for each in parameters if each.grad is not None]
        for dtype in {each.dtype for each in gradients}:
            scale_in_place([each for each in gradients if each.dtype == dtype], factor.to(gradients[0].device, dtype))


def drop(parameters: Iterable[nn.Parameter]) -> None:
    """Leave no gradients, and none in another dtype to come."""
    for parameter in parameters:
        is_held_low = parameter.grad is not None and parameter.grad.dtype != parameter.dtype
        parameter.grad = None
        if is_held_low:
            parameter.grad_dtype = parameter.dtype
