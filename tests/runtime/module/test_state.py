"""Norms of gradients that lie on several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from autopar.errors import AutoparError
from autopar.runtime.execute.distributed_world import DistributedWorld
from autopar.runtime.module.state import clip_grad_norm

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
