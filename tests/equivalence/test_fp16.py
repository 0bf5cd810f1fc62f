"""Training in float16 with scaled losses: an overflow of one step, rank, stage or microbatch is skipped by all, and the scale recovers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import autopar
from autopar.errors import AutoparError
from tests.support.captures import compiled
from tests.support.ranks import GlooRanks, share

MESHES: dict[str, dict[str, int]] = {"dp2×tp2": {"dp": 2, "tp": 2}, "pp2": {"pp": 2}}
SCALE = autopar.LossScale(initial=2.0**10, growth_interval=3)
LAYERS, WIDTH, SAMPLES = 4, 8, 8


class Planted(nn.Module):
    """What is planted for a sample, a layer and a column overflows in the backward of that layer, and nowhere in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(LAYERS))
        self.down = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(LAYERS))
        self.gains = nn.ParameterList(torch.ones(2 * WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor, planted: Tensor) -> Tensor:
        h = x
        for layer, (up, down, gain) in enumerate(zip(self.up, self.down, self.gains, strict=True)):
            wide = torch.tanh(up(h)) * gain
            h = h + down(wide + planted[:, layer] * (gain - gain.detach()))
        return F.mse_loss(h, x.flip(-1))


def model() -> Planted:
    torch.manual_seed(0)
    return Planted()


def batch(step: int, planted: tuple[int, int, int] | None = None) -> dict[str, Tensor]:
    found = {
        "x": torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step)),
        "planted": torch.zeros(SAMPLES, LAYERS, 2 * WIDTH),
    }
    if planted is not None:
        found["planted"][planted] = 3e38
    return found


HELD_LOW = autopar.MixedPrecision(param=torch.float16, grad=torch.float16)
# By step: a sample (a share of dp, a microbatch), a layer (a stage), a column (a part of tp).
OVERFLOWS = {1: (0, 0, 0), 3: (7, 3, 15), 4: (4, 1, 15)}
SCALES = [2.0**each for each in (10, 9, 9, 8, 7, 7, 7, 8)]


def options_of(axes: dict[str, int], precision: Any = "fp16") -> dict[str, Any]:
    return {"optimizer": (torch.optim.AdamW, {"lr": 1e-2}), "precision": precision} | ({"num_microbatches": 4} if "pp" in axes else {})


@pytest.mark.parametrize(
    ("where", "in_step"),
    [
        pytest.param(where, in_step, id=f"{where}-{'train_step' if in_step else 'loop'}", marks=() if quick else pytest.mark.slow)
        for where, in_step, quick in (("dp2×tp2", True, True), ("pp2", False, True), ("dp2×tp2", False, False), ("pp2", True, False))
    ],
)
def test_planted_overflows_are_skipped_by_all_and_the_scale_recovers(where: str, in_step: bool) -> None:
    axes, mine, plain = MESHES[where], model(), model()
    step_options = {"train_step": autopar.TrainStep(loss_scale=SCALE)} if in_step else {}
    parallel = compiled(mine, axes, batch(0), **options_of(axes), **step_options)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    assert torch.float16 in {each.type[1] for each in parallel.compiled.schedule.buffers.values() if each.type is not None}
    split = {item.name for item in parallel.compiled.local.signature.inputs_of("parameter") if not item.sharding.is_replicated}
    assert ("gains.0" in split) == ("tp" in axes)
    scaler = None if in_step else parallel.scaler(SCALE)
    scales = []
    for step in range(len(SCALES)):
        before, inputs = copy.deepcopy(mine.state_dict()), batch(step, OVERFLOWS.get(step))
        if scaler is None:
            loss = parallel.train_step(**inputs)
            scales.append(parallel.loss_scale)
        else:
            assert parallel.optimizer is not None
            loss = parallel(**inputs)
            scaler.scale(loss).backward()
            scaler.step(parallel.optimizer)
            scaler.update()
            parallel.optimizer.zero_grad()
            scales.append(scaler.get_scale())
        same = [torch.equal(before[name], value) for name, value in mine.state_dict().items()]
        assert all(same) if step in OVERFLOWS else not any(same)
        if step not in OVERFLOWS:
            wanted = plain(**inputs)
            assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=5e-3)
            wanted.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert scales == SCALES


@pytest.mark.parametrize("where", ["pp2", pytest.param("dp2×tp2", marks=pytest.mark.slow)])
def test_the_users_own_autocast_in_float16_is_scaled_likewise(where: str) -> None:
    axes, mine = MESHES[where], model()
    options = options_of(axes) | {"precision": None, "train_step": autopar.TrainStep(clip_grad_norm=1.0)}
    with torch.autocast("cpu", torch.float16):
        parallel = compiled(mine, axes, batch(0), **options)
        assert parallel.loss_scale == 2.0**16
        said = "the model's torch.autocast computes in float16: gradients vanish in float16: train_step scales"
        assert said in parallel.explain(detail="precision")
        scales = []
        for planted in (None, (0, 0, 0), None):
            before = copy.deepcopy(mine.state_dict())
            parallel.train_step(**batch(0, planted))
            scales.append(parallel.loss_scale)
            changed = not all(torch.equal(before[name], value) for name, value in mine.state_dict().items())
            assert changed == (scales[-1] == (scales[-2] if len(scales) > 1 else 2.0**16)), "as long as it is too large it is halved"
    assert scales[1] == scales[0] / 2
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(model(), axes, batch(0), **options).loss_scale is None


def test_an_accumulation_is_scaled_from_its_start_or_not_at_all() -> None:
    parallel = compiled(model(), {"dp": 2}, batch(0), optimizer=torch.optim.SGD, train_step=autopar.TrainStep(accumulate=2))
    parallel.train_step(**batch(0))
    with (
        torch.autocast("cpu", torch.float16),
        pytest.raises(AutoparError, match="earlier ones of this accumulation did not: say TrainStep"),
    ):
        parallel.train_step(**batch(1))


def test_a_step_scales_by_itself_and_finds_its_scale() -> None:
    parallel = compiled(model(), {"dp": 2}, batch(0), **options_of({}))
    assert parallel.loss_scale == 2.0**16
    assert "gradients vanish in float16: train_step scales the loss" in parallel.explain(detail="all")
    large = autopar.TrainStep(loss_scale=autopar.LossScale(initial=2.0**30))
    parallel = compiled(model(), {"pp": 2}, batch(0), **options_of({"pp": 2}), train_step=large)
    losses = [float(parallel.train_step(**batch(0))) for _ in range(24)]
    assert parallel.loss_scale is not None and 2.0**10 < parallel.loss_scale < 2.0**24
    skipped = losses.count(losses[0]) - 1
    assert parallel.loss_scale == 2.0 ** (30 - skipped) and losses[-1] < losses[0]


def test_a_loop_that_does_not_scale_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    parallel = compiled(model(), {"dp": 2}, batch(0), precision="fp16")
    for _ in range(2):
        parallel(**batch(0)).backward()
    assert [each.getMessage() for each in caplog.records if "parallel.scaler()" in each.getMessage()] != []
    assert sum("parallel.scaler()" in each.getMessage() for each in caplog.records) == 1
    caplog.clear()
    for told in (compiled(model(), {"dp": 2}, batch(0), precision="bf16"), compiled(model(), {"dp": 2}, batch(0), precision="fp16")):
        told.scaler()
        told(**batch(0)).backward()
    assert not any("parallel.scaler()" in each.getMessage() for each in caplog.records)


def test_a_loss_that_no_scale_mends_raises_where_that_was_asked_for() -> None:
    for non_finite in ("raise", None):
        parallel = compiled(model(), {"dp": 2}, batch(0), **options_of({}), train_step=autopar.TrainStep(non_finite=non_finite))
        parallel.train_step(**batch(0, (3, 1, 2)))  # gradients overflow: a scale's business
        assert parallel.loss_scale == 2.0**15
        bad = batch(0)
        bad["x"][5, 1] = torch.inf
        if non_finite == "raise":
            with pytest.raises(
                AutoparError, match=r"the loss is infinite or NaN and gradients .* The call's batch 'x' has an infinity from the start"
            ):
                parallel.train_step(**bad)
        else:
            parallel.train_step(**bad)
        assert parallel.loss_scale == 2.0**14


@pytest.mark.parametrize("where", ["pp2", pytest.param("dp2×tp2", marks=pytest.mark.slow)])
def test_verify_scales_the_loss_and_says_where_gradients_vanish(where: str) -> None:
    class Tiny(Planted):
        def forward(self, x: Tensor, planted: Tensor) -> Tensor:
            h = self.down[0](self.up[0](x)) * 1e-14
            return (h * x).half().float().mean() * 1e9 + self.up[1](x).square().mean() * 1e-12

    parallel = compiled(model(), MESHES[where], batch(0), precision="fp16")
    report = parallel.verify(**batch(0))
    assert report and report.cast_error is not None and report.cast_error < 0.01, str(report)
    report = compiled(Tiny(), {"dp": 2}, batch(0), precision="fp16").verify(**batch(0))
    assert not report and "are all that rounding explains" in str(report) and report.first_difference is None, str(report)


def steps_on_a_rank(shape: tuple[int, ...], axes: tuple[str, ...], precision: Any) -> list[tuple[float | None, float, bool, bool]]:
    """By step the scale, the loss, and whether a parameter of this rank, and whether all, changed."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
    named = dict(zip(axes, shape, strict=True))
    step_options = autopar.TrainStep(loss_scale=SCALE)
    parallel = compiled(model(), mesh, share(batch(0), mesh), **options_of(named, precision), train_step=step_options, timeout=180)
    found = []
    for step in range(len(SCALES)):
        before = {name: each.detach().to_local().clone() for name, each in parallel.named_parameters()}
        loss = parallel.train_step(**share(batch(step, OVERFLOWS.get(step)), mesh))
        changed = [not torch.equal(before[name], each.to_local()) for name, each in parallel.named_parameters()]
        found.append((parallel.loss_scale, float(loss), any(changed), all(changed)))
    assert dist.get_world_size() == mesh.size()
    return found


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize(
    ("shape", "axes", "precision"),
    [((2, 2), ("dp", "tp"), HELD_LOW), ((2, 2), ("pp", "dp"), "fp16")],
    ids=["dp2×tp2, gradients held in float16", "pp2×dp2"],
)
def test_all_processes_skip_alike(gloo_ranks: GlooRanks, shape: tuple[int, ...], axes: tuple[str, ...], precision: Any) -> None:
    named = dict(zip(axes, shape, strict=True))
    virtual = compiled(model(), named, batch(0), **options_of(named, precision), train_step=autopar.TrainStep(loss_scale=SCALE))
    losses = [float(virtual.train_step(**batch(step, OVERFLOWS.get(step)))) for step in range(len(SCALES))]
    for found in gloo_ranks.run(steps_on_a_rank, shape, axes, precision):
        assert [scale for scale, *_ in found] == SCALES
        assert [each for _, each, *_ in found] == pytest.approx(losses, rel=1e-3)
        assert [(some, every) for *_, some, every in found] == [(step not in OVERFLOWS,) * 2 for step in range(len(SCALES))]
