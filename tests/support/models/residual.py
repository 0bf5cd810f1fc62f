"""A small language model that compiles in a second: a table, residual MLPs with norms, a head."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.ir.mesh import virtual_mesh
from autopar.runtime.module.parallel_module import ParallelModule

WORDS, WIDTH, BATCH, LENGTH = 32, 16, 4, 8


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Residual(nn.Module):
    """`repeats` runs the blocks so many times, one after another."""

    def __init__(self, num_blocks: int = 2, repeats: int = 1, is_tied: bool = False) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.repeats = repeats
        if is_tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for _ in range(self.repeats):
            for block in self.blocks:
                x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def batch() -> tuple[Tensor]:
    return (torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) % WORDS,)


def parallel_residual(model: nn.Module | None = None, *, dp: int = 2, tp: int = 2, **options: Any) -> ParallelModule:
    """`model` compiled for eager virtual ranks."""
    torch.manual_seed(0)
    mesh = virtual_mesh(dp=dp, tp=tp)
    return autopar.compile(model or Residual().double(), mesh, example_inputs=batch(), backend="eager", **options)


def piped(pp: int = 2, dp: int = 2, tp: int = 1, num_microbatches: int = 2, **options: Any) -> ParallelModule:
    """`Residual` on pp × dp × tp, on A100s; `model` are its arguments."""
    torch.manual_seed(0)
    model = Residual(**options.pop("model", {})).double()
    options = {"backend": "eager", "cluster": "8xa100", "num_microbatches": num_microbatches} | options
    return autopar.compile(model, virtual_mesh(pp=pp, dp=dp, tp=tp), example_inputs=batch(), **options)


@cache
def plain_pipe() -> ParallelModule:
    """Two stages, two microbatches."""
    return piped()


@cache
def tied_pipe() -> ParallelModule:
    """The first and the last stage share a table."""
    return piped(model={"is_tied": True})


@cache
def interleaved_pipe() -> ParallelModule:
    """Four stages on two ranks."""
    return piped(schedule="interleaved", model={"num_blocks": 4})
