"""Batches that ranks and microbatches do not divide, the last of an epoch: exact, in training and evaluation, on virtual and real ranks."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.errors import InputError
from tests.support.captures import compiled
from tests.support.models import vision, zoo
from tests.support.models.trained import batch, small_gpt
from tests.support.models.zoo import Case

MESHES: dict[str, dict[str, Any]] = {
    "dp2": {"mesh": {"dp": 2}},
    "dp2 tp2": {"mesh": {"dp": 2, "tp": 2}},
    "pp2": {"mesh": {"pp": 2}, "num_microbatches": 4},
    "pp2 dp2": {"mesh": {"pp": 2, "dp": 2}, "num_microbatches": 2},
}
MODELS = {
    "gpt2": partial(zoo.gpt2, dropout=0.1),
    "llama": zoo.llama,
    "bert": partial(zoo.bert, dropout=0.1),
    "vit": zoo.vit,
    "convnext": vision.convnext,
    "swin": vision.swin,
    "resnet": vision.resnet,
}
# Statistics of the whole batch allow one microbatch.
MIXING = ("resnet",)


def cut(case: Case, samples: int) -> dict[str, Tensor]:
    return {name: value[:samples] for name, value in case.batch.items()}


def assert_exact(name: str, where: str, samples: int) -> None:
    case = MODELS[name]().to(torch.float32)
    options = dict(MESHES[where])
    if name in MIXING:
        options.pop("num_microbatches", None)
    parallel = compiled(case.model, options.pop("mesh"), cut(case, samples), **options)
    report = parallel.verify(promote=True, **cut(case, samples))
    assert report and report.worst <= 1e-9, str(report)
    if samples > 1 and name not in MIXING:
        number = options.get("num_microbatches", 1)
        assert parallel.compiled.local.mesh.num_microbatches == number
        needed = number * MESHES[where]["mesh"].get("dp", 1)
        padded = -(-samples // needed) * needed
        assert parallel.summary()["flops_split"] > (0.8 if name == "swin" else 0.9) * samples / padded


SMALL = [
    ("gpt2", "dp2 tp2", 7),
    ("gpt2", "pp2", 1),
    ("resnet", "dp2", 5),
]


@pytest.mark.parametrize(("name", "where", "samples"), SMALL)
def test_training_is_exact(name: str, where: str, samples: int) -> None:
    assert_exact(name, where, samples)


WIDE = [(name, where, samples) for name in ("gpt2", "resnet") for where in MESHES for samples in (7, 5, 1)]
WIDE += [("bert", "dp2", 1), ("vit", "pp2 dp2", 5)]
WIDE += [(name, *case) for name in MODELS if name not in ("gpt2", "resnet") for case in (("dp2 tp2", 5), ("pp2", 7))]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "where", "samples"), [each for each in WIDE if each not in SMALL])
def test_training_is_exact_everywhere(name: str, where: str, samples: int) -> None:
    assert_exact(name, where, samples)


@pytest.mark.parametrize(
    ("where", "name"),
    [("dp2", "mlp"), pytest.param("dp2", "gpt2", marks=pytest.mark.slow), pytest.param("pp2", "gpt2", marks=pytest.mark.slow)],
)
def test_on_the_default_backend(where: str, name: str) -> None:
    """Compiled fragments get padded shares; a batch of seven, with dropout."""
    options = dict(MESHES[where])
    if name == "mlp":
        torch.manual_seed(0)
        model, inputs = Classifier(), {key: value.float() if key == "x" else value for key, value in samples_of(7).items()}
    else:
        case = MODELS[name]().to(torch.float32)
        model, inputs = case.model, cut(case, 7)
    parallel = compiled(model, options.pop("mesh"), inputs, backend="inductor", **options)
    report = parallel.verify(**inputs)
    assert report and report.worst <= 1e-4, str(report)


class Classifier(nn.Module):
    """Scores and, with labels, a loss; a buffer counts samples, and draws are by sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.dropout = nn.Linear(6, 8), nn.Linear(8, 3), nn.Dropout(0.25)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        scores = self.head(self.dropout(torch.relu(self.body(x))))
        if self.training:
            self.seen += torch.ones_like(x[:, 0]).sum()
        if labels is None:
            return {"scores": scores}
        return {"loss": nn.functional.cross_entropy(scores, labels), "scores": scores, "best": scores.argmax(-1)}


def samples_of(count: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(3)
    return {"x": torch.randn(count, 6, generator=draw, dtype=torch.float64), "labels": torch.randint(0, 3, (count,), generator=draw)}


@pytest.mark.parametrize("where", ["dp2 tp2", "pp2"])
def test_an_epoch_with_a_smaller_last_batch(where: str) -> None:
    """Programs of three sizes, on parameters that lie alike; evaluation gives every sample's scores."""
    options, model = dict(MESHES[where]), Classifier().double()
    model.dropout.p = 0.0
    reference = copy.deepcopy(model)
    mesh = autopar.virtual_mesh(**options.pop("mesh"))
    parallel = autopar.compile(model, mesh, optimizer=partial(torch.optim.AdamW, lr=1e-2), backend="eager", **options)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for count in (8, 7, 8, 1):
        loss, wanted = parallel.train_step(**samples_of(count))["loss"], reference(**samples_of(count))["loss"]
        wanted.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-12, atol=1e-12)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(parallel.state_dict()[name], value, rtol=1e-12, atol=1e-12)
    parallel.eval(), reference.eval()
    for count in (8, 5, 1):
        with torch.no_grad():
            found, expected = parallel(**samples_of(count)), reference(**samples_of(count))
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


def test_draws_are_those_of_true_positions() -> None:
    """Dropout of five samples is that of one device, whatever the mesh."""
    losses = []
    for mesh, options in (({"dp": 1}, {}), ({"dp": 2}, {}), ({"dp": 4}, {}), ({"pp": 2}, {"num_microbatches": 2})):
        torch.manual_seed(5)
        parallel = compiled(Classifier().double(), mesh, samples_of(5), **options)
        losses.append(parallel(**samples_of(5))["loss"].detach())
    for each in losses[1:]:
        torch.testing.assert_close(each, losses[0], rtol=1e-12, atol=1e-12)


def test_own_statistics_take_equal_microbatches() -> None:
    with pytest.raises(InputError, match="does not divide into 2 of them"):
        compiled(Classifier(), {"dp": 1}, {"x": torch.randn(5, 6)}, num_microbatches=2, microbatch_statistics="own")


def test_no_samples_are_refused() -> None:
    with pytest.raises(InputError, match="'x' has no samples"):
        compiled(Classifier(), {"dp": 2}, {"x": torch.zeros(0, 6)})


# ---- what real ranks run

REAL = {"dp2 tp2": ((2, 2), ("dp", "tp")), "pp2 dp2": ((2, 2), ("pp", "dp")), "dp4": ((4,), ("dp",))}


def share(values: dict[str, Tensor], where: str, shares: tuple[int, ...]) -> dict[str, Tensor]:
    """This rank's samples."""
    sizes, axes = REAL[where]
    inner = sizes[1] if axes[0] == "dp" and len(sizes) > 1 else 1
    place = dist.get_rank() // inner % len(shares)
    return {name: value.split(list(shares))[place] for name, value in values.items()}


def trains(where: str, steps: list[tuple[int, ...]], options: dict[str, Any]) -> float:
    """The largest difference of parameters and losses from those of plain torch, after steps with these shares."""
    sizes, axes = REAL[where]
    model = small_gpt()
    reference = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
    parallel = autopar.compile(model, mesh, backend="eager", cluster=autopar.Cluster.ideal(), optimizer=torch.optim.AdamW, **options)
    worst, optimizer = 0.0, None
    for number, shares in enumerate(steps):
        whole = batch(number, sum(shares))
        loss = parallel.train_step(**share(whole, where, shares))
        optimizer = optimizer or torch.optim.AdamW(reference.parameters())
        wanted = reference(**whole)
        wanted.backward()
        optimizer.step()
        optimizer.zero_grad()
        worst = max(worst, abs(float(loss - wanted)))
    full = parallel.full_state_dict()
    report = parallel.verify(**share(batch(0, sum(steps[-1])), where, steps[-1]))
    assert report and report.worst <= 1e-9, str(report)
    return max(worst, *(float((full[name] - value).abs().max()) for name, value in reference.state_dict().items()))


def evaluates(where: str, shares: tuple[int, ...]) -> None:
    """Each rank gets the outputs of its own samples, and gradients come back through them."""
    sizes, axes = REAL[where]
    model = Classifier().double().eval()
    reference = copy.deepcopy(model)
    parallel = autopar.compile(model, init_device_mesh("cpu", sizes, mesh_dim_names=axes), backend="eager", cluster=autopar.Cluster.ideal())
    mine, whole = share(samples_of(sum(shares)), where, shares), samples_of(sum(shares))
    with torch.no_grad():
        found, expected = parallel(**mine), share(reference(**whole) | {"loss": whole["x"]}, where, shares)
        torch.testing.assert_close(found["loss"], reference(**whole)["loss"], rtol=1e-12, atol=1e-12)
    for name in ("scores", "best"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-12, atol=1e-12)
    if "pp" not in axes:
        scores = parallel(x=mine["x"])["scores"]
        (scores.square().sum() * len(shares)).backward()
        reference(x=whole["x"])["scores"].square().sum().backward()
        for name, parameter in reference.named_parameters():
            gradient = parallel.get_parameter(name).grad
            assert gradient is not None
            torch.testing.assert_close(gradient.full_tensor(), parameter.grad, rtol=1e-10, atol=1e-12)


def disagrees() -> str:
    parallel = autopar.compile(Classifier(), init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), backend="eager")
    try:
        parallel(x=torch.zeros(2, 6 + (dist.get_rank() == 3)))
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("where", "steps", "options"),
    [
        ("dp2 tp2", [(4, 4), (1, 0)], {}),
        pytest.param("dp2 tp2", [(4, 4), (3, 4), (1, 0)], {}, marks=pytest.mark.slow),
        pytest.param("pp2 dp2", [(4, 4), (3, 2), (3, 3)], {"num_microbatches": 2}, marks=pytest.mark.slow),
        pytest.param("dp4", [(2, 2, 2, 2), (2, 2, 2, 1), (2, 0, 3, 2), (0, 0, 1, 0)], {}, marks=pytest.mark.slow),
        pytest.param("pp2 dp2", [(2, 3), (1, 0), (0, 5)], {"num_microbatches": 4}, marks=pytest.mark.slow),
    ],
)
def test_real_ranks_with_unequal_shares(gloo_ranks: Any, where: str, steps: list[tuple[int, ...]], options: dict[str, Any]) -> None:
    assert max(gloo_ranks.run(trains, where, steps, options)) <= 1e-9


@pytest.mark.parametrize(("where", "shares"), [("dp4", (2, 0, 2, 1)), ("pp2 dp2", (4, 1))])
def test_real_ranks_get_the_outputs_of_their_own_samples(gloo_ranks: Any, where: str, shares: tuple[int, ...]) -> None:
    gloo_ranks.run(evaluates, where, shares)


def test_what_else_differs_is_refused(gloo_ranks: Any) -> None:
    for message in gloo_ranks.run(disagrees):
        assert (
            "ranks 0 and 3 pass 'x' of different shapes, ((2, 6), 'torch.float32') and ((2, 7), 'torch.float32'), but only dim 0" in message
        )


class PerPosition(nn.Module):
    """A weight for each position: a program of another length computes with other ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0, 1, 9, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight[: x.shape[1]]).square().mean()


def two_lengths() -> list[float]:
    model = PerPosition()
    parallel = autopar.compile(copy.deepcopy(model), init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), backend="eager")
    off: list[float] = []
    for length in (5, 9, 5):
        x = torch.arange(5.0 * length, dtype=torch.float64).reshape(5, length)
        found = parallel(share({"x": x}, "dp4", (2, 1, 1, 1))["x"])
        off.append(abs(float(found - model(x))))
    return off


def test_unequal_shares_of_two_lengths_are_two_programs(gloo_ranks: Any) -> None:
    assert all(max(off) <= 1e-9 for off in gloo_ranks.run(two_lengths))
