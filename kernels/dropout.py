"""A residual plus dropout, and dropout alone, which is the backward of both. The mask is drawn anew wherever it is needed.

    position = rows + columns                          below 2³³
    draw     = (stir(stir(position, C1) ^ second, C2) · C3) mod 2³²,    stir(x, C) = (y ^ y >> 32) mod 2³²  where y = x · C
    kept     = draw < keep_below
    dropout      out = x · kept · scale                dx = dropout(dout), of the same positions
    add_dropout  out = residual + x · kept · scale     dx = dropout(dout),   dresidual = dout

x is [..., N]; rows and second broadcast to [..., 1], columns is [N], all three int64: a rank that has a part of x has the same part of
them, and draws the same. The draw is that of `autopar/graph/draws.py`, bit for bit, of integers alone; so no mask is written, read or
held for the backward, at about fifteen integer operations an element. (A mask as an operand would be a byte an element, held.)
Of unequal dtypes `add_dropout` gives the wider. Computed in float32 (float64 for float64) and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.kernels.registration import (
    DECOMPOSITIONS,
    Labels,
    OpTraits,
    Shape,
    SplitRule,
    accumulation_dtype,
    broadcast,
    positional,
    register_op,
    runs_triton,
)

# C1, C2 and C3.
FACTORS = (0x21F0AAAD, 0x735A2D97, 0x31848BAB)
_MASK_32 = (1 << 32) - 1
# 256 KiB of int64 for each value between: a few of them fit into the second-level cache of one core.
_BLOCK_ELEMENTS = 1 << 15


def drawn(rows: Tensor, second: Tensor, columns: Tensor) -> Tensor:
    """The draws of [..., 1] and [..., 1] and [N]: [..., N], int64 in [0, 2³²)."""
    value = _stir(rows + columns, FACTORS[0]).bitwise_xor_(second)
    return _stir(value, FACTORS[1]).mul_(FACTORS[2]).bitwise_and_(_MASK_32)


def _stir(value: Tensor, factor: int) -> Tensor:
    value = value.mul_(factor)
    return value.bitwise_xor_(value >> 32).bitwise_and_(_MASK_32)


def dropout_reference(
    x: Tensor, residual: Tensor | None, rows: Tensor, second: Tensor, columns: Tensor, *, keep_below: int, scale: float, dtype: torch.dtype
) -> Tensor:
    """Either op in plain ops, some rows at a time; `dtype` is that of the result."""
    out = x.new_empty(x.shape, dtype=dtype)
    if out.numel() == 0:
        return out
    exact, num_columns = accumulation_dtype(out), x.shape[-1]
    step = max(_BLOCK_ELEMENTS * torch.get_num_threads() // num_columns, 1)
    starts = (each.expand(*x.shape[:-1], 1).reshape(-1, 1) for each in (rows, second))
    whole = (each.reshape(-1, num_columns) for each in (out, x, *(() if residual is None else (residual,))))
    for row, word, result, value, *rest in zip(*(each.split(step) for each in (*starts, *whole)), strict=True):
        kept = drawn(row, word, columns) < keep_below
        dropped = value.to(exact).mul(kept).mul_(scale)
        result.copy_(rest[0] + dropped if rest else dropped)
    return out


def dropout_decomposition(
    x: Tensor, rows: Tensor, second: Tensor, columns: Tensor, *, keep_below: int, scale: float, dtype: torch.dtype
) -> Tensor:
    """`dropout`, of all rows at once."""
    return _dropped(x, rows, second, columns, keep_below, scale, dtype).to(dtype).contiguous()


def add_dropout_decomposition(
    x: Tensor, residual: Tensor, rows: Tensor, second: Tensor, columns: Tensor, *, keep_below: int, scale: float
) -> Tensor:
    """`add_dropout`, of all rows at once."""
    dtype = torch.promote_types(x.dtype, residual.dtype)
    return (residual + _dropped(x, rows, second, columns, keep_below, scale, dtype)).to(dtype).contiguous()


def _dropped(x: Tensor, rows: Tensor, second: Tensor, columns: Tensor, keep_below: int, scale: float, dtype: torch.dtype) -> Tensor:
    """Of `dtype`'s accumulation dtype."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    rows, second = (each.expand(*x.shape[:-1], 1) for each in (rows, second))
    return x.to(exact) * (drawn(rows, second, columns) < keep_below) * scale


def _dropout(x: Tensor, rows: Tensor, second: Tensor, columns: Tensor, *, keep_below: int, scale: float, dtype: torch.dtype) -> Tensor:
    return _either(x, None, rows, second, columns, keep_below=keep_below, scale=scale, dtype=dtype)


def _add_dropout(x: Tensor, residual: Tensor, rows: Tensor, second: Tensor, columns: Tensor, *, keep_below: int, scale: float) -> Tensor:
    dtype = torch.promote_types(x.dtype, residual.dtype)
    return _either(x, residual, rows, second, columns, keep_below=keep_below, scale=scale, dtype=dtype)


def _either(x: Tensor, residual: Tensor | None, *positions: Tensor, dtype: torch.dtype, **options: Any) -> Tensor:
    if not runs_triton(x) or torch.float64 in (dtype, None if residual is None else residual.dtype):
        return dropout_reference(x, residual, *positions, dtype=dtype, **options)
    from autopar.kernels.gpu import dropout as gpu

    return gpu.dropout(x, residual, *positions, dtype=dtype, **options)


def _dropout_fake(x: Tensor, rows: Tensor, second: Tensor, columns: Tensor, *, keep_below: int, scale: float, dtype: torch.dtype) -> Tensor:
    _require(x, None, rows, second, columns, keep_below)
    return x.new_empty(x.shape, dtype=dtype)


def _add_dropout_fake(
    x: Tensor, residual: Tensor, rows: Tensor, second: Tensor, columns: Tensor, *, keep_below: int, scale: float
) -> Tensor:
    _require(x, residual, rows, second, columns, keep_below)
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))


def _require(x: Tensor, residual: Tensor | None, rows: Tensor, second: Tensor, columns: Tensor, keep_below: int) -> None:
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"a residual {tuple(residual.shape)} cannot be added to what is dropped of {tuple(x.shape)}")
    if columns.shape != x.shape[-1:]:
        raise ValueError(f"columns {tuple(columns.shape)} are not the last dim of {tuple(x.shape)}")
    for name, item in (("rows", rows), ("second", second)):
        sizes = zip(reversed(item.shape), reversed((*x.shape[:-1], 1)), strict=False)
        if item.dim() > x.dim() or any(size not in (1, whole) for size, whole in sizes):
            raise ValueError(f"{name} {tuple(item.shape)} do not broadcast to the rows of {tuple(x.shape)}")
    if not 0 < keep_below <= 2**32:
        raise ValueError(f"keep_below is {keep_below}; draws are in [0, 2**32), and some must be kept")


def _save_dropout(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    x, *positions = inputs
    ctx.save_for_backward(*positions)
    ctx.options, ctx.dtype = {name: keyword_only_inputs[name] for name in ("keep_below", "scale")}, x.dtype


def _save_add_dropout(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    x, residual, *positions = inputs
    _save_dropout(ctx, (x, *positions), keyword_only_inputs, output)
    ctx.residual_dtype = residual.dtype


def _differentiate_dropout(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    return (dropout(grad_out, *ctx.saved_tensors, **ctx.options, dtype=ctx.dtype) if ctx.needs_input_grad[0] else None, None, None, None)


def _differentiate_add_dropout(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    grad, *nothing = _differentiate_dropout(ctx, grad_out)
    return (grad, grad_out.to(ctx.residual_dtype), *nothing)


def _dropout_rule(x: Shape, rows: Shape, second: Shape, columns: Shape, **_: Any) -> SplitRule:
    """Element by element, and linear."""
    labels = positional(x)
    return SplitRule((labels, *_of_positions(x, rows, second)), (labels,), linear=(frozenset({0}),))


def _add_dropout_rule(x: Shape, residual: Shape, rows: Shape, second: Shape, columns: Shape, **_: Any) -> SplitRule:
    labels = positional(x)
    return SplitRule((labels, labels, *_of_positions(x, rows, second)), (labels,), linear=(frozenset({0, 1}),))


def _of_positions(x: Shape, rows: Shape, second: Shape) -> tuple[Labels, ...]:
    """Labels of rows, second and columns: the first two broadcast to [..., 1]."""
    of_rows = positional(x)[:-1]
    return *((*broadcast(each[:-1], of_rows, x[:-1]), None) if each else () for each in (rows, second)), positional(x)[-1:]


_POSITIONS, _OPTIONS = "Tensor rows, Tensor second, Tensor columns", "int keep_below, float scale"
register_op(
    "dropout",
    f"(Tensor x, {_POSITIONS}, *, {_OPTIONS}, ScalarType dtype) -> Tensor",
    _dropout,
    _dropout_fake,
    OpTraits(_dropout_rule, is_finite=True),
)
register_op(
    "add_dropout",
    f"(Tensor x, Tensor residual, {_POSITIONS}, *, {_OPTIONS}) -> Tensor",
    _add_dropout,
    _add_dropout_fake,
    OpTraits(_add_dropout_rule, is_finite=True),
)
torch.library.register_autograd("autopar::dropout", _differentiate_dropout, setup_context=_save_dropout)
torch.library.register_autograd("autopar::add_dropout", _differentiate_add_dropout, setup_context=_save_add_dropout)

dropout = torch.ops.autopar.dropout.default
add_dropout = torch.ops.autopar.add_dropout.default
DECOMPOSITIONS[dropout], DECOMPOSITIONS[add_dropout] = dropout_decomposition, add_dropout_decomposition
