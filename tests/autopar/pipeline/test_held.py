"""What the first capture placed stays where it is, whatever a later call would have liked."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.errors import PlanError
from autopar.hardware.cluster import Cluster

WIDTH = 8


class Tower(nn.Module):
    """Layers whose work grows with the calls' length in the first half and not in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.late = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.early:
            x = functional.gelu(layer(x))
        x = x[:, :4]
        for layer in self.late:
            x = functional.gelu(layer(x))
        return x.square().mean()


def compiled(length: int, module: autopar.ParallelModule | None = None, model: nn.Module | None = None) -> autopar.ParallelModule:
    parallel = module or autopar.compile(
        model or Tower(), autopar.virtual_mesh(pp=2), backend="eager", num_microbatches=2, cluster=Cluster.named("a100")
    )
    parallel.prepare((torch.randn(4, length, WIDTH),), {})
    return parallel


def test_a_later_capture_leaves_every_parameter_with_its_stage() -> None:
    short, long = compiled(4), compiled(4096)
    assert short.compiled.holders != long.compiled.holders, "else this test shows nothing"
    first = short.compiled.holders
    compiled(4096, short)
    assert short.compiled.holders == first
    assert short.verify(torch.randn(4, 4096, WIDTH), promote=True)


def test_every_parameter_is_held_once() -> None:
    holders = compiled(4).compiled.holders
    assert set(holders) == {name for name, _ in Tower().named_parameters()}
    assert all(len(stages) == 1 for stages in holders.values())
    assert {stage for stages in holders.values() for stage in stages} == {0, 1}


def test_a_call_that_cannot_leave_them_there_is_refused_by_name() -> None:
    class Either(Tower):
        def forward(self, x: Tensor, reverse: bool = False) -> Tensor:
            for layer in (*self.late, *self.early) if reverse else (*self.early, *self.late):
                x = functional.gelu(layer(x))
            return x.square().mean()

    parallel = compiled(4, model=Either())
    with pytest.raises(PlanError, match="(?s)the first capture left 'early.*compile the model again"):
        parallel.prepare((torch.randn(4, 4, WIDTH),), {"reverse": True})


def test_slow_devices_get_less() -> None:
    def share(speeds: tuple[float, ...]) -> int:
        from dataclasses import replace

        cluster = replace(Cluster.named("a100"), stage_speeds=speeds)
        mesh = autopar.virtual_mesh(pp=2)
        parallel = autopar.compile(
            Tower(), mesh, backend="eager", num_microbatches=2, cluster=cluster, example_inputs=(torch.randn(4, 4, WIDTH),)
        )
        return sum(stages == (0,) for stages in parallel.compiled.holders.values())

    assert share((1.0, 0.25)) > share((1.0, 1.0)) > share((0.25, 1.0))
