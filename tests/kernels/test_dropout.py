"""Dropout and its sum with a residual: the draws of `autopar/graph/draws.py` bit for bit, values, gradients, tracing, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph

from autopar._torch import fake_mode
from autopar.graph.draws import Draws
from autopar.graph.emit import Emitter
from autopar.kernels import dropout as module
from autopar.kernels.dropout import add_dropout, drawn, dropout
from autopar.runtime.execute.random_key import random_key
from tests.support.kernels.tracing import assert_traceable

HALF: dict[str, Any] = {"keep_below": 2**31, "scale": 2.0}
KEY = 5


def draws_of(shape: tuple[int, ...], key: int) -> tuple[Tensor, Tensor, Tensor]:
    """(what plain ops draw for `shape` from the first of three sites, its two words)."""
    graph = Graph()
    node = graph.placeholder("key")
    with fake_mode():
        node.meta["val"] = torch.empty((), dtype=torch.int64)
    end = graph.output(())
    draws = Draws(graph, node, 3)
    bits = draws.bits(Emitter(graph, before=end), shape)
    words = [each for each in graph.nodes if each.target is torch.ops.aten.select.int][:2]
    end.args = ((bits, *words),)
    return torch.fx.GraphModule(nn.Module(), graph)(torch.tensor(key))


def positions(*shape: int, key: int = KEY) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, second, columns) of the first of three sites, for `shape`."""
    _, first, second = draws_of((2,), key)
    rows = first + torch.arange(math.prod(shape[:-1])).reshape(*shape[:-1], 1) * shape[-1]
    return rows, second, torch.arange(shape[-1])


@pytest.mark.parametrize("shape", [(7,), (5, 6), (2, 3, 4), (2, 1, 3, 300)])
@pytest.mark.parametrize("step", range(3))
def test_draws_are_those_of_plain_ops(shape: tuple[int, ...], step: int) -> None:
    key = random_key(1, step)
    assert torch.equal(drawn(*positions(*shape, key=key)), draws_of(shape, key)[0])


def test_draws_of_positions_beyond_32_bits() -> None:
    """Sums up to 2³³, in Python's integers."""
    rows, second, columns = torch.tensor([[2**32 - 1], [2**32 + 2**31 - 3]]), torch.tensor([[2**32 - 1], [12345]]), torch.tensor([0, 2**31])
    for row, word, line in zip(rows.flatten().tolist(), second.flatten().tolist(), drawn(rows, second, columns).tolist(), strict=True):
        for column, found in zip(columns.tolist(), line, strict=True):
            product = (row + column) * module.FACTORS[0]
            value = ((product ^ product >> 32) ^ word) % 2**32
            product = value * module.FACTORS[1]
            assert found == (product ^ product >> 32) % 2**32 * module.FACTORS[2] % 2**32


def test_values_are_those_of_plain_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK_ELEMENTS", 50)  # several blocks
    x, residual = (torch.randn(3, 40, 6, dtype=torch.float64) for _ in range(2))
    x[0, 0] = torch.inf
    where = positions(3, 40, 6)
    kept = drawn(*where) < 2**31
    assert 0.4 < kept.double().mean() < 0.6
    plain = x * kept * 2.0
    torch.testing.assert_close(dropout(x, *where, **HALF, dtype=x.dtype), plain, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(add_dropout(x, residual, *where, **HALF), residual + plain, rtol=0, atol=0, equal_nan=True)


def test_a_part_of_the_positions_is_dropped_as_the_whole() -> None:
    x, residual, (rows, second, columns) = torch.randn(4, 6, 8), torch.randn(4, 6, 8), positions(4, 6, 8)
    whole = add_dropout(x, residual, rows, second, columns, **HALF)
    part = (slice(2, 4), slice(0, 3), slice(4, 8))
    here = add_dropout(x[part], residual[part], rows[part[:2]], second, columns[part[2]], **HALF)
    assert torch.equal(here, whole[part])


def test_gradients() -> None:
    x, residual = (torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    where = positions(2, 3, 5)
    assert torch.autograd.gradcheck(lambda x, residual: add_dropout(x, residual, *where, **HALF), (x, residual))
    assert torch.autograd.gradcheck(lambda x: dropout(x, *where, **HALF, dtype=x.dtype), (x,))
    grad = torch.randn(2, 3, 5, dtype=torch.float64)
    ours = torch.autograd.grad(add_dropout(x, residual, *where, **HALF), (x, residual), grad)
    assert torch.equal(ours[0], grad * 2.0 * (drawn(*where) < 2**31)) and torch.equal(ours[1], grad)


def test_low_precision_is_rounded_once_and_the_wider_dtype_holds() -> None:
    where, options = positions(300, 6), {"keep_below": 3 * 2**30, "scale": 4 / 3}
    kept = drawn(*where) < 3 * 2**30
    x, residual = torch.randn(300, 6).bfloat16().requires_grad_(), torch.randn(300, 6).bfloat16()
    exact = residual.float() + x.float() * kept * (4 / 3)
    assert torch.equal(add_dropout(x, residual, *where, **options), exact.bfloat16())
    wide = add_dropout(x, residual.float(), *where, **options)
    assert wide.dtype == torch.float32 and torch.equal(wide, exact)
    (grad,) = torch.autograd.grad(wide.sum(), x)
    assert grad.dtype == torch.bfloat16 and torch.equal(grad, (kept * (4 / 3)).bfloat16())


def test_words_of_each_row() -> None:
    rows, _, columns = positions(2, 3, 5)
    second = torch.randint(2**32, (2, 1, 1))
    x = torch.ones(2, 3, 5)
    whole = dropout(x, rows, second, columns, **HALF, dtype=x.dtype)
    for part in range(2):
        assert torch.equal(whole[part], dropout(x[part], rows[part], second[part], columns, **HALF, dtype=x.dtype))


def test_what_does_not_fit_is_refused() -> None:
    with fake_mode():
        x, word = torch.empty(2, 3, 6), torch.empty((), dtype=torch.int64)
        rows, columns = (torch.empty(shape, dtype=torch.int64) for shape in ((2, 3, 1), (6,)))
        with pytest.raises(ValueError, match=r"a residual \(3, 6\) cannot be added to what is dropped of \(2, 3, 6\)"):
            add_dropout(x, x[0], rows, word, columns, **HALF)
        with pytest.raises(ValueError, match=r"columns \(2, 3, 1\) are not the last dim of \(2, 3, 6\)"):
            add_dropout(x, x, columns, word, rows, **HALF)
        with pytest.raises(ValueError, match=r"rows \(3, 2, 1\) do not broadcast to the rows of \(2, 3, 6\)"):
            add_dropout(x, x, rows.transpose(0, 1), word, columns, **HALF)
        with pytest.raises(ValueError, match="keep_below is 0; draws are in"):
            dropout(x, rows, word, columns, keep_below=0, scale=0.0, dtype=x.dtype)


def test_traces() -> None:
    x, residual = (torch.randn(4, 3, 5).transpose(0, 1).requires_grad_() for _ in range(2))
    where = positions(3, 4, 5)
    assert_traceable(add_dropout, (x, residual, *where), HALF, backward="autopar.dropout.default")
    assert_traceable(dropout, (x, *where), HALF | {"dtype": torch.float32}, backward="autopar.dropout.default")
