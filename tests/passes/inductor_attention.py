"""How often Inductor's own attention patterns match a model: the peer of `passes/fuse_attention.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters


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


def raised_by_inductor(module: nn.Module, inputs: tuple[Any, ...], training: bool) -> str:
    """The name of what torch.compile raises of `module(*inputs)`, compiled to its end; empty where it runs."""
    torch.compiler.reset()
    try:
        with torch.set_grad_enabled(training):
            torch.compile(module.train(training), fullgraph=True)(*inputs)
    except Exception as error:
        return type(error).__name__
    return ""
