"""Registers an op of ours with what a compiler must know of it, and launches the Triton kernels behind it.

An op's sharding rule stands beside its kernel, as plain labels (`SplitRule`): whoever adds an op writes no other file. The compiler
reads `OURS` (`autopar/ops/rules/ours.py`).

`torch.library` directly: a call costs 6–13 µs, `custom_op` 28–46. `triton_op` is no help either: AOTAutograd takes it apart, and
a joint graph then holds the kernel's launch, or the reference's ops, where autopar's passes and sharding rules need one node.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

Shape = tuple[int, ...]
# None is a dim that stays whole; several labels stand together on one dim, major first.
Label = str | tuple[str, ...] | None
Labels = tuple[Label, ...]
ReductionKind = Literal["sum", "max", "logsumexp"]


@dataclass(frozen=True)
class SplitRule:
    """How an op may be split over ranks, in labels of its dims, as einsum writes them. `autopar.ops.rule.Rule` is the same of a node.

    arguments   labels of each argument before the options, whether it is given or None
    results     labels of each result; one that lacks a label which an argument has is reduced over it
    blocked     labels that may not be split, though dims with one of them belong together
    reductions  how each result that lacks a label is reduced over it; a sum where not said
    linear      sets of arguments, by place: where just these are sums that ranks hold in parts, so are the results
    sizes       of labels that stand together on one dim
    flops       of contractions
    """

    arguments: tuple[Labels, ...]
    results: tuple[Labels, ...]
    blocked: frozenset[str] = frozenset()
    reductions: Mapping[str, tuple[ReductionKind, ...]] = field(default_factory=dict[str, tuple[ReductionKind, ...]])
    linear: tuple[frozenset[int], ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    flops: float = 0.0


@dataclass(frozen=True)
class Classes:
    """Arguments of a loss, by place: `labels` are ids of classes, `numbers` has the id of each column, negative for one of padding.

    `skips_padding`: the op itself passes over the columns of padding, whatever all its arguments hold there.
    """

    labels: int
    numbers: int
    skips_padding: bool = True


@dataclass(frozen=True)
class OpTraits:
    """What the compiler must know of an op of ours, beside its schema.

    rule        takes what the op takes, but the shape of each tensor in its place (None where there is none)
    is_finite   the op is linear in some arguments, and what it multiplies them by is finite where the others are zero, so that padding with
                zeros stays zero: silu(gate) · up is 0 where both are 0; x / y, linear in x, would be 0 / 0
    keeps_zero  of the options: whether the op gives 0 where all arguments are 0: gelu(x + bias) does, sigmoid(x + bias) gives 0.5
    classes     the arguments that name classes, of a loss
    """

    rule: Callable[..., SplitRule]
    is_finite: bool = False
    keeps_zero: Callable[..., bool] = lambda **_: False
    classes: Classes | None = None


# By printed name: "autopar.softmax.default".
OURS: dict[str, OpTraits] = {}
# By op: what it runs on CPU and CUDA. For callers who know that their tensors have values, and that no gradient is wanted: dispatch through
# `torch.ops` takes 20 µs a call, as long as a small op.
IMPLEMENTATIONS: dict[Any, Callable[..., Any]] = {}
# By op whose implementation looks at values: the bytes that it takes on a CPU beside operands and results, of its arguments.
INSIDE: dict[Any, Callable[..., int]] = {}
# By op: the same in ops of ATen that a compiler fuses, without looks at values and not in blocks of rows. Inductor is given them for a CPU,
# where an op of ours is a call that nothing can be fused with. Where they do not serve, they call the op.
DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {}


def register_op(name: str, schema: str, implementation: Callable[..., Any], fake: Callable[..., Any], traits: OpTraits) -> None:
    """Define `autopar::<name>` with `schema` (as "(Tensor x) -> Tensor"; arguments without defaults) on CPU and CUDA.

    `fake` must claim the shapes, dtypes and strides that `implementation` returns, whatever the strides of the
    arguments: the op is tagged so that compilers may pass any layout. What is no tensor is an option, by keyword.
    """
    qualified = f"autopar::{name}"
    torch.library.define(qualified, schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
    # By device: fake tensors would run an implementation registered for all of them instead of `fake`.
    torch.library.impl(qualified, ("cpu", "cuda"), implementation)
    torch.library.register_fake(qualified, fake)
    OURS[f"autopar.{name}.default"] = traits
    IMPLEMENTATIONS[getattr(torch.ops.autopar, name).default] = implementation


def positional(shape: Shape) -> Labels:
    """A label of its own for each dim: `d0, d1, …`"""
    return tuple(f"d{dim}" for dim in range(len(shape)))


def rows(shape: Shape) -> Labels:
    """As `positional`, but the last dim stays whole."""
    return (*positional(shape)[:-1], None)


def broadcast(shape: Shape, to: Labels, whole: Shape) -> Labels:
    """Labels of what broadcasts to `whole`, whose labels are `to`: aligned at the right, None where it is broadcast."""
    offset = len(whole) - len(shape)
    return tuple(to[offset + dim] if size == whole[offset + dim] else None for dim, size in enumerate(shape))


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


def as_dtype(value: Tensor, dtype: torch.dtype) -> Tensor:
    """`value.to(dtype)`, without the microsecond that this takes where it changes nothing."""
    return value if value.dtype == dtype else value.to(dtype)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Run a Triton kernel on the device of its first argument; a grid without programs runs nothing.

    `options` are the kernel's constants, `num_warps` and `num_stages`.
    """
    if 0 in grid:
        return
    device = arguments[0].device
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel[grid](*arguments, **options)
