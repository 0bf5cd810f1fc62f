"""Parameters that forward writes, on processes: whole on each of them, as buffers are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.errors import PlanError
from tests.autopar.frontend.test_frozen_writes import Momentum, X, Y, require_same, trained
from tests.support.captures import compiled
from tests.support.ranks import GlooRanks, share

pytestmark = pytest.mark.ranks


def seeded(is_last: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Momentum(is_last=is_last).double()


def on_a_process(axes: dict[str, int], options: dict[str, Any], folder: str, is_last: bool) -> tuple[list[float], list[float]]:
    """The losses before a save and behind the load of it, beside those of one device."""
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    batch = share({"x": X, "y": Y}, mesh)
    reference, model = seeded(is_last), seeded(is_last)
    if "weights" in options:
        model = model.to("meta")
    parallel = compiled(model, mesh, (batch["x"], batch["y"]), timeout=180, **options)
    found, wanted = trained(parallel, batch["x"], batch["y"]), trained(reference, X, Y)
    require_same(parallel, reference)
    autopar.save(folder, parallel)
    anew = compiled(Momentum(is_last=is_last).double(), mesh, (batch["x"], batch["y"]), timeout=180)
    autopar.load(folder, anew)
    require_same(anew, reference)
    return found + trained(anew, batch["x"], batch["y"], steps=1), wanted + trained(reference, X, Y, steps=1)


def test_processes_train_with_a_teacher(gloo_ranks: GlooRanks, tmp_path: Path) -> None:
    save_file({name: value.contiguous() for name, value in seeded().state_dict().items()}, tmp_path / "model.safetensors")
    cases: list[tuple[dict[str, int], dict[str, Any], bool]] = [
        ({"dp": 2, "tp": 2}, {}, False),
        ({"dp": 4}, {"zero": 3, "weights": str(tmp_path / "model.safetensors")}, False),
        ({"pp": 2, "tp": 2}, {}, True),
    ]
    for number, (axes, options, is_last) in enumerate(cases):
        for found, wanted in gloo_ranks.run(on_a_process, axes, options, str(tmp_path / str(number)), is_last):
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def read_first() -> str:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    batch = share({"x": X, "y": Y}, mesh)
    parallel = compiled(seeded().eval(), mesh, (batch["x"], batch["y"]), timeout=180, zero=3)
    with pytest.raises(PlanError) as refused:
        parallel.train()(batch["x"], batch["y"])
    return str(refused.value)


def test_what_a_first_call_cut_cannot_be_written(gloo_ranks: GlooRanks) -> None:
    for refused in gloo_ranks.run(read_first):
        assert "'teacher.0.weight', into which forward writes, lies" in refused and "let the first call" in refused
