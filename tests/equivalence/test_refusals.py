"""What is refused, or handled and said: each message has both values and the way out."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

import autopar
from autopar import AutoparError, CaptureError, Cluster, InputError, MeshError, ParallelModule, PlanError, virtual_mesh

MESH = virtual_mesh(dp=2, tp=2)


class Net(nn.Module):
    """Two layers; the inner width is up to the test."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, width), nn.Linear(width, 6)

    def forward(self, x: Tensor, y: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
        out = self.down(torch.relu(self.up(x)))
        return {"loss": F.mse_loss(out if scale is None else out * scale, y), "out": out}


def batch(size: int = 4) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(size)
    return {"x": torch.randn(size, 6, generator=draw), "y": torch.randn(size, 6, generator=draw)}


def parallel(width: int = 8, mesh: Any = MESH, **options: Any) -> ParallelModule:
    torch.manual_seed(0)
    return autopar.compile(Net(width), mesh, backend="eager", cluster=Cluster.ideal(), **options)


def refusal(kind: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


# ---- dims and pins


def test_a_dim_that_does_not_divide_is_padded_and_split() -> None:
    module = parallel(9, example_inputs=batch())
    text = module.explain(detail="all")
    assert "up.weight [10@tp, 6]" in text, text
    assert module.verify(**batch(), promote=True)


def test_a_pin_that_does_not_divide_is_refused() -> None:
    """Four ranks and a dim of six have a factor in common: the axis is broken in two, nothing is padded."""
    pins = {"up.weight": ("tp", None)}
    text = refusal(PlanError, lambda: parallel(6, mesh=virtual_mesh(dp=2, tp=4), example_inputs=batch(), pins=pins))
    assert "'up.weight'" in text and "a dim of 6 does not divide over tp = 4" in text and "pin another dim, or drop the pin" in text


def test_a_pin_to_an_axis_or_a_parameter_that_is_not_there_is_refused() -> None:
    pins = {"up.weight": ("cp", None), "middle.*": ("tp",)}
    text = refusal(PlanError, lambda: parallel(example_inputs=batch(), pins=pins))
    assert "axis 'cp' is not on the mesh (dp=2 × tp=2)" in text and "'middle.*' matches no parameter; there are up.weight" in text


# ---- meshes


def test_an_unknown_axis_is_refused() -> None:
    assert "unknown mesh axis 'tensor'; known axes are" in refusal(MeshError, lambda: virtual_mesh(tensor=2))


def test_an_axis_that_nothing_splits_yet_is_refused() -> None:
    assert "axis 'cp' has 2 ranks, but only pp, dp and tp are split so far" in refusal(
        MeshError, lambda: parallel(mesh=virtual_mesh(cp=2, tp=2))
    )


def test_an_unknown_choice_of_kernels_is_refused() -> None:
    assert "kernels='fast' is unknown" in refusal(AutoparError, lambda: parallel(kernels="fast"))


def test_a_mesh_without_names_is_refused() -> None:
    stands_in = SimpleNamespace(mesh=torch.arange(4), mesh_dim_names=None, device_type="cpu")
    assert "the mesh needs named axes" in refusal(MeshError, lambda: parallel(mesh=stands_in))
    assert "the mesh needs named axes" in refusal(MeshError, lambda: parallel(mesh={"dp": 2}))


def meshes_that_do_not_fit() -> list[str]:
    small = DeviceMesh("cpu", torch.arange(2), mesh_dim_names=("dp",))
    # torch refuses to make a mesh larger than the world; one that comes from elsewhere may be.
    large = SimpleNamespace(mesh=torch.arange(8).view(2, 4), mesh_dim_names=("dp", "tp"), device_type="cpu")
    other = init_device_mesh("cpu", (4,), mesh_dim_names=("model",))
    return [refusal(MeshError, lambda mesh=mesh: parallel(mesh=mesh)) for mesh in (small, large, other)]


def test_a_mesh_that_does_not_fit_the_world_is_refused(gloo_ranks: Any) -> None:
    for small, large, other in gloo_ranks.run(meshes_that_do_not_fit):
        assert "the mesh (dp=2) has 2 ranks, the world has 4; start as many processes as the mesh has ranks" in small
        assert "the mesh (dp=2 × tp=4) has 8 ranks, the world has 4" in large
        assert "unknown mesh axis 'model'" in other


# ---- inputs


def test_a_batch_without_samples_is_refused() -> None:
    expected = "'x' has no samples (shape [0, "
    assert expected in refusal(InputError, lambda: parallel(example_inputs=batch(0)))
    module = parallel(example_inputs=batch())
    assert expected in refusal(InputError, lambda: module(**batch(0)))


def test_inputs_without_values_are_refused() -> None:
    module = parallel()
    text = refusal(InputError, lambda: module(**{name: value.to("meta") for name, value in batch().items()}))
    assert "on meta or fake, without values: 'x', 'y'" in text and "pass real tensors" in text


def ranks_pass_different_values() -> tuple[str, str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mine = {name: value.chunk(2)[dist.get_rank() // 2] for name, value in batch().items()}
    replicated = parallel(mesh=mesh, batch_dims={"x": 0, "y": 0})
    first = refusal(InputError, lambda: replicated(**mine, scale=torch.tensor(float(dist.get_rank() == 2))))
    other = parallel(mesh=mesh)
    return first, refusal(InputError, lambda: other(**(mine | {"x": mine["x"] + (dist.get_rank() == 1)})))


def test_ranks_that_pass_different_replicated_inputs_are_named(gloo_ranks: Any) -> None:
    for replicated, share in gloo_ranks.run(ranks_pass_different_values):
        assert "'scale' differs between ranks 0 and 2, which must pass the same value, since it has no batch dim" in replicated
        assert "if a dim is the batch, say so by batch_dims=" in replicated
        assert "'x' differs between ranks 0 and 1, which must pass the same share of the batch" in share


def ranks_start_from_different_weights() -> str:
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        model.down.bias[0] += float(dist.get_rank() == 3)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mine = {name: value.chunk(2)[dist.get_rank() // 2] for name, value in batch().items()}
    return refusal(MeshError, lambda: autopar.compile(model, mesh, example_inputs=mine, backend="eager"))


def test_ranks_that_start_from_different_weights_are_named(gloo_ranks: Any) -> None:
    for text in gloo_ranks.run(ranks_start_from_different_weights):
        assert "ranks 0 and 3 hold different values of 'down.bias' (1 parameters and buffers differ)" in text
        assert "torch.manual_seed" in text


def asks_for_parameters_too_early() -> tuple[str, int]:
    module = parallel(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    text = refusal(MeshError, lambda: torch.optim.AdamW(module.parameters()))
    module(**{name: value.chunk(2)[dist.get_rank() // 2] for name, value in batch().items()})
    return text, len(list(module.parameters()))


def test_parameters_before_the_first_capture_on_a_real_mesh_are_refused(gloo_ranks: Any) -> None:
    for text, count in gloo_ranks.run(asks_for_parameters_too_early):
        assert "parameters() on a real mesh before the first capture" in text and "Pass example_inputs to autopar.compile" in text
        assert count == 4


# ---- captures


def test_new_shapes_are_captured_again_and_said_and_the_ninth_capture_warns(caplog: pytest.LogCaptureFixture) -> None:
    module = parallel(example_inputs=batch(2))
    with caplog.at_level(logging.INFO, "autopar"), warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in range(4, 18, 2):
            module(**batch(size))["loss"].backward()
        module(**batch(4))
    said = [record.getMessage() for record in caplog.records if "recapturing" in record.getMessage()]
    assert len(said) == 7 and "x [4, 6] float32, y [4, 6] float32; training=True, grad=True); this is capture 2" in said[0]
    with pytest.warns(UserWarning, match="9 captures of one model: each new shape compiles anew; pad_to=autopar.PadTo"):
        module(**batch(18))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        if out.sum() > 0:  # the line that the error must name
            out = -out
        return out.mean()


def test_a_branch_on_a_value_is_refused_with_its_line_and_a_fix() -> None:
    text = refusal(CaptureError, lambda: autopar.compile(Branching(), MESH, example_inputs=(batch()["x"],)))
    assert "Branching cannot be captured as one graph" in text
    assert "test_refusals.py:" in text and "if out.sum() > 0:  # the line that the error must name" in text
    assert "write it with torch.where, or decide it before the call" in text
