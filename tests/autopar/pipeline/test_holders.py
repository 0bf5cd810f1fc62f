"""What the first capture placed stays where it is, whatever a later call would have liked."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.model import CostModel
from autopar.errors import PlanError
from autopar.passes.global_.insert_reshards import InsertReshards
from autopar.passes.global_.place_stages import PlaceStages
from autopar.pipeline.holders import Held, holders_of, starts_where
from autopar.pipeline.placement_units import line_of
from tests.support.captures import compiled
from tests.support.programs import passed

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


def prepared(length: int, module: autopar.ParallelModule | None = None, model: nn.Module | None = None) -> autopar.ParallelModule:
    parallel = module or compiled(model or Tower(), {"pp": 2}, num_microbatches=2, cluster=Cluster.named("a100"))
    parallel.prepare((torch.randn(4, length, WIDTH),), {})
    return parallel


def test_a_later_capture_leaves_every_parameter_with_its_stage() -> None:
    short, long = prepared(4), prepared(4096)
    assert short.compiled.holders != long.compiled.holders, "else this test shows nothing"
    first = short.compiled.holders
    prepared(4096, short)
    assert short.compiled.holders == first
    assert short.verify(torch.randn(4, 4096, WIDTH), promote=True)


def test_every_parameter_is_held_once() -> None:
    holders = prepared(4).compiled.holders
    assert set(holders) == {name for name, _ in Tower().named_parameters()}
    assert all(len(stages) == 1 for stages in holders.values())
    assert {stage for stages in holders.values() for stage in stages} == {0, 1}


def test_a_call_that_cannot_leave_them_there_is_refused_by_name() -> None:
    class Either(Tower):
        def forward(self, x: Tensor, reverse: bool = False) -> Tensor:
            for layer in (*self.late, *self.early) if reverse else (*self.early, *self.late):
                x = functional.gelu(layer(x))
            return x.square().mean()

    parallel = prepared(4, model=Either())
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


# ---- where that leaves the cuts


class Layers(nn.Module):
    """Three layers, each its product, its bias and a tanh; the first weight is the last one's, too, where `is_tied`."""

    def __init__(self, is_tied: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
        if is_tied:
            self.layers[2].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum()


def starts(held: Held, num_stages: int = 2, model: nn.Module | None = None) -> dict[int, str]:
    """By stage what it begins with."""
    program = passed(model or Layers(), (torch.randn(4, 4),), InsertReshards)
    line = line_of(program, CostModel(Cluster.ideal(), program.mesh))
    found = starts_where(line, program, held, num_stages)
    assert len(found) == num_stages and list(found) == sorted(set(found))
    return {stage: line.line.units[start].name for stage, start in enumerate(found)}


def weights(*stages: int) -> Held:
    return {f"layers.{number}.weight": (stage,) for number, stage in enumerate(stages)}


def test_cuts_lie_where_the_parameters_of_the_next_stage_begin() -> None:
    assert starts(weights(0, 0, 1))[1] == "layers.2 aten.mm"
    assert starts(weights(0, 1, 1))[1] == "layers.1 aten.mm"
    assert list(starts(weights(0, 1, 2), 3).values())[1:] == ["layers.1 aten.mm", "layers.2 aten.mm"]


def test_stages_without_parameters_lie_between_the_others_or_behind_them() -> None:
    """As a pooling layer or a loss may be."""
    found = starts(weights(0, 0, 2), 3)
    assert found[1] != found[2] == "layers.2 aten.mm"
    found = starts(weights(0, 1, 1), 3)
    assert found[1] == "layers.1 aten.mm" and "layers" not in found[2]


def test_a_tied_parameter_may_be_read_on_any_stage_that_holds_it() -> None:
    held = {"layers.0.weight": (0, 1), "layers.1.weight": (1,)}
    assert starts(held, model=Layers(is_tied=True))[1] == "layers.1 aten.mm"


def test_what_cannot_stay_is_refused_by_name() -> None:
    with pytest.raises(
        PlanError, match=r"the first capture left 'layers.2.weight' with stage 0 of the pipeline; this call reads it where stage 1 is"
    ):
        starts(weights(0, 1, 0))
    with pytest.raises(PlanError, match=r"this call has work for \d+ of the 40 pipeline stages"):
        starts(weights(0, 1, 1), 40)


def test_the_holders_of_a_program_are_the_stages_that_read_it() -> None:
    placed = passed(Layers(is_tied=True), (torch.randn(4, 4),), PlaceStages)
    found = holders_of(placed)
    assert found["layers.0.weight"] == (0, 1) and len(found["layers.1.weight"]) == 1
    assert starts(found, model=Layers(is_tied=True))
