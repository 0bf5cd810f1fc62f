"""Rotations: what is left of them, and what is none. Every way to write one: `tests/passes/fuse/test_forms.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.kernels.rotary import rotary
from autopar.passes.forward.fuse_rotary import FuseRotary
from tests.support.forms.rotary import ROTATIONS, rotate_half, turning
from tests.support.forms.suite import fused, targets

aten = torch.ops.aten


def test_trained_angles_are_no_hindrance_in_inference() -> None:
    _, decision, _ = fused(FuseRotary(), ROTATIONS.near_misses["trained angles"].module().requires_grad_(False))
    assert len(decision.fused) == 1


def test_nothing_is_left_of_what_is_fused() -> None:
    _, decision, after = fused(FuseRotary(), ROTATIONS.forms["part of a head"].module())
    left = [target for target in targets(after) if target not in (aten.cos.default, aten.sin.default, aten.reshape.default)]
    assert left == [aten.asinh.default, rotary] and len(decision.fused) == 1
    call = next(node for node in after.graph.nodes if node.target is rotary)
    assert call.args[0].target is aten.asinh.default and call.kwargs == {"interleaved": False}


def test_nothing_is_said_of_other_sums() -> None:
    def compute(m: Any) -> Tensor:
        joined = torch.cat((m.x * m.cos, -m.x * m.sin), -1)
        return joined[..., :8] * m.cos + m.x * m.sin + torch.cat((m.x[..., 4:], m.x[..., :4]), -1) + rotate_half(m.x)

    _, decision, _ = fused(FuseRotary(), turning(compute, {"x": (2, 4, 5, 8)}).module())
    assert not decision.found and str(decision) == "nothing to fuse"


def test_queries_and_keys_of_two_layers() -> None:
    def turned(x: Tensor, m: Any) -> Tensor:
        return x * m.cos + rotate_half(x) * m.sin

    def compute(m: Any) -> Tensor:
        once = turned(m.x, m) @ turned(m.key, m).mT
        return turned(once @ m.x, m) @ turned(once @ m.key, m).mT

    _, decision, after = fused(FuseRotary(), turning(compute, {"x": (2, 4, 5, 8), "key": (2, 4, 5, 8)}).module())
    assert len(decision.fused) == 4 and targets(after).count(rotary) == 4 and aten.cat.default not in targets(after)
