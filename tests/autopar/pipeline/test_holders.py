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
from autopar.ir.keys import STAGE
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.passes.global_.insert_reshards import InsertReshards
from autopar.passes.global_.place_stages import PlaceStages
from autopar.pipeline.holders import Held, holders_of, starts_where
from autopar.pipeline.placement_units import ProgramLine, line_of
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
    """Three layers, each its product, its bias if there is one and a tanh; the first weight is the last one's, too, where `is_tied`."""

    def __init__(self, is_tied: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=bias) for _ in range(3))
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
    with pytest.raises(PlanError, match=r"capture left 'layers.2.weight' with stage 0 .*; this call reads it behind what stage 1 holds"):
        starts(weights(0, 1, 0))
    with pytest.raises(
        PlanError, match=r"left 'layers.0.weight' with stage 2 .*; this call reads it where stage 0 is the last that can be"
    ):
        starts(weights(2, 2, 2), 3)
    with pytest.raises(
        PlanError, match=r"'layers.0.weight' with stage 0 .* and 'layers.0.bias' with stage 1 .*; this call reads them in one op"
    ):
        starts({"layers.0.weight": (0,), "layers.0.bias": (1,)}, model=Layers(bias=True))
    with pytest.raises(PlanError, match=r"this call has work for \d+ of the 40 pipeline stages"):
        starts(weights(0, 1, 1), 40)


def test_the_holders_of_a_program_are_the_stages_that_read_it() -> None:
    placed = passed(Layers(is_tied=True), (torch.randn(4, 4),), PlaceStages)
    found = holders_of(placed)
    assert found["layers.0.weight"] == (0, 1) and len(found["layers.1.weight"]) == 1
    assert starts(found, model=Layers(is_tied=True))


# ---- evaluations before the first training call


class Averaged(nn.Module):
    """The mean square of what a module gives, or of the first of what it gives."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        found = self.module(x)
        return (found[0] if isinstance(found, tuple) else found).square().mean()


class Blends(nn.Module):
    """Ops of two and three parameters, and several of them in one call."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, kdim=4, vdim=4)
        self.scale, self.shift, self.weight = (nn.Parameter(torch.randn(size)) for size in ((8,), (8,), (8, 8)))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.addcmul(x, self.scale, self.shift)
        x = self.attention(x, x[..., :4], x[..., 4:], need_weights=False)[0]
        x = functional.linear(functional.linear(x, self.weight, self.scale), self.weight, self.shift)
        return torch.lerp(x, self.scale, self.shift)


ARCHITECTURES = {
    "linears": lambda: (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 8)), (2, 4, 8)),
    "images": lambda: (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.PReLU(), nn.ConvTranspose2d(4, 4, 3), nn.GroupNorm(2, 4)),
        (2, 3, 8, 8),
    ),
    "encoder": lambda: (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 4, 8)),
    "recurrent": lambda: (nn.GRU(8, 8, batch_first=True), (2, 2, 8)),
    "blends": lambda: (Blends(), (2, 4, 8)),
}


@pytest.mark.parametrize("axes", [{"pp": 2}, {"pp": 2, "tp": 2}], ids="x".join)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_wherever_an_evaluation_is_cut_training_can_be(architecture: str, axes: dict[str, int]) -> None:
    """A sanity check before training is the first capture, and decides which stage holds a parameter."""
    module, size = ARCHITECTURES[architecture]()
    mesh, model = Mesh(tuple(axes.items())), Averaged(module)

    def lined() -> tuple[Program, ProgramLine]:
        program = passed(model, (torch.randn(size),), InsertReshards, mesh)
        return program, line_of(program, CostModel(Cluster.ideal(), program.mesh))

    training, trained = lined()
    model.eval()
    with torch.no_grad():
        evaluation, line = lined()
    assert len(line.nodes) > 2
    for cut in range(1, len(line.nodes)):
        stages = line.forward_stages((0,) * cut + (1,) * (len(line.nodes) - cut))
        placed = evaluation.copy()
        for node in placed.graph.nodes:
            if (twin := next((each for each in stages if each.name == node.name), None)) is not None:
                STAGE[node] = stages[twin]
        assert starts_where(trained, training, holders_of(placed), 2)


def test_an_evaluation_may_come_before_training() -> None:
    """By cost it is cut where a Linear's product ends and its bias would begin."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(24, 16), nn.Linear(16, 24, bias=False)
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh()) for _ in range(2))

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.table(tokens)
            for layer in self.layers:
                x = x + layer(x)
            return functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())

    parallel, tokens = compiled(Residual(), {"pp": 2}), torch.randint(24, (8, 6))
    parallel.eval()
    with torch.no_grad():
        parallel(tokens)
    evaluated = parallel.compiled.holders
    assert parallel.train().verify(tokens, promote=True) and parallel.compiled.holders == evaluated
