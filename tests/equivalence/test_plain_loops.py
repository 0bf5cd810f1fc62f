"""Plain training loops on processes that do what loops do: freeze layers, evaluate first, make optimizers too early, miss a backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar import AutoparError, InputError, ParallelModule

MESHES = {"dp, pp": (2, 2, "dp", "pp"), "pp": (1, 4, "dp", "pp"), "dp, tp": (2, 2, "dp", "tp")}
SINGLE = {"dp": (4, 1, "dp", "tp"), "tp": (1, 4, "dp", "tp")}


class Layers(nn.Module):
    """Four, so that each of four stages has one; with its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=torch.float64) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x - y).square().mean()


def mesh_of(name: str) -> DeviceMesh:
    dp, other, *names = (MESHES | SINGLE)[name]
    return init_device_mesh("cpu", (dp, other), mesh_dim_names=tuple(names))


def shares(mesh: DeviceMesh, number: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """This rank's part of a batch, and all of it."""
    torch.manual_seed(number)
    x, y = torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)
    place, dp = mesh.get_local_rank("dp"), mesh["dp"].size()
    return (x.chunk(dp)[place], y.chunk(dp)[place]), (x, y)


def apart(parallel: ParallelModule, plain: nn.Module) -> float:
    """Of the parameters that this rank holds, which a stage may have none of."""
    wanted = dict(plain.named_parameters())
    found = {name: each.full_tensor() for name, each in parallel.named_parameters() if isinstance(each, DTensor)}
    return max((float((each - wanted[name]).abs().max().detach()) for name, each in found.items()), default=0.0)


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None, batch: tuple[Tensor, Tensor]) -> float:
    loss = model(*batch)
    loss.backward()
    if optimizer is not None:
        optimizer.step()
    model.zero_grad()
    return float(loss.detach())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer | None:
    trained = [each for each in model.parameters() if each.requires_grad]
    return torch.optim.SGD(trained, lr=0.1) if trained else None


def trained_apart(name: str, freeze: Callable[[nn.Module, int], None], options: dict[str, Any]) -> list[float]:
    """From the plain model, of which `freeze` changes what is trained before each of four steps, the first being before the compile."""
    mesh, model = mesh_of(name), Layers()
    plain, found = copy.deepcopy(model), list[float]()
    freeze(model, 0)
    mine, _ = shares(mesh, 0)
    parallel = autopar.compile(model, mesh, example_inputs=mine, cluster="ideal", timeout=180, **options)
    for number in range(4):
        if number:
            freeze(parallel, number)
        freeze(plain, number)
        mine, whole = shares(mesh, number)
        losses = step(parallel, optimizer_of(parallel), mine), step(plain, optimizer_of(plain), whole)
        found += [abs(losses[0] - losses[1]), apart(parallel, plain)]
    return found


def head_only(model: nn.Module, number: int) -> None:
    if number == 0:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("layers.3"))


def by_turns(model: nn.Module, number: int) -> None:
    """Of what a rank holds: a stage's own, in a pipeline."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(number == 0 or int(name.split(".")[1]) % 2 == number % 2)


def frozen_after_a_step(model: nn.Module, number: int) -> None:
    if number == 2:
        model.requires_grad_(False)
        for name, parameter in model.named_parameters():
            if name.startswith("layers.0"):
                parameter.requires_grad_(True)


def assert_trained_alike(ranks: Any, name: str, freeze: Callable[[nn.Module, int], None], backend: str) -> None:
    for found in ranks.run(trained_apart, name, freeze, {"backend": backend}):
        assert max(found) < 1e-9, found


@pytest.mark.parametrize("freeze", [head_only, by_turns, frozen_after_a_step])
@pytest.mark.parametrize("name", ["dp, pp", "pp"])
def test_frozen_layers(gloo_ranks: Any, name: str, freeze: Callable[[nn.Module, int], None]) -> None:
    assert_trained_alike(gloo_ranks, name, freeze, "eager")


def test_frozen_layers_on_the_default_backend(gloo_ranks: Any) -> None:
    assert_trained_alike(gloo_ranks, "dp, pp", head_only, "inductor")


def evaluated_first(name: str, verifies: bool) -> float:
    mesh, model = mesh_of(name), Layers()
    plain = copy.deepcopy(model)
    parallel = autopar.compile(model, mesh, backend="eager", cluster="ideal", timeout=180)
    mine, whole = shares(mesh, 0)
    with torch.inference_mode():
        if verifies:
            assert parallel.verify(*mine)
        first = parallel(*mine)
    assert abs(float(first) - float(plain(*whole).detach())) < 1e-12 and not first.requires_grad
    for number in range(2):
        mine, whole = shares(mesh, number)
        step(parallel, optimizer_of(parallel), mine)
        step(plain, optimizer_of(plain), whole)
        with torch.inference_mode():
            parallel(*mine)
    return apart(parallel, plain)


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("verifies", [False, True])
def test_evaluation_in_inference_mode_comes_first(gloo_ranks: Any, name: str, verifies: bool) -> None:
    assert max(gloo_ranks.run(evaluated_first, name, verifies)) < 1e-9


class Counts(nn.Module):
    """Made and called in inference mode, it writes what may be written there alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x)


@torch.inference_mode()
def test_a_model_made_in_inference_mode() -> None:
    model, x = Counts(), torch.randn(4, 8)
    parallel = autopar.compile(model, autopar.virtual_mesh(dp=2), backend="eager")
    wanted = model.linear(x)
    for number in (1, 2):
        assert torch.allclose(parallel(x), wanted) and float(model.calls) == number


def made_too_early(name: str) -> str:
    mesh, model = mesh_of(name), Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine, _ = shares(mesh, 0)
    parallel = autopar.compile(model, mesh, example_inputs=mine, backend="eager", cluster="ideal", timeout=180)
    parallel(*mine).backward()
    with pytest.raises(AutoparError) as caught:
        optimizer.step()
    late = torch.optim.SGD(parallel.parameters(), lr=0.1)
    late.step()
    for group in optimizer.param_groups:
        for each in group["params"]:
            each.grad = torch.zeros_like(each)
    optimizer.step()  # they are another model's as well, and have gradients there
    return str(caught.value)


@pytest.mark.parametrize("name", MESHES)
def test_an_optimizer_of_parameters_that_are_replaced_is_refused(gloo_ranks: Any, name: str) -> None:
    for said in gloo_ranks.run(made_too_early, name):
        assert "made of 8 parameters of the model, the first is 'layers.0.weight', before they were placed" in said


def backward_missed(name: str, dtype: torch.dtype) -> tuple[str, float]:
    """On rank 0, whose exception is swallowed: what all raise in its place, and how far the next gradients are from those of one device."""
    mesh, model = mesh_of(name), Layers().to(dtype)
    plain, (mine, whole) = copy.deepcopy(model), [[each.to(dtype) for each in batch] for batch in shares(mesh, 0)]
    parallel = autopar.compile(model, mesh, example_inputs=tuple(mine), backend="eager", cluster="ideal", timeout=60)
    parallel(*mine).backward()
    with pytest.raises(InputError) as caught:
        loss = parallel(*mine)
        if dist.get_rank() != 0:
            loss.backward()
        parallel(*mine)
    parallel.zero_grad()
    parallel(*mine).backward()  # said once
    plain(*whole).backward()
    wanted = {key: each.grad for key, each in plain.named_parameters()}
    held = {key: each.grad.full_tensor() for key, each in parallel.named_parameters() if isinstance(each.grad, DTensor)}
    return str(caught.value), max((float((each - wanted[key]).abs().max()) for key, each in held.items()), default=0.0)


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float64) for name in [*MESHES, *SINGLE]), *((name, torch.float32) for name in SINGLE)], ids=str
)
def test_a_backward_that_one_rank_missed_is_said(gloo_ranks: Any, name: str, dtype: torch.dtype) -> None:
    """Others wait in the middle of theirs: what the rank says next, of its next call, is not to be taken for its part of a gradient."""
    for said, difference in gloo_ranks.run(backward_missed, name, dtype):
        assert "\n  rank 0: a call (how often backward ran: 1)" in said
        assert "\n  ranks 1, 2, 3: backward of call 2 (how often backward ran, with this one: 2)" in said
        assert difference < (1e-12 if dtype == torch.float64 else 1e-6)


def backwards_of_two_calls() -> str:
    """Of which rank 0 leaves out the first."""
    mesh, model = mesh_of("dp"), Layers()
    (mine, _), (other, _) = shares(mesh, 0), shares(mesh, 1)
    parallel = autopar.compile(model, mesh, example_inputs=mine, backend="eager", cluster="ideal", timeout=60)
    losses = [parallel(*mine), parallel(*other)]
    with pytest.raises(InputError) as caught:
        for number, loss in enumerate(losses):
            if number or dist.get_rank() != 0:
                loss.backward()
    return str(caught.value)


def test_backwards_of_two_calls_are_not_added_up(gloo_ranks: Any) -> None:
    for said in gloo_ranks.run(backwards_of_two_calls):
        assert "rank 0: backward of call 2 (" in said and "ranks 1, 2, 3: backward of call 1 (" in said
