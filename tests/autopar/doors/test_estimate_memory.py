"""What nobody has started: a model on meta, a mesh that is none yet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import MeshError


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(torch.relu(self.up(x))) - x).square().mean()


def estimated(device: str, width: int, **options: Any) -> autopar.Memory:
    with torch.device(device):
        model, x = Net(width), torch.empty(8, width)
    return autopar.estimate_memory(model, {"dp": 2, "tp": 2}, (x,), **options)


def test_a_model_on_meta_takes_what_it_takes_with_values() -> None:
    found = estimated("meta", 64)
    assert found.peak_bytes == estimated("cpu", 64).peak_bytes
    assert found.places[0].kinds["optimizer"] >= 2 * 4 * (8 * 64 * 64 // 2)


def test_what_no_machine_here_could_hold_is_estimated() -> None:
    """8 Gi parameters in float32 with Adam's state, on four devices of 80 GB."""
    found = estimated("meta", 32768, cluster="h100")
    assert not found.fits and found.limit == "the 80.0 GB of a h100" and "does NOT fit into the 80.0 GB" in str(found)
    assert found.peak_bytes > 16 * 8 * 2**30 / 2


def test_a_mesh_is_virtual_or_its_axes() -> None:
    with pytest.raises(MeshError, match=r"takes autopar.virtual_mesh\(...\) or the axes of a mesh, \{'dp': 8\}, not a int"):
        autopar.estimate_memory(Net(4), 4, (torch.ones(2, 4),))
