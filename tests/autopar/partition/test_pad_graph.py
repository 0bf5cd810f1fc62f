"""Graphs with padded parameters compute what they did, whatever stands in the padding on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.checks.checker import check
from autopar.ir.keys import PHASE, SOURCE
from autopar.ir.padding import Padding
from autopar.ir.program import Program
from autopar.ops.atom_classes import AtomClasses
from autopar.partition.pad_graph import padded_program
from tests.support.graphs import find, ops, tensor, traced, values, with_atoms

aten = torch.ops.aten
X, W = torch.randn(4, 8, dtype=torch.float64), torch.randn(8, 5, dtype=torch.float64)
PADDINGS = {"1": Padding(((8,), (5,)), ((8,), (8,)))}


def product(x: Tensor, w: Tensor) -> Tensor:
    return aten.mm.default(x, w)


def softmax(x: Tensor, w: Tensor) -> list[Tensor]:
    """By hand, as cross entropy is decomposed: a maximum and a sum over the padded dim."""
    scores = aten.mm.default(x, w)
    exponents = aten.exp.default(aten.sub.Tensor(scores, aten.amax.default(scores, [1], True)))
    return [aten.div.Tensor(exponents, aten.sum.dim_IntList(exponents, [1], True)), aten.mm.default(exponents, aten.t.default(w))]


def infinite(x: Tensor, w: Tensor) -> Tensor:
    """1 / 0 in the padding."""
    return aten.sum.dim_IntList(aten.reciprocal.default(aten.mm.default(x, w)), [1])


def not_a_number(x: Tensor, w: Tensor) -> Tensor:
    """0 / 0 meets the zeros of a parameter."""
    scores = aten.mm.default(x, w)
    return aten.mm.default(aten.div.Tensor(scores, scores), aten.t.default(w))


def blocked(x: Tensor, w: Tensor) -> Tensor:
    """A scan runs over elements alone, and what follows may be padded again."""
    return aten.sum.dim_IntList(aten.mul.Tensor(aten.cumsum.default(aten.mm.default(x, w), 1), aten.mm.default(x, w)), [0, 1])


def positions(x: Tensor, w: Tensor) -> Tensor:
    index = aten.arange.start_step(3, 13, 2)
    return aten.sum.dim_IntList(aten.mul.Tensor(aten.mm.default(x, w), index), [1])


def heads(x: Tensor, w: Tensor) -> list[Tensor]:
    """Atoms inside a dim: [4, 5 · 2], with a softmax in each of five heads."""
    scores = aten.view.default(aten.mm.default(x, aten.view.default(w, [4, 10])), [4, 5, 2])
    mixed = aten.view.default(aten._softmax.default(scores, -1, False), [4, 10])
    return [mixed, aten.mm.default(mixed, aten.t.default(aten.view.default(w, [4, 10])))]


def new_form(function: Callable[..., Any], *tensors: Tensor, paddings: dict[str, Padding] = PADDINGS) -> tuple[Program, Program]:
    before = with_atoms(traced(function, *tensors, parameters=(1,)))
    return before, with_atoms(padded_program(before, paddings, AtomClasses.of(before.graph)))


def assert_equal(before: Program, after: Program, *tensors: Tensor) -> None:
    for one, other in zip(values(before, *tensors), values(after, *tensors), strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12), f"{one}\n{other}"
    for node in after.graph.nodes:
        assert node.op in ("placeholder", "output") or (node in PHASE and node in SOURCE), f"{node} has lost its origin"
    check(after)


@pytest.mark.parametrize("function", [product, softmax, infinite, not_a_number, blocked, positions])
def test_values_are_what_they_were(function: Callable[..., Any]) -> None:
    before, after = new_form(function, X, W)
    assert_equal(before, after, X, W)
    assert tensor(after.placeholders[1]).shape == (8, 8) and after.signature.inputs[1].shape == (8, 5)
    assert all(tensor(node).shape[-1] == 8 for node in find(after, aten.mm.default)[:1]), "the product is padded"


def test_heads_inside_a_dim() -> None:
    x, w = torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 5, 2, dtype=torch.float64)
    before, after = new_form(heads, x, w, paddings={"1": Padding(((4,), (5,), (2,)), ((4,), (6,), (2,)))})
    assert_equal(before, after, x, w)
    assert tensor(find(after, aten._softmax.default)[0]).shape == (4, 6, 2)


def test_zeros_are_not_masked() -> None:
    """Products with parameters, sums of them, and activations that keep zeros."""

    def layer(x: Tensor, w: Tensor) -> Tensor:
        hidden = aten.mm.default(x, w)
        return aten.mm.default(aten.gelu.default(aten.add.Tensor(hidden, hidden)), aten.t.default(w))

    before, after = new_form(layer, X, W)
    assert_equal(before, after, X, W)
    assert "aten.where.ScalarOther" not in ops(after)


def test_a_look_up_needs_no_mask_and_a_gradient_of_one_has_more_rows() -> None:
    def words(ids: Tensor, table: Tensor) -> list[Tensor]:
        found = aten.embedding.default(table, ids)
        return [found, aten.mm.default(aten.t.default(aten.embedding_dense_backward.default(found, ids, 5, -1, False)), table)]

    ids, table = torch.tensor([0, 4, 4, 2]), torch.randn(5, 3, dtype=torch.float64)
    before, after = new_form(words, ids, table, paddings={"1": Padding(((5,), (3,)), ((6,), (3,)))})
    assert_equal(before, after, ids, table)
    assert "aten.where.ScalarOther" not in ops(after)
    assert tensor(find(after, aten.embedding_dense_backward.default)[0]).shape == (6, 3)


def test_what_is_masked_twice_shares_the_mask() -> None:
    before, after = new_form(softmax, X, W)
    assert ops(after).count("aten.arange.default") == 1 + ops(before).count("aten.arange.default")
