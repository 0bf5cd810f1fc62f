"""How often Inductor's own attention patterns match a model: the peer of `passes/forward/fuse_attention.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters

TOLERANCE = 1e-4  # of the largest value, in float32


class _Enough(Exception):
    """Inductor has looked for its patterns; what comes after is code, which nobody wants here."""


def inductor_matches(module: nn.Module, inputs: tuple[Any, ...], training: bool) -> int | None:
    """The number of matches in `module(*inputs)`, compiled by Inductor as far as its patterns go: with gradients, or without.

    Inductor counts a match when it traces what replaces it. None where torch.compile raises before it gets so far.
    """

    def stop(_: torch.fx.Graph) -> None:
        raise _Enough

    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(module.train(training), fullgraph=True, options={"joint_custom_post_pass": stop})  # type: ignore[call-overload]
    try:
        with torch.set_grad_enabled(training):
            compiled(*inputs)
    except BackendCompilerFailed as failure:
        return counters["inductor"]["fuse_attention"] if isinstance(failure.inner_exception, _Enough) else None
    raise AssertionError("Inductor did not come to its attention patterns")


def fault_of_inductor(module: nn.Module, inputs: tuple[Any, ...], training: bool) -> str:
    """What is wrong with `module(*inputs)`, a tensor, compiled to its end: what is raised, or how far it is off; empty if it is right."""
    torch.compiler.reset()
    module = module.train(training)
    try:
        with torch.set_grad_enabled(training):
            found, wanted = torch.compile(module, fullgraph=True)(*inputs), module(*inputs)
    except Exception as error:
        return type(error).__name__
    off, largest = (found - wanted).abs().max().item(), wanted.abs().max().item()
    return f"off by {off:.2g} of {largest:.2g}" if off > TOLERANCE * largest else ""
