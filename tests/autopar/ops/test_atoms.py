"""Atoms: every dim is cut wherever some op of the graph tells its pieces apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autopar.ir.keys import DIMS, PLACED
from autopar.ir.program import Program, operands, results_of
from autopar.ir.sharding import Dims, flat, shape_of
from autopar.ops.atoms import Cuts, find_atoms, operand_result
from autopar.ops.lookup import rule_of
from tests.support.graphs import find, traced

aten = torch.ops.aten


def test_views_of_nothing_relate_no_dims() -> None:
    program = find_atoms(traced(lambda x: aten.view.default(x, [0, 5]), torch.empty(2, 0, 3)))
    assert DIMS[find(program, aten.view.default)[0]][0] == ((0,), (5,))


def atoms_of(function: Callable[..., Any], *tensors: Tensor) -> list[Dims]:
    """The dims of every input."""
    program = find_atoms(traced(function, *tensors))
    assert_consistent(program)
    return [DIMS[node][0] for node in program.placeholders]


def assert_consistent(program: Program) -> None:
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        for dims, value in zip(DIMS[node], results_of(node), strict=True):
            assert value is None or shape_of(dims) == tuple(value.shape), node
            assert all(atom > 1 for atom in flat(dims)), (node, dims)
        rule = rule_of(node) if node.op == "call_function" else None
        if rule is None:
            continue
        sources = [DIMS[operand][operand_result(node, operand)] for operand in operands(node)]
        if rule.view:
            assert flat(sources[0]) == flat(DIMS[node][0]), (
                f"a view is no identity on atoms: {node.format_node()} {sources[0]} {DIMS[node]}"
            )
            continue
        seen: dict[object, tuple[int, ...]] = {}
        for dims, labels in zip([*sources, *DIMS[node]], [*rule.operands, *rule.results], strict=True):
            for atoms, label in zip(dims, labels, strict=False):
                if isinstance(label, str):
                    assert seen.setdefault(label, atoms) == atoms, f"{node.format_node()}: label {label}"


def test_without_views_a_dim_is_one_atom() -> None:
    assert atoms_of(lambda x, w: aten.relu.default(aten.mm.default(x, w)), torch.randn(8, 6), torch.randn(6, 1)) == [
        ((8,), (6,)),
        ((6,), ()),
    ]


def test_a_merged_dim_is_two_atoms() -> None:
    assert atoms_of(lambda x: aten.relu.default(aten.view.default(x, [4, 2, 6])), torch.randn(8, 6)) == [((4, 2), (6,))]


def test_cuts_travel_through_a_product() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        product = aten.mm.default(aten.view.default(x, [32, 6]), w)
        return aten.view.default(product, [8, 4, 2, 3])

    assert atoms_of(function, torch.randn(8, 4, 6), torch.randn(6, 6)) == [((8,), (4,), (6,)), ((6,), (2, 3))]


def test_a_fused_qkv_is_three_heads_and_head_dim() -> None:
    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        qkv = aten.add.Tensor(aten.mm.default(x, w), b)
        parts = aten.view.default(qkv, [8, 3, 12])
        q, k, v = (aten.view.default(aten.select.int(parts, 1, i), [8, 4, 3]) for i in range(3))
        return aten.mul.Tensor(aten.mul.Tensor(q, k), v)

    assert atoms_of(function, torch.randn(8, 6), torch.randn(6, 36), torch.randn(36)) == [((8,), (6,)), ((6,), (3, 4, 3)), ((3, 4, 3),)]


def test_grouped_heads() -> None:
    """4 query heads on 2 key heads: query heads are (2, 2), key heads 2."""
    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
    assert atoms_of(lambda q, k: aten.mul.Tensor(aten.view.default(q, [2, 2, 2, 6, 8]), aten.view.default(k, [2, 2, 1, 6, 8])), q, k) == [
        ((2,), (2, 2), (6,), (8,)),
        ((2,), (2,), (6,), (8,)),
    ]


def test_rotated_halves() -> None:
    """`cat(−x₂, x₁)` as views: both halves of the head dim, and its halves' position in the other operand."""

    def function(x: Tensor, cos: Tensor) -> Tensor:
        halves = aten.view.default(x, [4, 2, 3])
        first, second = aten.select.int(halves, 1, 0), aten.select.int(halves, 1, 1)
        rotated = aten.cat.default([aten.unsqueeze.default(aten.neg.default(second), 1), aten.unsqueeze.default(first, 1)], 1)
        return aten.mul.Tensor(aten.view.default(rotated, [4, 6]), cos)

    assert atoms_of(function, torch.randn(4, 6), torch.randn(4, 6)) == [((4,), (2, 3)), ((4,), (2, 3))]


def test_cuts_that_contradict_each_other() -> None:
    """12 as 3·4 and as 2·6: inner strides 4 and 6; the smaller one stands, and the other view is no identity there."""
    program = find_atoms(traced(lambda x: (aten.view.default(x, [3, 4]), aten.view.default(x, [2, 6])), torch.randn(12)))
    dims = DIMS[program.placeholders[0]][0]
    assert shape_of(dims) == (12,) and dims == ((3, 4),)
    for node in find(program, aten.view.default):
        assert shape_of(DIMS[node][0]) == tuple(node.meta["val"].shape)


def test_a_gradient_has_its_parameters_atoms() -> None:
    cuts = Cuts()
    for key, size in (("a", 12), ("b", 12), ("c", 3), ("d", 4)):
        cuts.add(key, size)
    cuts.join("a", "b")
    cuts.relate(["a"], ["c", "d"])
    cuts.solve()
    assert cuts.atoms("b") == (3, 4) and cuts.atoms("c") == (3,)


def test_independent_parts_of_a_view_stay_apart() -> None:
    cuts = Cuts()
    for key, size in (("a", 8), ("b", 16), ("c", 32), ("ab", 128), ("c2", 32)):
        cuts.add(key, size)
    cuts.relate(["a", "b", "c"], ["ab", "c2"])
    cuts.solve()
    assert [cuts.atoms(key) for key in ("a", "b", "c", "ab", "c2")] == [(8,), (16,), (32,), (8, 16), (32,)]


@pytest.mark.parametrize(
    ("atoms", "expected"),
    [((3, 16), ((3, 2, 8), (3, 2, 8))), ((3, 4, 4), ((3, 2, 2, 4), (3, 2, 2, 4))), ((4, 12), ((6, 8), (6, 8)))],
)
def test_atoms_of_a_parameter_that_lies_already_join_those_of_the_graph(atoms: tuple[int, ...], expected: Dims) -> None:
    """But for those that contradict these: 12 and 8 in 48."""

    def function(w: Tensor, x: Tensor) -> Tensor:
        return aten.add.Tensor(aten.view.default(w, [6, 8]), aten.view.default(x, [6, 8]))

    program = traced(function, torch.randn(48), torch.randn(48))
    PLACED[program.placeholders[0]] = ((7,), atoms), (atoms,)  # of another shape; of this one
    program = find_atoms(program)
    assert tuple(DIMS[node][0][0] for node in program.placeholders) == expected
    assert_consistent(program)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_views_and_permutations_of_anything_are_identities_on_atoms(data: st.DataObject) -> None:
    """Along any chain of merges, breaks at powers of 2, and permutations."""
    shape = data.draw(st.lists(st.sampled_from((1, 2, 4, 8)), min_size=1, max_size=4))
    steps = []
    now = list(shape)
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(("merge", "break", "permute")))
        place = data.draw(st.integers(0, len(now) - 1))
        if kind == "merge" and place + 1 < len(now):
            now = [*now[:place], now[place] * now[place + 1], *now[place + 2 :]]
            steps.append(("view", list(now)))
        elif kind == "break" and now[place] % 2 == 0:
            now = [*now[:place], 2, now[place] // 2, *now[place + 1 :]]
            steps.append(("view", list(now)))
        elif kind == "permute":
            order = data.draw(st.permutations(range(len(now))))
            now = [now[dim] for dim in order]
            steps.append(("permute", list(order)))

    def function(x: Tensor) -> Tensor:
        for kind, argument in steps:
            x = aten.reshape.default(x, argument) if kind == "view" else aten.clone.default(aten.permute.default(x, argument))
        return aten.neg.default(x)

    (dims,) = atoms_of(function, torch.randn(shape))
    assert shape_of(dims) == tuple(shape)


@pytest.mark.parametrize("sizes", [(2, 3), (4, 6)])
def test_joining_dims_of_unequal_sizes_is_our_mistake(sizes: tuple[int, int]) -> None:
    cuts = Cuts()
    for key, size in zip("ab", sizes, strict=True):
        cuts.add(key, size)
    with pytest.raises(AssertionError):
        cuts.join("a", "b")
