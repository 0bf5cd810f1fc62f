import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placement
from autopar.ir.sharding import Dims, Sharding
from autopar.runtime.module.parameters import assemble, local_shard, replica_difference, same_placement

MESH = Mesh((("dp", 2), ("tp.0", 2), ("tp.1", 3)))


@st.composite
def placements(draw: st.DrawFn) -> tuple[Dims, Sharding]:
    """Any dims with any legal sharding on MESH, unreduced axes included."""
    counts = draw(st.lists(st.integers(0, 3), min_size=0, max_size=3))
    total = sum(counts)
    splits: list[list[str]] = [[] for _ in range(total)]
    unreduced = []
    for axis in draw(st.permutations(MESH.names)):
        place = draw(st.integers(-2, total - 1))
        if place >= 0:
            splits[place].append(axis)
        elif place == -2:
            unreduced.append(axis)
    kind = draw(st.sampled_from(("sum", "max", "logsumexp")))
    atoms = iter([MESH.size_of(split) * draw(st.integers(1, 3)) for split in splits])
    dims = tuple(tuple(next(atoms) for _ in range(count)) for count in counts)
    return dims, Sharding(tuple(map(tuple, splits)), tuple((axis, kind) for axis in unreduced))


@settings(max_examples=100, deadline=None)
@given(placements())
def test_assemble_is_the_inverse_of_local_shard(placement: tuple[Dims, Sharding]) -> None:
    dims, sharding = placement
    shape = [torch.Size(dim).numel() for dim in dims]
    whole = torch.randn(shape)
    parts = {rank: local_shard(whole, dims, sharding, MESH, rank) for rank in range(MESH.size)}
    for part in parts.values():
        assert tuple(part.shape) == sharding.local_shape(dims, MESH) and part.is_contiguous()
        assert part.data_ptr() != whole.data_ptr()
    assert torch.equal(assemble(parts, dims, sharding, MESH, check_replicas=True), whole)


def test_inner_atom_is_split_inside_each_outer_piece() -> None:
    whole, dims = torch.arange(16), ((2, 8),)
    sharding = Sharding(((), ("tp",)))
    mesh = Mesh((("tp", 4),))
    assert local_shard(whole, dims, sharding, mesh, 1).tolist() == [2, 3, 10, 11]


def test_first_axis_of_a_split_is_major() -> None:
    whole, dims, mesh = torch.arange(4), ((4,),), Mesh((("dp", 2), ("tp", 2)))
    assert [local_shard(whole, dims, Sharding((("dp", "tp"),)), mesh, rank).item() for rank in range(4)] == [0, 1, 2, 3]
    assert [local_shard(whole, dims, Sharding((("tp", "dp"),)), mesh, rank).item() for rank in range(4)] == [0, 2, 1, 3]


def test_unreduced_parts_are_summed_or_maximised() -> None:
    mesh, dims = Mesh((("tp", 3),)), ((2,),)
    parts = {rank: torch.tensor([rank, -rank]) for rank in range(3)}
    assert assemble(parts, dims, Sharding(((),), (("tp", "sum"),)), mesh).tolist() == [3, -3]
    assert assemble(parts, dims, Sharding(((),), (("tp", "max"),)), mesh).tolist() == [2, 0]
    exponents = assemble({rank: part.double() for rank, part in parts.items()}, dims, Sharding(((),), (("tp", "logsumexp"),)), mesh)
    torch.testing.assert_close(exponents, torch.stack(list(parts.values())).double().logsumexp(0))


def test_replicas_that_differ_are_named() -> None:
    mesh, dims, sharding = Mesh((("dp", 2), ("tp", 2))), ((4,),), Sharding((("tp",),))
    parts = {rank: local_shard(torch.arange(4.0), dims, sharding, mesh, rank) for rank in range(4)}
    parts[3][0] += 0.5
    assert replica_difference(parts, sharding, mesh) == (0.5, 1, 3)
    with pytest.raises(AssertionError, match="ranks 1 and 3 should hold the same part, but differ by 0.5"):
        assemble(parts, dims, sharding, mesh, check_replicas=True)
    parts[3][0] = float("nan")
    assert replica_difference(parts, sharding, mesh)[0] > 1e300


def test_replicas_of_complex_parts_are_compared_whole() -> None:
    parts = {0: torch.tensor([1 + 1j]), 1: torch.tensor([1 + 5j])}
    assert replica_difference(parts, Sharding(((),)), Mesh((("dp", 2),))) == (4.0, 0, 1)


def test_same_placement_forgets_atoms_and_sub_axes() -> None:
    coarse = Placement(((12,),), Sharding((("tp",),)), Mesh((("dp", 1), ("tp", 4))))
    fine = Mesh((("dp", 1), ("tp.0", 2), ("tp.1", 2)))
    assert same_placement(coarse, Placement(((2, 6),), Sharding((("tp.0",), ("tp.1",))), fine))
    assert not same_placement(coarse, Placement(((2, 6),), Sharding((("tp.1",), ("tp.0",))), fine))
    assert not same_placement(coarse, Placement(((2, 6),), Sharding((("tp.0",), ())), fine))
