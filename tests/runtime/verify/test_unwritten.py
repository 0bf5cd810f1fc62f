"""Numbers that nobody wrote are not compared: each rank has others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar

aten = torch.ops.aten


class Dirt:
    """What `torch.empty` might give: 7 everywhere on one rank, whose turn it is by and by, and 0 on the others."""

    def __init__(self, dirty_rank: int) -> None:
        self.dirty_rank, self.calls = dirty_rank, 0

    def __call__(self, size: list[int], **options: Any) -> Tensor:
        self.calls += 1
        return empty_of_zeros(size, **options) + 7.0 * (self.calls == self.dirty_rank + 1)


def empty_of_zeros(size: list[int], **options: Any) -> Tensor:
    """What nobody wrote goes by the name of what made it."""
    options.pop("pin_memory", None)
    return torch.zeros(size, **options)


def through_a_transposed_view(h: Tensor) -> Tensor:
    """In its backward torch copies a gradient into memory of its own."""
    h = h.t() * 2
    h[:, ::2].add_(1)
    h.t().tanh_()
    return (h * h).sum() + h[:, ::2].sum()


def in_thirds(h: Tensor) -> Tensor:
    found = torch.empty(6, 9, dtype=h.dtype)
    found[:, ::3], found[:, 1::3], found[:, 2::3] = h, h.tanh(), h.exp()
    return found.square().sum()


def along_the_diagonal(h: Tensor) -> Tensor:
    found = torch.empty(6, 6, dtype=h.dtype)
    found.diagonal().copy_(h[:, 0])
    found.view(-1)[:] = 1
    return found.sum() * h.sum()


def beside_it(h: Tensor) -> Tensor:
    found = torch.cat([h, torch.empty(6, 1, dtype=h.dtype)], 1)
    found[:, 3] = 1
    return found.square().sum()


def in_strides(h: Tensor) -> Tensor:
    found = torch.empty(6, 6, dtype=h.dtype)
    found.as_strided((6, 3), (6, 2)).copy_(h)
    found.as_strided((6, 3), (6, 2), 1).copy_(h)
    return found.square().sum()


WRITES = [through_a_transposed_view, in_thirds, along_the_diagonal, beside_it, in_strides]


@pytest.mark.parametrize("dirty_rank", range(4))
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_memory_that_nobody_wrote_differs_between_ranks(write: Callable[[Tensor], Tensor], dirty_rank: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return write(self.linear(x))

    x = torch.randn(6, 2, dtype=torch.float64)
    parallel = autopar.compile(Model().double(), autopar.virtual_mesh(dp=2, tp=2), example_inputs={"x": x}, backend="eager")
    dirts: list[Dirt] = []
    for program in (parallel.compiled.program, parallel.compiled.local):
        for node in program.graph.nodes:
            if node.target is aten.empty.memory_format and program is parallel.compiled.program:
                node.target = empty_of_zeros
            elif node.target is aten.empty.memory_format:
                dirts.append(Dirt(dirty_rank))
                node.target = dirts[-1]
    report = parallel.verify(x=x)
    assert dirts and all(dirt.calls == 4 for dirt in dirts)
    assert report, str(report)
