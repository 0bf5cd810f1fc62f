"""A short chain of layers, cut into stages and scheduled."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.ir.actions import PipelineSchedule
from autopar.ir.mesh import Mesh
from autopar.ir.schedule import Schedule
from autopar.passes.schedule.free_buffers import FreeBuffers
from autopar.pipeline.schedule_program import ScheduleProgram
from tests.support.programs import PP2, passed
from tests.support.schedules import scheduled


class Chain(nn.Module):
    """Layers, of which the last reads what the first made; batch norm behind the first two where `norm` is given."""

    def __init__(self, num_layers: int = 5, norm: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(num_layers))
        self.norms = nn.ModuleList(nn.BatchNorm1d(4) if norm else nn.Identity() for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        first = x = torch.tanh(self.layers[0](x))
        for layer, norm in zip(self.layers[1:], self.norms, strict=False):
            x = norm(torch.tanh(layer(x)))
        return (x * first).square().sum()


class Tied(nn.Module):
    """The last layer has the first one's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum()


def schedule_after(last: type, order: PipelineSchedule, mesh: Mesh = PP2, model: nn.Module | None = None) -> ScheduleProgram:
    """The schedule of a model after the pass `last`."""
    program = passed(model or Chain(), (torch.randn(8, 4),), None, mesh, order.num_microbatches, order)
    return scheduled(program, last=last)


def schedules(order: PipelineSchedule, mesh: Mesh = PP2, model: nn.Module | None = None) -> tuple[Schedule, ...]:
    """What ranks execute, by their place along `pp`."""
    return schedule_after(FreeBuffers, order, mesh, model).places
