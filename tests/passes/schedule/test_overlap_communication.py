"""Communication behind compute: nothing where links are free, shorter steps where they are not, any legal order exact."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.memory import MemoryBudget
from autopar.cost.model import CostModel
from autopar.cost.schedule_memory import peak_bytes_on_processes
from autopar.ir.instructions import Run
from autopar.ir.schedule import Schedule
from autopar.passes.schedule.overlap_communication import Overlap, OverlapCommunication, links_of, ordered
from autopar.pipeline.exposure import predicted_exposure
from autopar.pipeline.fragment_prices import fragment_seconds
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.pipeline.simulate import simulate
from tests.support.models.zoo import ZOO
from tests.support.orders import random_orders

MESHES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp": 2, "tp": 2}, {"zero": 3}),
    ({"pp": 2, "dp": 2}, {"zero": 2, "num_microbatches": 4}),
]


class Layers(nn.Module):
    """Four layers of such a size that gathers and compute of an A100 take about as long."""

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def compiled(
    axes: dict[str, int], width: int = 16, cluster: str | None = None, **options: Any
) -> tuple[autopar.ParallelModule, torch.Tensor]:
    x = torch.randn(16, width, generator=torch.Generator().manual_seed(1))
    mesh = autopar.virtual_mesh(**axes)
    return autopar.compile(Layers(width), mesh, example_inputs=(x,), backend="eager", cluster=cluster, **options), x


def before_and_after(parallel: autopar.ParallelModule) -> tuple[ScheduleProgram, ScheduleProgram, Overlap]:
    steps = parallel.compiled.schedule_steps
    at = next(number for number, step in enumerate(steps) if step.name == "overlap communication")
    decision = steps[at].decision
    assert isinstance(decision, Overlap)
    return steps[at - 1].program, steps[at].program, decision


@pytest.fixture(scope="module")
def step() -> tuple[ScheduleProgram, ScheduleProgram, Overlap]:
    return before_and_after(compiled({"dp": 2}, 1024, "8xa100", zero=3, num_microbatches=2)[0])


def test_less_is_exposed_and_the_step_is_shorter_on_paper(step: tuple[ScheduleProgram, ScheduleProgram, Overlap]) -> None:
    program, result, decision = step
    assert decision.before is not None and decision.after is not None
    assert decision.after.exposed_seconds < 0.75 * decision.before.exposed_seconds
    assert decision.after.step_seconds < decision.before.step_seconds
    assert sorted(map(str, result.places[0].instructions)) == sorted(map(str, program.places[0].instructions))
    cost = CostModel(Cluster.named("8xa100"), program.mesh)
    links = links_of(cost.cluster, program.mesh)
    again = predicted_exposure(result, simulate(result, fragment_seconds(result, cost), links))
    assert again == decision.after
    assert str(decision).startswith("exposed ") and "→" in str(decision)


def test_the_order_goes_through_json_to_the_other_ranks(step: tuple[ScheduleProgram, ScheduleProgram, Overlap]) -> None:
    program, result, decision = step
    chosen = OverlapCommunication(Cluster.named("8xa100"))
    read = chosen.read(program, json.loads(json.dumps(chosen.written(program, decision))))
    assert str(chosen.apply(program, read)) == str(result)
    assert chosen.apply(program, chosen.read(program, None)) is program


def test_what_does_not_fit_into_the_budget_stays_as_it_is(step: tuple[ScheduleProgram, ScheduleProgram, Overlap]) -> None:
    program, _, _ = step
    held = max(map(peak_bytes_on_processes, program.places))
    tight = OverlapCommunication(Cluster.named("8xa100"), MemoryBudget(float(held)))
    decision = tight.decide(program)
    assert max(map(peak_bytes_on_processes, tight.apply(program, decision).places)) <= held


def test_where_links_cost_nothing_nothing_is_moved() -> None:
    program, result, decision = before_and_after(compiled({"dp": 2}, zero=3)[0])
    assert result is program
    assert str(decision) == "nothing to hide: links cost nothing here"


def test_a_rank_alone_has_nothing_to_hide() -> None:
    program, result, decision = before_and_after(compiled({"dp": 1}, cluster="8xa100")[0])
    assert result is program and decision.orders is None


@pytest.mark.parametrize(("axes", "options"), MESHES[1:], ids=str)
def test_the_step_with_its_updates_is_that_of_the_model(axes: dict[str, int], options: dict[str, Any]) -> None:
    plain = Layers(256)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    parallel, x = compiled(axes, 256, "8xa100", optimizer=(torch.optim.SGD, {"lr": 0.1}), **options)
    assert before_and_after(parallel)[2].orders is not None and parallel.compiled.updating is not None
    for _ in range(2):
        loss = parallel.train_step(x)
        optimizer.zero_grad()
        plain(x).backward()
        optimizer.step()
    theirs = dict(plain.named_parameters())
    assert all(torch.allclose(parameter, theirs[name], atol=1e-6) for name, parameter in parallel.named_parameters())
    assert loss.isfinite()


# ---- any legal order is exact


@contextmanager
def random_order(seed: int) -> Iterator[None]:
    with patch.object(OverlapCommunication, "decide", lambda self, program: Overlap(random_orders(program, seed))):
        yield


@pytest.mark.parametrize(("axes", "options"), MESHES, ids=str)
def test_random_legal_orders_are_exact(axes: dict[str, int], options: dict[str, Any]) -> None:
    texts = set[str]()
    for seed in range(2):
        with random_order(seed):
            parallel, x = compiled(axes, **options)
        assert parallel.verify(x, promote=True)
        texts.add(str(parallel.compiled.schedule))
    assert len(texts) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
@pytest.mark.parametrize(("axes", "options"), [*MESHES, ({"pp": 2, "tp": 2}, {"num_microbatches": 4, "schedule": "zb-h1"})], ids=str)
def test_random_legal_orders_of_models_are_exact(name: str, axes: dict[str, int], options: dict[str, Any]) -> None:
    for seed in range(5):
        case = ZOO[name](0)
        with random_order(seed):
            parallel = autopar.compile(case.model, autopar.virtual_mesh(**axes), example_inputs=case.batch, backend="eager", **options)
        assert parallel.verify(promote=True, **case.batch)


def trains_in_random_orders() -> list[tuple[float, str]]:
    found = []
    for seed in range(2):
        x = torch.randn(16, 16, generator=torch.Generator().manual_seed(1))
        plain = Layers(16)
        plain(x).backward()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        mine = x.chunk(2)[mesh.get_local_rank("dp")]
        with random_order(seed):
            parallel = autopar.compile(Layers(16), mesh, example_inputs=(mine,), backend="eager", zero=2, num_microbatches=2, timeout=60)
        parallel(mine).backward()
        theirs = dict(plain.named_parameters())
        errors = [0.0]
        for name, parameter in parallel.named_parameters():
            if parameter.grad is not None:
                errors.append(float((parameter.grad.full_tensor() - theirs[name].grad).abs().max()))
        found.append((max(errors), str(parallel.compiled.schedule)))
    return found


def test_ranks_launch_in_the_order_that_the_first_decided(gloo_ranks: Any) -> None:
    results = gloo_ranks.run(trains_in_random_orders)
    for rank in results:
        assert [text for _, text in rank] == [text for _, text in results[0]]
        assert rank[0][1] != rank[1][1]
        assert all(error < 1e-5 for error, _ in rank)


def test_an_order_by_hand_is_applied_as_it_is() -> None:
    program, _, _ = before_and_after(compiled({"dp": 2})[0])
    orders = random_orders(program, 0)
    found = ordered(program, orders)
    assert [str(each) for each in found.places[0].instructions] == [str(program.places[0].instructions[number]) for number in orders[0]]


# ---- microbatches in turns


class Blocks(nn.Module):
    """Three blocks whose products are large enough to be split over tensor parallelism on an A100."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        torch.manual_seed(0)
        inner = 4 * width
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, inner), nn.Tanh(), nn.Dropout(0.1), nn.Linear(inner, width))
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def turns_of(schedule: Schedule) -> int:
    """How often a fragment of one microbatch follows one of the next."""
    numbers = [schedule.microbatch_of(each.outputs[0]) for each in schedule.instructions if isinstance(each, Run) and each.outputs]
    return sum(one == other + 1 for one, other in pairwise(numbers))


def test_a_forward_computes_while_collectives_of_a_backward_move() -> None:
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"example_inputs": (x,), "backend": "eager", "cluster": "8xa100", "num_microbatches": 4, "zero": 3}
    parallel = autopar.compile(Blocks(), autopar.virtual_mesh(dp=2, tp=2), **options)
    program, result, decision = before_and_after(parallel)
    assert decision.before is not None and decision.after is not None
    assert decision.after.step_seconds < 0.95 * decision.before.step_seconds
    (schedule,) = result.places
    assert turns_of(schedule) > 12
    held = peak_bytes_on_processes(schedule) / peak_bytes_on_processes(program.places[0])
    assert held < 1.25
    assert "# 0F1, with some of microbatch 0" in parallel.print_program()
    assert parallel.verify(x, promote=True)


def test_weights_that_are_updated_between_microbatches_are_not_overtaken() -> None:
    """What is awaited of one microbatch would let the next go first, past the update."""
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(1))
    versions = autopar.TrainStep(weight_versions="stash")
    options: dict[str, Any] = {"optimizer": (torch.optim.SGD, {"lr": 10.0}), "train_step": versions, "num_microbatches": 4}
    options |= {"example_inputs": (x,), "backend": "eager", "cluster": "8xa100"}
    parallel = autopar.compile(Blocks().eval(), autopar.virtual_mesh(dp=2, tp=2), **options)
    assert before_and_after(parallel)[2].reason == "weights are updated between microbatches"
    plain = Blocks().eval()
    optimizer = torch.optim.SGD(plain.parameters(), lr=10.0)
    for parts in zip(*(share.chunk(4) for share in x.chunk(2)), strict=True):
        optimizer.zero_grad()
        plain(torch.cat(parts)).backward()
        optimizer.step()
    parallel.train_step(x)
    theirs, given = dict(plain.named_parameters()), dict(Blocks().named_parameters())
    for name, parameter in parallel.named_parameters():
        change = float((theirs[name] - given[name]).abs().max())
        assert change > 0 and float((parameter - theirs[name]).abs().max()) < 1e-3 * change


def trains_in_turns(backend: str) -> tuple[float, int]:
    """The largest error of a gradient, as a share of its largest element, and how often a fragment of one microbatch follows one of the
    next."""
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(1))
    plain = Blocks().eval()
    plain(x).backward()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mine = x.chunk(2)[mesh.get_local_rank("dp")]
    options: dict[str, Any] = {"example_inputs": (mine,), "backend": backend, "cluster": "8xa100", "zero": 3, "num_microbatches": 4}
    parallel = autopar.compile(Blocks().eval(), mesh, timeout=120, **options)
    parallel(mine).backward()
    theirs = dict(plain.named_parameters())
    errors = [0.0]
    for name, parameter in parallel.named_parameters():
        wanted = theirs[name].grad
        assert parameter.grad is not None and wanted is not None
        errors.append(float((parameter.grad.full_tensor() - wanted).abs().max() / wanted.abs().max()))
    return max(errors), turns_of(parallel.compiled.schedule.places[0])


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_ranks_train_in_turns(gloo_ranks: Any, backend: str) -> None:
    for error, turns in gloo_ranks.run(trains_in_turns, backend):
        assert error < 1e-4 and turns > 6
