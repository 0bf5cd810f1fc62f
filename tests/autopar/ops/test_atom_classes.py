"""Atoms that walk together."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.ops.atom_classes import AtomClasses
from tests.support.graphs import traced, with_atoms

aten = torch.ops.aten


def test_atoms_walk_through_products_and_views_and_stop_where_they_are_reduced() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return aten.sum.dim_IntList(aten.view.default(aten.mm.default(x, w), [4, 3, 2]), [2])

    program = with_atoms(traced(function, torch.randn(4, 5), torch.randn(5, 6), parameters=(1,)))
    classes, (x, w) = AtomClasses.of(program.graph), program.placeholders
    (total,) = program.results
    heads = classes.find((w, 0, 1))
    assert classes.find((total, 0, 1)) == heads
    assert classes.find((x, 0, 1)) == classes.find((w, 0, 0)) != heads, "the width is the product's inner dim"
    assert classes.find((x, 0, 0)) == classes.find((total, 0, 0)) != heads
    assert classes.find((w, 0, 2)) not in (heads, classes.find((total, 0, 0)))


def test_results_of_one_call_are_told_apart() -> None:
    def function(x: Tensor) -> list[Tensor]:
        return list(aten.native_layer_norm.default(x, [5], None, None, 1e-5))

    program = with_atoms(traced(function, torch.randn(4, 5)))
    classes = AtomClasses.of(program.graph)
    (x,) = program.placeholders
    rows = {classes.find((node, 0, 0)) for node in (x, *program.results)}
    assert len(rows) == 1, "each getitem's rows are the input's"
    assert classes.find((program.results[0], 0, 1)) != classes.find((x, 0, 0))
