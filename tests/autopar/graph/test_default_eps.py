"""The eps that torch takes by itself."""

from __future__ import annotations

import torch

from autopar.graph.default_eps import default_eps


def test_the_eps_that_rms_norm_takes() -> None:
    for dtype in (torch.float32, torch.float64):
        assert default_eps(dtype) == torch.finfo(dtype).eps
    assert default_eps(torch.bfloat16) in (torch.finfo(torch.float32).eps, torch.finfo(torch.bfloat16).eps)
