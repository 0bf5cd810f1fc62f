"""`torch.autograd.Variable(...)`, which code from before torch 0.4 has around tensors."""

from __future__ import annotations

import torch


def variable(data: torch.Tensor, requires_grad: bool = False, volatile: bool = False) -> torch.Tensor:
    """What `torch.autograd.Variable` gives: another name for the same memory, detached. That it is volatile has no meaning any more."""
    return data.detach().requires_grad_() if requires_grad else data.detach()
