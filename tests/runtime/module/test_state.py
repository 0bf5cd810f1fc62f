"""Norms of gradients that lie on several ranks; states that one rank saved and others load."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from autopar.errors import AutoparError, PlanError
from autopar.runtime.execute.distributed_world import DistributedWorld
from autopar.runtime.module.state import clip_grad_norm
from tests.support.captures import compiled

# torch rounds the norm to the dtype of the gradients before it scales by it.
DIGITS = {torch.float64: 1e-14, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 2e-2}


class OneEach(DistributedWorld):
    """Every rank has a parameter that no other has."""

    def is_first(self, name: str) -> bool:
        return True


def gradients(dtypes: list[torch.dtype]) -> dict[str, nn.Parameter]:
    parameters = {}
    for number, dtype in enumerate(dtypes):
        parameters[f"p{number}"] = parameter = nn.Parameter(torch.zeros(5, dtype=dtype))
        parameter.grad = torch.linspace(1, 3, 5, dtype=torch.float64).pow(number + 1).to(dtype)
    return parameters


def clipped(dtypes: list[torch.dtype], norm_type: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm, and this rank's gradient after clipping."""
    world = OneEach(init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), timeout=60)
    name, mine = list(gradients(dtypes).items())[dist.get_rank()]
    norm = clip_grad_norm({name: mine}, world, 0.5, norm_type, False)
    assert mine.grad is not None
    return norm, mine.grad


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize(
    "dtypes",
    [[torch.float64] * 4, [torch.float32] * 4, [torch.bfloat16] * 4, [torch.bfloat16, torch.float16, torch.float32, torch.bfloat16]],
    ids=["float64", "float32", "bfloat16", "mixed"],
)
def test_norms_have_torchs_dtype_and_its_digits(gloo_ranks: Any, dtypes: list[torch.dtype], norm_type: float) -> None:
    parameters = gradients(dtypes)
    wanted = nn.utils.clip_grad_norm_(parameters.values(), 0.5, norm_type)
    for parameter, (norm, gradient) in zip(parameters.values(), gloo_ranks.run(clipped, dtypes, norm_type), strict=True):
        assert norm.dtype == wanted.dtype and gradient.dtype == parameter.dtype
        torch.testing.assert_close(norm, wanted, rtol=DIGITS[wanted.dtype], atol=0)
        torch.testing.assert_close(gradient, parameter.grad, rtol=max(DIGITS[wanted.dtype], DIGITS[gradient.dtype]), atol=0)


def refused() -> str:
    with pytest.raises(AutoparError) as error:
        clipped([torch.float32] * 4, 0.0)
    return str(error.value)


def test_what_is_no_norm_is_refused(gloo_ranks: Any) -> None:
    assert all("norm_type=0.0 is no norm" in text for text in gloo_ranks.run(refused))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).tanh()).square().mean()


def loaded(axes: dict[str, int], zero: int, of_rank: int | None) -> tuple[str, str]:
    """What a rank says that loads the module's and the optimizer's `state_dict()` as rank `of_rank` saved them, or its own."""
    torch.manual_seed(0)
    mesh, x = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes)), torch.randn(8, 8)
    parallel = compiled(Two(), mesh, {"x": x}, cluster="ideal", **({"zero": zero} if zero else {}))
    optimizer = torch.optim.AdamW(parallel.parameters())
    parallel(x).backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save((parallel.state_dict(), optimizer.state_dict()), file)
    files: list[bytes] = [b""] * dist.get_world_size()
    dist.all_gather_object(files, file.getvalue())
    mine = files[dist.get_rank() if of_rank is None else of_rank]
    state, state_of_optimizer = torch.load(io.BytesIO(mine), weights_only=True)
    said = ["", ""]
    try:
        parallel.load_state_dict(state)
    except (PlanError, RuntimeError) as error:  # torch's own where another stage has no such names
        said[0] = str(error)
    optimizer.load_state_dict(state_of_optimizer)
    try:
        optimizer.step()
    except PlanError as error:
        said[1] = str(error)
    return said[0], said[1]


@pytest.mark.parametrize(("axes", "zero"), [({"dp": 4}, 3), ({"dp": 4}, 1), ({"dp": 2, "tp": 2}, 0)], ids=["zero 3", "zero 1", "tp"])
def test_the_state_of_another_rank_is_refused(gloo_ranks: Any, axes: dict[str, int], zero: int) -> None:
    """What all ranks load is often what rank 0 has saved, as under DDP."""
    for rank, said in enumerate(gloo_ranks.run(loaded, axes, zero, 0)):
        here, own = (list(np.ndindex(*axes.values()))[each] for each in (0, rank))  # places on the mesh
        is_own = here == own if zero else here[1] == own[1]
        assert all(text == "" for text in said) if is_own else all(f"of rank 0, and this is rank {rank}:" in text for text in said)


def test_the_optimizers_state_of_another_stage_is_refused(gloo_ranks: Any) -> None:
    """It goes by number, and stages may have as many parameters of the same shapes."""
    of_first, of_second = (gloo_ranks.run(loaded, {"pp": 2, "dp": 2}, 0, 0)[stage : stage + 2] for stage in (0, 2))
    assert of_first == [("", "")] * 2
    assert all(
        "Missing key" in of_model and "exp_avg" in of_optimizer and "of rank 0" in of_optimizer for of_model, of_optimizer in of_second
    )


def of_fewer_ranks() -> bool:
    """Whether values are those that one rank saved as DTensors of its own."""
    mesh, generator = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), torch.Generator().manual_seed(1)
    values = {name: torch.randn(each.shape, generator=generator) for name, each in Two().named_parameters()}
    alone = DeviceMesh("cpu", [0], mesh_dim_names=("dp",))
    state = {name: DTensor.from_local(each, alone, [Replicate()], run_check=False) for name, each in values.items()}
    file, files = io.BytesIO(), [b""] * 4
    torch.save(state, file)
    dist.all_gather_object(files, file.getvalue())
    parallel = compiled(Two(), mesh, {"x": torch.randn(2, 8)})
    parallel.load_state_dict(torch.load(io.BytesIO(files[0]), weights_only=True))
    return all(torch.equal(each, values[name]) for name, each in parallel.full_state_dict().items())


def test_whole_values_of_fewer_ranks_are_loaded(gloo_ranks: Any) -> None:
    assert all(gloo_ranks.run(of_fewer_ranks))


@pytest.mark.parametrize(("axes", "zero", "of_rank"), [({"dp": 4}, 3, None), ({"dp": 4}, 0, 0)], ids=["its own", "whole"])
def test_state_that_is_the_same_is_loaded(gloo_ranks: Any, axes: dict[str, int], zero: int, of_rank: int | None) -> None:
    assert gloo_ranks.run(loaded, axes, zero, of_rank) == [("", "")] * 4
