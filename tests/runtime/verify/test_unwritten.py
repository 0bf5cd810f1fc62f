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


@pytest.mark.parametrize("dirty_rank", range(4))
@pytest.mark.parametrize("write", [through_a_transposed_view, in_thirds], ids=lambda write: write.__name__)
def test_memory_that_nobody_wrote_differs_between_ranks(write: Callable[[Tensor], Tensor], dirty_rank: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return write(self.linear(x))

    x = torch.randn(6, 2, dtype=torch.float64)
    parallel = autopar.compile(Model().double(), autopar.virtual_mesh(dp=2, tp=2), example_inputs={"x": x}, backend="eager")
    (of_all,), (of_rank,) = (
        [node for node in program.graph.nodes if node.target is aten.empty.memory_format]
        for program in (parallel.compiled.program, parallel.compiled.local)
    )
    of_all.target, of_rank.target = empty_of_zeros, (dirt := Dirt(dirty_rank))
    report = parallel.verify(x=x)
    assert dirt.calls == 4
    assert report, str(report)
