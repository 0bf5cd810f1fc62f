"""The kernel of dropout: its draws bit for bit, its values against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.kernels.dropout import drawn, dropout_reference
from autopar.kernels.gpu import dropout as gpu
from tests.support.kernels.accuracy import assert_accurate

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# The last two: one row of several tiles, and few rows.
SHAPES = [(2, 3, 7), (3, 70, 130), (5, 300), (9,), (1, 1), (0, 5), (2500,), (2, 1500)]


def positions(*shape: int, largest: int = 2**32) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, second, columns) of `shape`, rows up to `largest`."""
    rows = torch.randint(largest, (*shape[:-1], 1))
    return rows, torch.randint(2**32, ()), torch.arange(shape[-1])


@pytest.mark.parametrize("share", [2**-32, 0.1, 0.5, 0.9, 1.0])
def test_the_draws_are_those_of_the_reference(share: float) -> None:
    """Sums of rows and columns go beyond 2³²; all bits of a draw decide for one share or another."""
    rows, second, columns = positions(40, 300)
    rows, columns = torch.cat((rows, torch.tensor([[2**32 - 1], [2**32 - 7]]))), columns * (2**32 // 300)
    x, keep_below = torch.ones(42, 300), round(share * 2**32)
    out = gpu.dropout(x, None, rows, second, columns, keep_below=keep_below, scale=1.0, dtype=x.dtype)
    assert torch.equal(out != 0, drawn(rows, second, columns) < keep_below)


def test_a_draw_at_the_bound() -> None:
    rows, second, columns = positions(3, 5)
    draw = int(drawn(rows, second, columns)[1, 2])
    for keep_below in (draw, draw + 1):
        out = gpu.dropout(torch.ones(3, 5), None, rows, second, columns, keep_below=keep_below, scale=1.0, dtype=torch.float32)
        assert bool(out[1, 2]) == (draw < keep_below)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_residual", [True, False])
def test_values(has_residual: bool, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, added, where = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), positions(*shape)
    kept, scale = drawn(*where) < round(0.9 * 2**32), 1 / 0.9
    same, exact = ((added.to(kind) if has_residual else 0.0) + x.to(kind) * kept * scale for kind in (dtype, torch.float64))
    out = gpu.dropout(x, added if has_residual else None, *where, keep_below=round(0.9 * 2**32), scale=scale, dtype=dtype)
    assert_accurate(out, same, exact)


def test_unequal_dtypes() -> None:
    x, residual, where = torch.randn(6, 40).bfloat16(), torch.randn(6, 40), positions(6, 40)
    options = {"keep_below": 2**31, "scale": 2.0}
    assert torch.equal(gpu.dropout(x, residual, *where, **options, dtype=torch.float32), residual + x * (drawn(*where) < 2**31) * 2.0)
    grad = gpu.dropout(residual, None, *where, **options, dtype=torch.bfloat16)
    assert torch.equal(grad, (residual * (drawn(*where) < 2**31) * 2.0).bfloat16())


@pytest.mark.parametrize("second", [(2, 1, 1), (2, 3, 1), (1, 1, 1)])
def test_words_of_each_row_and_rows_that_broadcast(second: tuple[int, ...]) -> None:
    x, rows, columns = torch.randn(2, 3, 50), torch.randint(2**32, (3, 1)), torch.arange(50)
    arguments = (x, None, rows, torch.randint(2**32, second), columns)
    options = {"keep_below": 2**31, "scale": 2.0, "dtype": x.dtype}
    assert torch.equal(gpu.dropout(*arguments, **options), dropout_reference(*arguments, **options))


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_what_is_dropped_of_an_infinity_is_no_number() -> None:
    x, where = torch.full((4, 20), torch.inf), positions(4, 20)
    out = gpu.dropout(x, x, *where, keep_below=2**31, scale=2.0, dtype=x.dtype)
    assert torch.equal(out.isnan(), drawn(*where) >= 2**31)


def test_inputs_that_are_not_contiguous() -> None:
    x, residual, where = torch.randn(70, 3).T, torch.randn(3, 140)[:, ::2], positions(3, 70)
    out = gpu.dropout(x, residual, *where, keep_below=2**31, scale=2.0, dtype=x.dtype)
    torch.testing.assert_close(out, residual + x * (drawn(*where) < 2**31) * 2.0)
