"""Batches that are objects are refused by what they are, on every rank, and taken as what the refusal says."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.errors import InputError


@dataclass
class Batch:
    x: Tensor
    mask: Tensor | None = None
    scale: float = 1.0


@dataclass(slots=True)
class Slotted:
    x: Tensor


class Encoding(UserDict[str, Tensor]):
    pass


class Holder:
    def __init__(self, x: Tensor) -> None:
        self.held = [x]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, batch: Any) -> Tensor:
        return self.fc(batch["x"] if isinstance(batch, dict) else batch.x).square().mean()


X = torch.ones(4, 4)
WAYS = {
    "Batch": (Batch(X), r"call torch.export.register_dataclass\(Batch\) once"),
    "Slotted": (Slotted(X), r"call torch.export.register_dataclass\(Slotted\) once"),
    "Encoding": (Encoding(x=X), r"pass dict\(batch\), or what is in it by name, \*\*batch"),
    "Holder": (Holder(X), "pass its tensors in tuples, lists, dicts"),
}


@pytest.mark.parametrize("kind", WAYS)
def test_objects_are_refused_by_what_they_are(kind: str) -> None:
    parallel = autopar.compile(Model(), autopar.virtual_mesh(dp=2), backend="eager")
    given, mend = WAYS[kind]
    with pytest.raises(InputError, match=f"'batch' is of type {kind}, in which torch knows no tensors: {mend}"):
        parallel(batch=given)


def on_ranks() -> list[str]:
    parallel = autopar.compile(Model(), init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), backend="eager")
    found: list[str] = []
    for given in (Batch(torch.randn(2, 4)), Encoding(x=torch.randn(2, 4))):
        with pytest.raises(InputError) as caught:
            parallel(batch=given)
        found.append(str(caught.value))
    parallel(batch=dict(Encoding(x=torch.randn(2, 4)))).backward()
    return found


def test_ranks_are_told_so_too(gloo_ranks: Any) -> None:
    for of_dataclass, of_mapping in gloo_ranks.run(on_ranks):
        assert "'batch' is of type Batch, in which" in of_dataclass and "'batch' is of type Encoding, in which" in of_mapping
