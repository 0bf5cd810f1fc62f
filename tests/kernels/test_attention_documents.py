"""The bounds between which the attention kernels walk: nothing that is attended to lies outside, and little else inside."""

from __future__ import annotations

import pytest
import torch

from autopar.kernels.gpu.attention_documents import bounds


def test_tight_where_documents_lie_in_one_piece() -> None:
    of_key = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2]])
    of_query = torch.tensor([[0, 0, 1, 1, 1, 1, 2, 2, 3, 3]])
    assert bounds(of_query, 4, of_key, 4).tolist() == [[[0, 12], [4, 12], [0, 0]]]
    assert bounds(of_query, 2, of_key, 4).tolist() == [[[0, 8], [4, 12], [4, 12], [8, 12], [0, 0]]]
    # One piece each, but the last is the padding's, with the least id.
    assert bounds(torch.tensor([[1, 1, 2, 2, 0, 0]]), 2, torch.tensor([[1, 1, 2, 2, 0, 0]]), 2).tolist() == [[[0, 2], [2, 4], [4, 6]]]


@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize(("length", "key_length"), [(1, 1), (37, 64), (64, 37)])
def test_no_pair_of_one_document_lies_outside(length: int, key_length: int, is_sorted: bool) -> None:
    torch.manual_seed(length)
    of_query, of_key = torch.randint(-3, 6, (3, length), dtype=torch.int32), torch.randint(-3, 6, (1, key_length))
    if is_sorted:
        of_query, of_key = of_query.sort().values, of_key.sort().values
    for block, other_block in ((16, 8), (4, 16)):
        found = bounds(of_query, block, of_key, other_block)
        assert found.dtype == torch.int32 and found.shape == (3, -(-length // block), 2) and not bool((found % other_block).any())
        first, last = found.repeat_interleave(block, 1)[:, :length].unbind(-1)
        position = torch.arange(key_length)
        inside = (first[..., None] <= position) & (position < last[..., None])
        same = of_query[:, :, None] == of_key[:, None, :]
        assert not bool((same & ~inside).any())
