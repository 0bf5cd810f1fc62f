"""Parallel modules that are saved and loaded, and what is compared of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar import TrainStep
from tests.support.models.trained import batch, small_gpt

ADAMW = partial(torch.optim.AdamW, lr=1e-2)


def parallel_on(
    axes: Mapping[str, int], model: nn.Module | None = None, real: bool = False, optimizer: Any = ADAMW, **options: Any
) -> autopar.ParallelModule:
    """The small GPT on virtual or gloo ranks, its plan that of the ideal cluster, which splits all that it can."""
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes)) if real else autopar.virtual_mesh(**axes)
    options = {"train_step": TrainStep(ema=0.9), "cluster": autopar.Cluster.ideal(), "backend": "eager"} | options
    example = share(batch(0), axes) if real else batch(0)
    return autopar.compile(model or small_gpt(num_blocks=1), mesh, example_inputs=example, optimizer=optimizer, **options)


def share(values: dict[str, torch.Tensor], axes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """This gloo rank's part of a batch."""
    if "dp" not in axes:
        return values
    names = list(axes)
    inner = axes[names[-1]] if names.index("dp") == 0 and len(names) > 1 else 1
    return {name: value.chunk(axes["dp"])[dist.get_rank() // inner % axes["dp"]] for name, value in values.items()}


def all_of(parallel: autopar.ParallelModule) -> dict[str, torch.Tensor]:
    """Every tensor of the module and its optimizer, whole, copied. Collective."""
    found = {f"model/{name}": value.clone() for name, value in parallel.full_state_dict().items()}
    state = parallel.train_state_dict()
    found |= {f"ema/{name}": value for name, value in state["ema"].items()}
    for name, entries in (state["optimizer"] or {"state": {}})["state"].items():
        found |= {f"optimizer/{name}/{key}": torch.as_tensor(value) for key, value in entries.items()}
    return found


def are_equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Bit by bit."""
    assert one.keys() == other.keys() and one, sorted(one.keys() ^ other.keys())[:5]
    return all(each.dtype == other[name].dtype and torch.equal(each, other[name]) for name, each in one.items())
