"""Sums over the replicas start when gradients are final, behind what is left of the last backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.ir.actions import SINGLE
from autopar.ir.instructions import Add, Launch, Run, Wait
from autopar.ir.mesh import Mesh
from autopar.ir.schedule import Schedule
from autopar.passes.schedule.reduce_gradients import ReduceGradients
from autopar.passes.schedule.write_actions import WriteActions
from autopar.pipeline.schedules import generate
from tests.support.models.chain import schedule_after
from tests.support.models.chain import schedules as chain_schedules
from tests.support.models.zoo import ZOO
from tests.support.programs import passed
from tests.support.schedules import check_schedules, scheduled

WIDTH, LAYERS = 8, 6


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


BATCH = (torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)),)


def schedules(mesh: Mesh, name: str, num_microbatches: int) -> tuple[Schedule, ...]:
    order = generate(name, dict(mesh.axes).get("pp", 1), num_microbatches)
    return scheduled(passed(Layers(), BATCH, None, mesh, num_microbatches, order), joins=False).places


def positions(schedule: Schedule, kind: type) -> list[int]:
    return [number for number, each in enumerate(schedule.instructions) if isinstance(each, kind)]


DP2, PP2_DP2 = Mesh((("dp", 2),)), Mesh((("pp", 2), ("dp", 2)))


@pytest.mark.parametrize(("mesh", "name"), [(DP2, "1f1b"), (PP2_DP2, "1f1b"), (PP2_DP2, "zb-h1")])
def test_each_reduction_stands_behind_the_last_addend_of_its_gradient(mesh: Mesh, name: str) -> None:
    for schedule in schedules(mesh, name, 4):
        last = {each.target: n for n, each in enumerate(schedule.instructions) if isinstance(each, Add)}
        launches = {
            each.sources[0]: n for n, each in enumerate(schedule.instructions) if isinstance(each, Launch) and each.sources[0] in last
        }
        runs = positions(schedule, Run)
        assert len(launches) >= LAYERS
        for name_of_sum, position in launches.items():
            assert not [n for n in runs if last[name_of_sum] < n < position], "nothing but collectives and sums stands between"


def test_reductions_overlap_with_the_last_backward_and_are_waited_for_behind_it() -> None:
    (schedule,) = schedules(DP2, "1f1b", 2)
    span = schedule.spans[-1]
    inside = [n for n in positions(schedule, Launch) if span.begin <= n < span.end]
    runs = [n for n in positions(schedule, Run) if span.begin <= n < span.end]
    early = [n for n in inside if n < runs[-1]]
    assert len(early) >= LAYERS, "most of the layers are reduced before the first layer's backward"
    assert not [n for n in positions(schedule, Wait) if span.begin < n < span.end]


@pytest.mark.parametrize("axes", [{"dp": 2}, {"pp": 2, "dp": 2}])
def test_no_microbatch_waits_for_its_loss(axes: dict[str, int]) -> None:
    """A sum over dp of what only the caller reads is complete at the end."""
    case = ZOO["gpt2"](2)
    options = {"backend": "eager", "num_microbatches": 4, "cluster": "cpu"}
    parallel = autopar.compile(case.model, autopar.virtual_mesh(**axes), example_inputs=case.batch, **options)
    for schedule in parallel.compiled.schedules:
        read = {name for each in schedule.instructions if isinstance(each, Run) for name in each.reads}
        collectives = {name for each in schedule.instructions if isinstance(each, Launch) for name in each.targets} - read
        waits = [n for n, each in enumerate(schedule.instructions) if isinstance(each, Wait) and each.target in collectives]
        assert waits and not [n for n in waits if any(span.begin <= n < span.end for span in schedule.spans)]
    assert parallel.verify(**case.batch)


@pytest.mark.parametrize("axes", [{"dp": 2}, {"pp": 2, "dp": 2}])
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v"])
def test_gradients_are_exact(axes: dict[str, int], name: str) -> None:
    if "pp" not in axes and name != "1f1b":
        name = "gpipe"
    parallel = autopar.compile(
        Layers(), autopar.virtual_mesh(**axes), example_inputs=BATCH, backend="eager", num_microbatches=4, schedule=name
    )
    assert parallel.verify(*BATCH, promote=True)


def test_a_tangent_other_than_one_scales_all_gradients() -> None:
    model, plain = Layers().double(), Layers().double()
    (x,) = (each.double() for each in BATCH)
    parallel = autopar.compile(model, autopar.virtual_mesh(pp=2), example_inputs=(x,), backend="eager", num_microbatches=2)
    (0.25 * parallel(x)).backward()
    (0.25 * plain(x)).backward()
    for ours, theirs in zip(parallel.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12)


def test_gradients_are_reduced_once_a_step() -> None:
    for schedule in chain_schedules(generate("1f1b", 2, 4), Mesh((("pp", 2), ("dp", 2)))):
        launched = [name for each in schedule.instructions if isinstance(each, Launch) for name in each.sources]
        assert launched and all(name.endswith(".sum") for name in launched)


def test_gradients_that_nothing_is_left_to_do_for_leave_as_they_are() -> None:
    """One microbatch: its own collectives have reduced them."""
    before, after = (schedule_after(last, SINGLE, Mesh((("dp", 2),))) for last in (WriteActions, ReduceGradients))
    (old,), (new,) = before.places, after.places
    assert list(new.instructions) == [each for each in old.instructions if not (isinstance(each, Run) and each.fragment == "0REDUCE_GRAD")]


def test_equal_gradients_of_two_parameters_are_reduced_once() -> None:
    """Biases that are added to one value have one gradient; here on two stages of a rank."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

        def forward(self, x: Tensor) -> Tensor:
            total = x = torch.tanh(self.layers[0](x))
            for layer in self.layers[1:]:
                total = total + layer(x)
            return total.square().sum()

    mesh = Mesh((("pp", 2), ("dp", 2)))
    for name, number in (("zb-v", 2), ("1f1b", 2), ("zb-v", 1), ("1f1b", 1)):
        found = chain_schedules(generate(name, 2, number), mesh, Branches())
        check_schedules([schedule for schedule in found for _ in range(2)], mesh)
        gradients = {name for schedule in found for kind, name in schedule.left if kind == "gradient"}
        assert len(gradients) == 10
