"""Padding of whole values and of ranks' parts."""

from __future__ import annotations

import torch

from autopar.ir.mesh import Mesh
from autopar.ir.padding import Padding, carried_over, padded, unpadded
from autopar.ir.sharding import Sharding
from autopar.runtime.module.parameters import local_shard

HEADS = Padding(((2, 3, 2), (5,)), ((2, 4, 2), (6,)))
VOCABULARY = Padding(((5,), (3,)), ((8,), (3,)))


def test_elements_come_first_along_every_atom_and_the_rest_is_zero() -> None:
    whole = torch.arange(1.0, 61.0).reshape(12, 5)
    grown = HEADS.pad(whole)
    assert grown.shape == (16, 6) and torch.equal(HEADS.unpad(grown), whole)
    atoms = grown.view(2, 4, 2, 6)
    assert torch.equal(atoms[:, :3, :, :5].reshape(12, 5), whole)
    assert not atoms[:, 3].any() and not atoms[..., 5].any()


def test_nothing_is_done_without_padding() -> None:
    value = torch.randn(3)
    assert padded(value, None) is value and unpadded(value, None) is value


def test_the_last_ranks_parts_are_short_or_empty_as_torch_chunks_them() -> None:
    mesh, sharding = Mesh((("tp", 4),)), Sharding((("tp",), ()))
    whole = torch.randn(5, 3)
    chunks = [*whole.chunk(4), torch.empty(0, 3)]
    for rank in range(4):
        local = VOCABULARY.local(sharding, mesh, rank)
        part = local_shard(VOCABULARY.pad(whole), VOCABULARY.after, sharding, mesh, rank)
        assert part.shape == (2, 3)
        assert torch.equal(local.unpad(part), chunks[rank])
        assert torch.equal(local.pad(local.unpad(part)), part)


def test_a_sharding_is_carried_between_paddings_of_one_value_only() -> None:
    mesh, split = Mesh((("tp", 2),)), Sharding((("tp",), ()))
    other = Padding(((5,), (3,)), ((6,), (3,)))
    assert carried_over(split, (VOCABULARY.after, other.after), (VOCABULARY, other), mesh) == split
    assert carried_over(split, (VOCABULARY.after, VOCABULARY.before), (VOCABULARY, None), mesh) == split, "whether it divides is seen later"
    assert carried_over(split, (((8,), (3,)), other.after), (None, other), mesh) is None, "eight rows are not five"
