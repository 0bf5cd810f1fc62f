"""Shardings in words of other atoms."""

from __future__ import annotations

import pytest

from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placement
from autopar.ir.sharding import Dims, Sharding, carried
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
        ((("tp",), ()), ((16,), (8,)), ((12,), (8,))),  # another size
        ((("ep",), ()), ((16,), (8,)), ((4, 4), (8,))),  # no such axis
    ],
)
def test_a_sharding_that_other_atoms_cannot_say_is_not_carried(splits: tuple[tuple[str, ...], ...], dims: Dims, new_dims: Dims) -> None:
    assert carried(Sharding(splits), dims, new_dims, MESH) is None
