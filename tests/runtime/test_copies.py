"""Copies of a parallel module: deep ones, moving averages, what is saved and loaded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from autopar.errors import AutoparError, MeshError
from autopar.ir.mesh import virtual_mesh
from tests.support.captures import compiled
from tests.support.schedules import WIDTH, parallel_mlp

MESH = {"dp": 2, "tp": 2}


def small_model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, WIDTH)
    return nn.Sequential(*layers).to(dtype)


@pytest.mark.parametrize("is_captured", [False, True])
def test_a_copy_has_parameters_of_its_own_and_the_programs_that_are_there(is_captured: bool) -> None:
    model, x = small_model().eval(), torch.randn(4, WIDTH, dtype=torch.float64)
    parallel = compiled(model, MESH, (x,) if is_captured else None)
    copied = copy.deepcopy(parallel)
    before = copied(x)
    assert len(copied._captures) == 1 and len(parallel._captures) == is_captured
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    torch.testing.assert_close(copied(x), before, rtol=0, atol=0)
    torch.testing.assert_close(parallel(x), model(x), rtol=1e-9, atol=1e-9)
    copied.train()
    copied(x).square().mean().backward()
    assert copied.training and not model.training and all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is not None for parameter in copied.parameters())
    assert copied.verify(x, promote=True) and (copied.step, parallel.step) == (1, 0)


def test_a_hook_of_the_copied_module_is_the_copys_too() -> None:
    parallel, x = compiled(small_model().eval(), MESH), torch.randn(4, WIDTH, dtype=torch.float64)
    handle = parallel.register_forward_hook(lambda module, args, output: output * 2)
    copied = copy.deepcopy(parallel)
    handle.remove()
    torch.testing.assert_close(copied(x), 2 * parallel(x))


def averaged(module: nn.Module, x: torch.Tensor) -> tuple[AveragedModel, torch.optim.Optimizer]:
    """Three steps of training with an exponential moving average of parameters and buffers."""
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()
        average.update_parameters(module)
    return average.eval(), optimizer


def test_moving_averages_of_parameters_are_those_of_the_plain_model() -> None:
    model, x = small_model(), torch.randn(8, WIDTH, dtype=torch.float64)
    model[3].p = 0.0
    expected, _ = averaged(copy.deepcopy(model), x)
    ours, _ = averaged(compiled(model, MESH), x)
    torch.testing.assert_close(ours(x), expected(x), rtol=1e-9, atol=1e-9)
    assert list(ours.state_dict()) == list(expected.state_dict())
    expected.load_state_dict(ours.state_dict())


def averages_on_ranks() -> tuple[float, float, float, bool]:
    """The errors of averages, of outputs before and after a copy, against the plain model; and whether parameters are in parts."""
    model = small_model(torch.float32)
    del model[3], model[1]
    reference, mesh = copy.deepcopy(model), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(3))
    mine = x.chunk(2)[dist.get_rank() // 2]
    parallel = compiled(model, mesh, (mine,))
    expected, _ = averaged(reference, x)
    ours, _ = averaged(parallel, mine)
    whole = {name: value.full_tensor() for name, value in ours.module.state_dict().items()}
    off = max(float((whole[name] - value).abs().max()) for name, value in expected.module.state_dict().items())
    outputs = (ours(mine) - expected(x).chunk(2)[dist.get_rank() // 2], parallel(mine) - reference(x).chunk(2)[dist.get_rank() // 2])
    is_split = any(value.to_local().numel() < value.numel() for value in ours.module.parameters())
    return off, float(outputs[0].abs().max()), float(outputs[1].abs().max()), is_split


def test_moving_averages_on_real_ranks(gloo_ranks: Any) -> None:
    for off, average, now, is_split in gloo_ranks.run(averages_on_ranks):
        assert off < 1e-6 and average < 1e-5 and now < 1e-5 and is_split


def copies_too_early() -> str:
    with pytest.raises(MeshError) as refused:
        copy.deepcopy(compiled(small_model(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))))
    return str(refused.value)


def test_a_copy_on_real_ranks_before_the_first_capture_is_refused(gloo_ranks: Any) -> None:
    for text in gloo_ranks.run(copies_too_early):
        assert "a copy on a real mesh before the first capture" in text


def copies_a_stage() -> str:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x).square().mean()

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    parallel = compiled(WithLoss(), mesh, (torch.randn(4, WIDTH),))
    with pytest.raises(MeshError) as refused:
        copy.deepcopy(parallel)
    return str(refused.value)


def test_a_copy_of_one_stage_of_a_pipeline_is_refused(gloo_ranks: Any) -> None:
    for text in gloo_ranks.run(copies_a_stage):
        assert "lies with another stage only" in text and "average the values of state_dict()" in text


def test_what_cannot_be_copied_or_saved_says_what_can(tmp_path: Any) -> None:
    with pytest.raises(MeshError, match="not made by autopar.compile; copy the model"):
        copy.deepcopy(parallel_mlp(virtual_mesh(dp=1, tp=1))[0])
    with pytest.raises(AutoparError, match=r"Save parallel.state_dict\(\)"):
        torch.save(compiled(small_model(), MESH), tmp_path / "model.pt")
