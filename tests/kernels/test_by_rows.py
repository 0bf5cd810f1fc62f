"""An elementwise computation block by block is the whole one, whatever the shapes and strides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from autopar.kernels import by_rows as module
from autopar.kernels.by_rows import by_rows


def sum_and_product(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x + y, x * y


@pytest.mark.parametrize("shape", [(), (5,), (3, 0), (0, 3), (7, 3), (2, 3, 4, 5)])
def test_blocks_are_the_whole(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK_ELEMENTS", 6)
    x = torch.randn(shape, dtype=torch.float64)
    y = torch.randn(shape[::-1], dtype=torch.float64).permute(tuple(reversed(range(len(shape)))))
    total, product = torch.empty(shape, dtype=torch.bfloat16), torch.empty(shape, dtype=torch.float64)
    seen: list[int] = []
    by_rows(lambda x, y: seen.append(x.shape[0]) or sum_and_product(x, y), (total, product), (x, y))
    assert torch.equal(total, (x + y).bfloat16()) and torch.equal(product, x * y)
    assert len(seen) > 1 or x.numel() <= 6 * torch.get_num_threads()


def test_of_fake_tensors_one_block_is_made() -> None:
    """Whoever counts memory runs real shapes without values: thousands of blocks would say what one says."""
    seen: list[int] = []
    with FakeTensorMode():
        x, total = torch.empty(1 << 12, 1 << 12), torch.empty(1 << 12, 1 << 12)
        by_rows(lambda x: seen.append(x.shape[0]) or (x + 1,), (total,), (x,))
    assert len(seen) == 1
