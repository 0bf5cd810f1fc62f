"""Registers an op of ours, and launches the Triton kernels behind it.

`torch.library` directly: a call costs 6–13 µs, `custom_op` 28–46. `triton_op` is no help either: AOTAutograd takes it apart, and
a joint graph then holds the kernel's launch, or the reference's ops, where autopar's passes and sharding rules need one node.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor


def register_op(name: str, schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define `autopar::<name>` with `schema` (as "(Tensor x) -> Tensor"; arguments without defaults) on CPU and CUDA.

    `fake` must claim the shapes, dtypes and strides that `implementation` returns, whatever the strides of the
    arguments: the op is tagged so that compilers may pass any layout.
    """
    qualified = f"autopar::{name}"
    torch.library.define(qualified, schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
    # By device: fake tensors would run an implementation registered for all of them instead of `fake`.
    torch.library.impl(qualified, ("cpu", "cuda"), implementation)
    torch.library.register_fake(qualified, fake)


def runs_triton(value: Tensor) -> bool:
    """Whether a Triton kernel serves `value`: on a GPU, of a dtype that float32 sums do justice to, and Triton installed."""
    return value.is_cuda and value.dtype in (torch.float16, torch.bfloat16, torch.float32) and _has_triton()


def runs_attention(query: Tensor, value: Tensor) -> bool:
    """Whether our Triton attention serves: its tiles hold heads of at most 256, in float32 64."""
    most = 64 if query.dtype == torch.float32 else 256
    return runs_triton(query) and query.dtype == value.dtype and max(query.shape[-1], value.shape[-1]) <= most


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def accumulation_dtype(value: Tensor) -> torch.dtype:
    """What an op computes in: float64 for float64, and float32 for everything else."""
    return torch.float64 if value.dtype == torch.float64 else torch.float32


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Run a Triton kernel on the device of its first argument; a grid without programs runs nothing.

    `options` are the kernel's constants, `num_warps` and `num_stages`.
    """
    if 0 in grid:
        return
    device = arguments[0].device
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel[grid](*arguments, **options)
