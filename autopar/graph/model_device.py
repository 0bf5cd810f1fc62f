"""Where a model is."""

from __future__ import annotations

import torch
from torch import nn


def model_device(model: nn.Module) -> torch.device:
    """That of the first parameter; the CPU where there is none."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
