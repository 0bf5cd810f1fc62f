"""Scales are found as torch's GradScaler finds them; one gradient that is not finite, wherever it is, stops all ranks alike."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError, BackwardError
from autopar.runtime.train.scaler import ScaleState
from tests.support.models.trained import batch, small_gpt

OPTIONS = autopar.LossScale(initial=2.0**10, growth_interval=3)
MESHES: list[dict[str, int]] = [{"dp": 2, "tp": 2}, {"pp": 2}]


class Overflowing(nn.Module):
    """Its gradient overflows where a sample holds a number above 100: in that microbatch alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        large = (x.abs() > 100).any(dim=-1, keepdim=True)
        h = x / 1000
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return (h * torch.where(large, torch.inf, 1.0)).square().mean(-1).nan_to_num(0.0, 0.0, 0.0).mean() + h.square().mean()


def samples(step: int, overflows_at: int | None = None) -> Tensor:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    if overflows_at is not None:
        x[overflows_at, 1] = 200.0
    return x


def test_the_scale_moves_as_torchs() -> None:
    found = [True, True, True, False, True, False, True, True, True, True]
    state, wanted = ScaleState.of(OPTIONS), torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter])
    for is_finite in found:
        (wanted.scale(parameter.sum()) * (1.0 if is_finite else torch.inf)).backward()
        wanted.step(optimizer)
        wanted.update()
        optimizer.zero_grad()
        state.update(is_finite)
        assert state.scale == wanted.get_scale()


# Overflows in the first and last microbatch, on each share of dp.
PLANTED = {1: 0, 2: 7, 5: 4}


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("in_step", [True, False])
def test_planted_overflows_are_skipped_by_all_and_the_scale_recovers(axes: dict[str, int], in_step: bool) -> None:
    torch.manual_seed(0)
    model = Overflowing().double()
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    options: dict[str, Any] = {"num_microbatches": 4} if "pp" in axes else {}
    parallel = autopar.compile(
        model,
        autopar.virtual_mesh(**axes),
        example_inputs=(samples(0).double(),),
        backend="eager",
        optimizer=(torch.optim.AdamW, {"lr": 1e-2}),
        train_step=autopar.TrainStep(loss_scale=OPTIONS) if in_step else None,
        **options,
    )
    scaler = parallel.scaler(OPTIONS)
    scales = []
    for step in range(10):
        x = samples(step, PLANTED.get(step)).double()
        if in_step:
            parallel.train_step(x)
            scales.append(parallel.loss_scale)
        else:
            assert parallel.optimizer is not None
            scaler.scale(parallel(x)).backward()
            scaler.step(parallel.optimizer)
            scaler.update()
            parallel.optimizer.zero_grad()
            scales.append(scaler.get_scale())
        if step not in PLANTED:
            reference(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-9)
    assert scales == [2.0**each for each in (10, 9, 8, 8, 8, 7, 7, 7, 8, 8)]


def test_a_plain_loop_clips_what_is_unscaled() -> None:
    model = small_gpt()
    reference = copy.deepcopy(model)
    parallel = autopar.compile(model, autopar.virtual_mesh(pp=2), example_inputs=batch(0), backend="eager")
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, reference)]
    scaler = parallel.scaler()
    for step in range(2):
        scaler.scale(parallel(**batch(step))).backward()
        scaler.unscale_(optimizers[0])
        norm = parallel.clip_grad_norm_(0.1)
        scaler.step(optimizers[0])
        scaler.update()
        reference(**batch(step)).backward()
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.1))
        optimizers[1].step()
        for each in optimizers:
            each.zero_grad()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)
    state = scaler.state_dict()
    other_scaler = parallel.scaler(OPTIONS)
    other_scaler.load_state_dict(state)
    assert other_scaler.get_scale() == 2.0**16


def test_what_is_called_in_the_wrong_order_is_refused() -> None:
    model = small_gpt()
    parallel = autopar.compile(model, autopar.virtual_mesh(dp=2), example_inputs=batch(0), backend="eager")
    optimizer, scaler = torch.optim.SGD(model.parameters()), parallel.scaler()
    with pytest.raises(AutoparError, match=r"update\(\) before step\(\)"):
        scaler.update()
    scaler.scale(parallel(**batch(0))).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(AutoparError, match=r"unscale_\(\) twice"):
        scaler.unscale_(optimizer)


def test_torchs_scaler_works_but_for_a_pipeline_in_float16() -> None:
    x = torch.randn(8, 4)
    for axes, dtype in (({"dp": 2}, torch.float16), ({"pp": 2}, torch.float32), ({"pp": 2}, torch.float16)):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).to(dtype)
        parallel = autopar.compile(_Squared(model), autopar.virtual_mesh(**axes), example_inputs=(x.to(dtype),), backend="eager")
        scaler = torch.amp.GradScaler("cpu")
        loss = scaler.scale(parallel(x.to(dtype)))
        if axes == {"pp": 2} and dtype is torch.float16:
            with pytest.raises(BackwardError, match=r"65536.*use parallel.scaler\(\)"):
                loss.backward()
        else:
            loss.backward()


class _Squared(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).float().square().mean()
