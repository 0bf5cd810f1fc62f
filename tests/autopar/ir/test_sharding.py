"""Shardings in words of other atoms."""

from __future__ import annotations

import pytest

from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placement
from autopar.ir.sharding import Dims, Sharding, carried, outline
from autopar.runtime.module.parameters import same_placement

MESH = Mesh((("dp", 2), ("tp", 4)))


@pytest.mark.parametrize(
    ("splits", "dims", "new_dims", "expected"),
    [
        (((), ("tp",)), ((16,), (8,)), ((2, 8), (8,)), ((), (), ("tp",))),
        (((), (), ("tp",)), ((2, 8), (8,)), ((16,), (8,)), ((), ("tp",))),
        ((("tp",), ()), ((16,), (8,)), ((4, 4), (8,)), (("tp",), (), ())),
        ((("tp", "dp"), (), ()), ((8, 2), (8,)), ((16,), (8,)), (("tp", "dp"), ())),
        (((), ("tp",)), ((1, 16),), ((1, 16),), ((), ("tp",))),
        (((), ()), ((16,), (8,)), ((3,), (2, 2)), ((), (), ())),
        (((), ("tp",)), ((3, 16),), ((3, 4, 4),), ((), ("tp",), ())),
        (((), ("dp",)), ((2, 8),), ((2, 2, 4),), ((), ("dp",), ())),
        ((("dp", "tp"), (), ()), ((8, 3), (8,)), ((2, 4, 3), (8,)), (("dp",), ("tp",), (), ())),
        ((("tp",), ("dp",), ()), ((4, 6), (8,)), ((24,), (8,)), (("tp", "dp"), ())),
    ],
)
def test_a_sharding_is_carried_to_other_atoms(
    splits: tuple[tuple[str, ...], ...], dims: Dims, new_dims: Dims, expected: tuple[tuple[str, ...], ...]
) -> None:
    found = carried(Sharding(splits), dims, new_dims, MESH)
    assert found == Sharding(expected)
    if found.axes:
        assert same_placement(Placement(dims, Sharding(splits), MESH), Placement(new_dims, found, MESH))


@pytest.mark.parametrize(
    ("splits", "dims", "new_dims"),
    [
        ((("tp",), ()), ((16,), (8,)), ((2, 8), (8,))),  # the major atom does not divide
        (((), ("tp",)), ((2, 8),), ((16,),)),  # parts that are not contiguous
        ((("tp",),), ((48,),), ((3, 16),)),  # nor does any other that ends there
        ((("tp",), ("dp",)), ((8, 6),), ((48,),)),  # the second begins inside a part of the first
        ((("tp",), ()), ((16,), (8,)), ((12,), (8,))),  # another size
        ((("ep",), ()), ((16,), (8,)), ((4, 4), (8,))),  # no such axis
    ],
)
def test_a_sharding_that_other_atoms_cannot_say_is_not_carried(splits: tuple[tuple[str, ...], ...], dims: Dims, new_dims: Dims) -> None:
    assert carried(Sharding(splits), dims, new_dims, MESH) is None


@pytest.mark.parametrize(
    ("splits", "dims", "expected"),
    [
        (((), ("tp",), (), (), ()), ((3, 4, 2, 8), (32,)), ((3, 64), (32,))),
        ((("tp",), (), ()), ((4, 2), (3,)), ((8,), (3,))),
        (((), (), ()), ((), (2, 8), (4,)), ((), (16,), (4,))),
    ],
)
def test_the_fewest_atoms_that_say_a_sharding(splits: tuple[tuple[str, ...], ...], dims: Dims, expected: Dims) -> None:
    assert outline(Sharding(splits), dims) == expected
    found = carried(Sharding(splits), dims, expected, MESH)
    assert found is not None and same_placement(Placement(dims, Sharding(splits), MESH), Placement(expected, found, MESH))
