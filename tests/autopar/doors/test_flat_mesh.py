"""A flat mesh becomes the axes that are found for it, and computes what the model computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.errors import AutoparError, InputError, PlanError
from tests.support.models.language import mixtral, t5
from tests.support.models.pipelined import unet
from tests.support.models.trained import batch, small_gpt
from tests.support.models.vision import resnet
from tests.support.models.zoo import Case, vit

TOLERANCE = 1e-5


def deviation(model: torch.nn.Module, parallel: autopar.ParallelModule, inputs: Any) -> float:
    """Of loss and gradients from the model's own, relative to the largest of each."""
    model.zero_grad()
    theirs, ours = model(**inputs), parallel(**inputs)
    theirs.backward(), ours.backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    errors = [abs(float(ours.detach()) - float(theirs.detach())) / abs(float(theirs.detach()))]
    for name, each in parallel.named_parameters():
        if each.grad is None:
            continue
        found = each.grad.full_tensor() if hasattr(each.grad, "full_tensor") else each.grad
        errors.append(float((found - gradients[name]).abs().max() / gradients[name].abs().max().clamp_min(1e-12)))
    return max(errors)


def test_virtual_ranks_get_the_best_mesh(one_thread: None) -> None:
    model, inputs = small_gpt(num_blocks=2), batch(0)
    parallel = autopar.compile(model, autopar.virtual_mesh(world=4), example_inputs=inputs, backend="eager", cluster="4xH100")
    ranked = autopar.rank_plans(
        model, cluster="4xH100", num_devices=4, global_batch=len(inputs["tokens"]), example_inputs=inputs, precision=None, kernels="auto"
    )
    assert {name: size for name, size in parallel.mesh.axes} == {name: size for name, size in ranked.plans[0].axes if size > 1}
    assert parallel.plan.mesh.size == 4
    assert deviation(model, parallel, inputs) < TOLERANCE


def on_four_ranks() -> tuple[float, tuple[str, ...], float]:
    torch.manual_seed(0)
    model, inputs = small_gpt(num_blocks=2), batch(0)
    twin = small_gpt(num_blocks=2)
    twin.load_state_dict(model.state_dict())
    mesh = init_device_mesh("cpu", (4,))  # no names, and inputs of the global batch
    parallel = autopar.compile(model, mesh, example_inputs=inputs, backend="eager", cluster="4xH100")
    found = deviation(twin, parallel, inputs)
    return found, parallel.mesh.names, dist.get_world_size()


def test_processes_get_it_too_and_take_the_global_batch(gloo_ranks: Any) -> None:
    answers = gloo_ranks.run(on_four_ranks)
    assert len({names for _, names, _ in answers}) == 1 and max(found for found, _, _ in answers) < TOLERANCE


@pytest.mark.parametrize("make", [t5, vit, mixtral, resnet, unet], ids=lambda make: make.__name__)
@pytest.mark.slow
def test_models_that_no_formula_knows_run_by_the_plan_that_is_found(make: Callable[[], Case], one_thread: None) -> None:
    case = make()
    parallel = autopar.compile(case.model, autopar.virtual_mesh(world=8), example_inputs=case.batch, backend="eager", cluster="8xH100")
    assert parallel.mesh.size == 8
    report = parallel.verify(**case.batch, promote=True)
    assert report, str(report)


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"example_inputs": None}, InputError, "pass example_inputs"),
        ({"pins": {"*": ("tp",)}}, PlanError, "a flat mesh has none yet"),
        ({"memory_budget": "1kB"}, PlanError, "no plan was found"),
        ({"num_microbatches": 5}, AutoparError, "5 microbatches do not divide its share"),
        ({"example_inputs": torch.ones(2)}, InputError, "as a dict or a tuple"),
    ],
)
def test_what_cannot_be_found_is_said(changes: dict[str, Any], kind: type[Exception], text: str) -> None:
    options = {"example_inputs": batch(0), "backend": "eager", "cluster": "4xH100"} | changes
    with pytest.raises(kind) as caught:
        autopar.compile(small_gpt(num_blocks=1), autopar.virtual_mesh(world=4), **options)
    assert text in str(caught.value)


def test_the_state_of_the_optimizer_is_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def ranked(*args: Any, **options: Any) -> autopar.RankedPlans:
        asked.append(options["optimizer"])
        return autopar.rank_plans(*args, **options)

    monkeypatch.setattr("autopar.doors.flat_mesh.rank_plans", ranked)
    model, x = torch.nn.Linear(8, 8), torch.ones(4, 8)
    for optimizer in ("sgd", (torch.optim.SGD, {"lr": 0.1}), None):
        autopar.compile(model, autopar.virtual_mesh(world=2), example_inputs=(x,), backend="eager", optimizer=optimizer)
    assert asked[0] == "sgd" and isinstance(asked[1], torch.optim.SGD) and asked[2] is None
