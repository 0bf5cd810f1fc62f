"""What stands for the tensors of a model while it is captured without values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.errors import CaptureError
from autopar.ir.mesh import virtual_mesh
from autopar.runtime._torch import storage_key
from autopar.runtime.module.placement import global_parameters


class Noted(nn.Module):
    """Reads what is noted at a parameter and how another lies, and has two buffers in one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.conv = nn.Linear(8, 8), nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.inner.weight.factor = 3.0  # pyright: ignore[reportAttributeAccessIssue]
        self.register_buffer("all", torch.arange(8.0))
        self.register_buffer("odd", self.get_buffer("all")[1::2])
        self.register_buffer("bits", self.get_buffer("all").view(torch.int32)[:3])

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x) * getattr(self.inner.weight, "factor", 1.0)
        return (h * 5 if self.conv.weight.is_contiguous() else h).square().mean()


class Writing(Noted):
    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("all").mul_(2)
        return (self.inner(x)[:, :4] + self.get_buffer("odd")).sum()


@pytest.mark.parametrize("built_on", ["meta", "cpu"])
def test_they_lie_as_the_tensors_do_and_know_what_was_noted(built_on: str) -> None:
    with torch.device(built_on):
        model: Any = Noted()
    before = dict(model.named_parameters()) | dict(model.named_buffers())
    with global_parameters(model, torch.device("cpu"), without_values=True):
        found = dict(model.named_parameters()) | dict(model.named_buffers())
        assert {each.device.type for each in found.values()} == {"cpu"} and model.inner.weight.factor == 3.0
        for name, each in found.items():
            wanted = before[name]
            assert each is not wanted and isinstance(each, nn.Parameter) == isinstance(wanted, nn.Parameter)
            assert (each.stride(), each.storage_offset(), each.dtype) == (wanted.stride(), wanted.storage_offset(), wanted.dtype)
        memories = {name: storage_key(each) for name, each in found.items()}
        assert memories["all"] == memories["odd"] == memories["bits"] and len(set(memories.values())) == len(memories) - 2
    assert all(each is before[name] for name, each in (dict(model.named_parameters()) | dict(model.named_buffers())).items())


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_write_into_shared_memory_is_refused_on_meta(is_enabled: bool) -> None:
    with torch.device("meta"):
        model, x = Writing(), torch.empty(4, 8)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_enabled), pytest.raises(CaptureError, match="lies in the same memory"):
        autopar.compile(model, virtual_mesh(dp=2), example_inputs=(x,))


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_plan_on_meta_reads_what_is_noted_and_how_parameters_lie(is_enabled: bool) -> None:
    with torch.device("meta"):
        model, x = Noted(), torch.empty(4, 8)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_enabled):
        forward = autopar.compile(model, virtual_mesh(dp=2), example_inputs=(x,)).compiled.forms.forward
    products = forward.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    assert [node.args[1] for node in products] == [3.0]


def noted_on_ranks() -> tuple[list[float], float]:
    """Losses of two programs, the second made of placed parameters, and what is noted at one of these."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model: Any = Factors()
    parallel = autopar.compile(model, mesh, example_inputs=(torch.ones(2, 8),))
    losses = [float(parallel(torch.ones(size, 8)).detach()) for size in (2, 1)]
    return losses, getattr(parallel.get_parameter("inner.weight"), "factor", 0.0)


class Factors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.conv = nn.Linear(8, 8), nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.inner.weight.factor = 3.0  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x) * getattr(self.inner.weight, "factor", 1.0)
        return (h * 5 if self.conv.weight.is_contiguous() else h).square().mean() + self.conv.weight.sum()


def test_a_placed_parameter_keeps_what_is_noted_at_it_and_how_it_lay(gloo_ranks: Any) -> None:
    torch.manual_seed(0)
    wanted = float(Factors()(torch.ones(2, 8)).detach())
    for losses, factor in gloo_ranks.run(noted_on_ranks):
        assert losses == pytest.approx([wanted, wanted], rel=1e-5) and factor == 3.0
