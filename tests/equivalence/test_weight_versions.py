"""Pipelines that update within a call train as PipeDream and PipeDream-2BW do on paper: a simulation on one device, which knows of a stage
only which parameters it holds, leaves the same parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpt import GPT
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call

import autopar
from autopar import TrainStep
from autopar.errors import AutoparError, PlanError
from tests.support.captures import compiled
from tests.support.models.trained import Lamb, Layers, small_gpt
from tests.support.models.trained import batch as tied_batch

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2),
}
SAMPLES, LENGTH, VOCABULARY, CALLS = 16, 6, 16, 3


class Line(nn.Module):
    """Four layers and the mean of what they miss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = nn.functional.one_hot(tokens, 16).double()[..., :6]
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x - labels[..., None] / 16).square().mean()


def untied_gpt() -> nn.Module:
    torch.manual_seed(0)
    return GPT(VOCABULARY, num_layers=4, width=16, num_heads=2, max_length=LENGTH).double()


MODELS: dict[str, Callable[[], nn.Module]] = {"line": lambda: Line().double(), "gpt": untied_gpt}


def batch(number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def microbatch(values: dict[str, Tensor], number: int, of: int, dp: int) -> dict[str, Tensor]:
    """The `number`-th part of every share along dp."""
    return {name: torch.cat([share.chunk(of)[number] for share in value.chunk(dp)]) for name, value in values.items()}


def simulated(
    model: nn.Module, make: Make, stages: dict[str, int], kind: str, every: int, num_microbatches: int, dp: int = 1
) -> list[float]:
    """The losses of the calls; `model` is trained as the papers say, each call a stretch of the stream that begins with newest weights.

    Of p stages stage s forwards microbatch j once the backwards of all before j - (p - 1 - s) are done; with "2bw" update t is by
    gradients at version t - 1.
    """
    optimizer, parameters, losses = make(model.parameters()), dict(model.named_parameters()), []
    num_stages = max(stages.values()) + 1
    for call in range(CALLS):
        versions, total = [{name: each.detach().clone() for name, each in parameters.items()}], 0.0
        for update in range(num_microbatches // every):
            sums = {name: torch.zeros_like(each) for name, each in parameters.items()}
            for number in range(update * every, (update + 1) * every):
                ahead = {name: num_stages - 1 - stage for name, stage in stages.items()}
                taken = {name: max(update - 1, 0) if kind == "2bw" else max(number - ahead[name], 0) // every for name in parameters}
                weights = {name: versions[taken[name]][name].requires_grad_() for name in parameters}
                loss = functional_call(model, weights, (), microbatch(batch(call), number, num_microbatches, dp))
                gradients = torch.autograd.grad(loss, list(weights.values()))
                for name, gradient in zip(weights, gradients, strict=True):
                    sums[name] += gradient / every
                total += float(loss.detach()) / num_microbatches
            for name, each in parameters.items():
                each.grad = sums[name]
            optimizer.step()
            versions.append({name: each.detach().clone() for name, each in parameters.items()})
        losses.append(total)
    return losses


def trains(
    model: str,
    mesh: Any,
    kind: Any,
    every: int | None,
    number: int,
    optimizer: str,
    share: Callable[[Any], Any] = lambda values: values,
    backend: str = "eager",
    pins: Any = None,
    cluster: str | None = None,
) -> tuple[float, float, autopar.ParallelModule]:
    """How far losses and parameters are from those of the simulation."""
    make, step = OPTIMIZERS[optimizer], TrainStep(weight_versions=kind, update_every=every)
    options: dict[str, Any] = {"num_microbatches": number, "optimizer": make, "train_step": step, "backend": backend, "pins": pins}
    options |= {"cluster": cluster} if cluster is not None else {}
    parallel = compiled(MODELS[model](), mesh, share(batch(0)), **options)
    losses = [float(parallel.train_step(**share(batch(call)))) for call in range(CALLS)]
    plain, axes = MODELS[model](), dict(parallel.mesh.axes)
    stages = {name: held[0] for name, held in parallel.compiled.holders.items()}
    assert set(stages.values()) == set(range(axes["pp"]))
    default = 1 if kind == "stash" else axes["pp"]
    wanted = simulated(plain, make, stages, kind, every or default, number, axes.get("dp", 1))
    fresh = MODELS[model]()
    simulated(fresh, make, dict.fromkeys(stages, 0), "stash", every or default, number, axes.get("dp", 1))
    assert any(float((one - other).abs().max()) > 1e-6 for one, other in zip(fresh.parameters(), plain.parameters(), strict=True))
    full = parallel.full_state_dict()
    errors = [float((full[name] - value).abs().max()) for name, value in plain.state_dict().items()]
    return max(abs(one - other) for one, other in zip(losses, wanted, strict=True)), max(errors), parallel


QUICK = [
    ("line", {"pp": 2}, "stash", None, 4, "momentum"),
    ("line", {"pp": 2, "dp": 2}, "2bw", None, 8, "momentum"),
]
WIDE = [
    ("line", {"pp": 4}, "stash", None, 8, "momentum"),
    ("line", {"pp": 4}, "stash", 2, 8, "adamw"),
    ("line", {"pp": 4}, "2bw", None, 16, "adamw"),
    ("line", {"pp": 2}, "2bw", 4, 16, "adamw"),
    ("gpt", {"pp": 2}, "stash", None, 8, "adamw"),
    ("gpt", {"pp": 2}, "2bw", None, 8, "momentum"),
    ("gpt", {"pp": 4}, "stash", None, 8, "momentum"),
    # A key's bias has a gradient of zero, and Adafactor divides by its size: it would step by rounding.
    ("line", {"pp": 2}, "2bw", None, 8, "adafactor"),
    ("gpt", {"pp": 2, "tp": 2}, "stash", None, 4, "adamw"),
    ("gpt", {"pp": 2, "dp": 2}, "stash", 2, 8, "momentum"),
    ("gpt", {"pp": 2, "dp": 2, "tp": 2}, "2bw", None, 8, "adamw"),
]


@pytest.mark.parametrize(
    ("model", "axes", "kind", "every", "number", "optimizer"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in WIDE)]
)
def test_training_is_that_of_the_paper(model: str, axes: dict[str, int], kind: str, every: int | None, number: int, optimizer: str) -> None:
    loss_error, error, parallel = trains(model, axes, kind, every, number, optimizer)
    assert loss_error <= 1e-9 and error <= 1e-9, (loss_error, error)
    assert all(each.grad is None for each in parallel.parameters())
    assert parallel.verify(promote=True, **batch(0)), "a plain call is what it was"


def test_ranks_that_hold_the_same_and_exchange_nothing_are_not_mixed_up() -> None:
    """One of them may be an update ahead of the other."""
    whole = {"layers.*.weight": (None, None), "layers.*.bias": (None,)}
    loss_error, error, _ = trains("line", {"pp": 2, "tp": 2}, "stash", None, 4, "momentum", pins=whole)
    assert loss_error <= 1e-9 and error <= 1e-9


@pytest.mark.parametrize(
    ("axes", "kind"),
    [
        ({"pp": 2, "dp": 2}, "2bw"),
        *(
            pytest.param(axes, kind, marks=pytest.mark.slow)
            for axes, kind in (({"pp": 2, "dp": 2}, "stash"), ({"pp": 2, "tp": 2}, "stash"), ({"pp": 2, "dp": 2, "tp": 2}, "2bw"))
        ),
    ],
)
def test_sums_that_are_put_off_behind_communication_are_those_of_their_microbatch(axes: dict[str, int], kind: str) -> None:
    """By the prices of a CPU much is moved; such programs were refused."""
    loss_error, error, _ = trains("gpt", axes, kind, None, 4, "adamw", cluster="cpu")
    assert loss_error <= 1e-9 and error <= 1e-9, (loss_error, error)


@pytest.mark.slow
def test_on_the_default_backend() -> None:
    loss_error, error, _ = trains("line", {"pp": 2}, "stash", None, 4, "adamw", backend="inductor")
    assert loss_error <= 1e-9 and error <= 1e-9, (loss_error, error)


def on_a_rank(axes: dict[str, int], kind: str, number: int) -> tuple[float, float]:
    sizes, names = tuple(axes.values()), tuple(axes)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)

    def share(values: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.chunk(2)[dist.get_rank() % 2] for name, value in values.items()}

    loss_error, error, _ = trains("gpt", mesh, kind, None, number, "adamw", share)
    return loss_error, error


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stash", "2bw"])
def test_processes_train_so(gloo_ranks: Any, kind: str) -> None:
    for errors in gloo_ranks.run(on_a_rank, {"pp": 2, "dp": 2}, kind, 4):
        assert max(errors) <= 1e-9


def refused(model: nn.Module, example: Any, match: str, kind: type[Exception] = PlanError, **options: Any) -> None:
    with pytest.raises(kind, match=match):
        compiled(model, {"pp": 2}, example, **{"optimizer": torch.optim.SGD, "num_microbatches": 4, **options})


def test_what_has_no_versions_is_refused() -> None:
    stash = TrainStep(weight_versions="stash")
    refused(
        small_gpt(num_blocks=1),
        tied_batch(0),
        "both hold 'embedding.weight', of which they would have different versions",
        train_step=stash,
    )
    refused(Layers(), (torch.randn(8, 4),), "asserts something of its values", train_step=stash)
    refused(Line(), batch(0), "depends on others", kind=AutoparError, train_step=stash, optimizer=Lamb)
    with pytest.raises(AutoparError, match="before anything can be agreed upon"):
        TrainStep(weight_versions="stash", clip_grad_norm=1.0)
    with pytest.raises(AutoparError, match="is unknown"):
        TrainStep(weight_versions="pipedream")  # type: ignore[arg-type]
    with pytest.raises(AutoparError, match="a number of microbatches"):
        TrainStep(update_every=2)


def test_it_is_told() -> None:
    step = TrainStep(weight_versions="stash")
    parallel = compiled(Line().double(), {"pp": 2}, batch(0), optimizer=torch.optim.SGD, num_microbatches=4, train_step=step)
    said = parallel.explain(detail="pipeline")
    assert "weights: 4 updates a step; gradients are at most 1, 0 updates old on stages 0, 1" in said, said
    assert copy.deepcopy(step) == step
