"""Parameters that lie in host memory or in files: tensors like others, which copies read where they lie."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import OffloadError
from autopar.ir.offload import Offload
from autopar.runtime.offload.copier import Copier
from autopar.runtime.offload.stored import lying, store_global, store_of

CPU = torch.device("cpu")


def compiled(offload: Offload, *names: str) -> Any:
    return SimpleNamespace(offload=offload, stored=frozenset(names))


@pytest.mark.parametrize("place", ["host", "file"])
def test_a_part_moves_where_it_is_to_lie(place: Any, tmp_path: Path) -> None:
    store = store_of(compiled(Offload(parameters=place, folder=str(tmp_path)), "w"), CPU)
    part = torch.randn(3, 5, dtype=torch.float64).t()
    moved = store("w", part)
    assert torch.equal(moved, part) and moved.data_ptr() != part.data_ptr() and moved.data_ptr() % 4096 == 0
    assert store("v", part) is part and not list(tmp_path.iterdir())
    moved.add_(1)  # a tensor like any other
    assert torch.equal(moved, part + 1)


def test_nothing_moves_where_nobody_asked() -> None:
    part = torch.ones(2)
    assert store_of(compiled(Offload(activations="host")), CPU)("w", part) is part


def test_copies_read_a_parameter_where_it_lies() -> None:
    whole = torch.randn(8, 6)
    for tensor in (whole, whole[3:, 1:4].t(), torch.tensor(2.5)):
        copier, parked = Copier(CPU), lying(tensor, "parameter w")
        assert parked.kept is tensor
        tensor.add_(1)  # what is there when it is copied counts
        (found,) = copier.fetch([parked]).wait()
        assert torch.equal(found, tensor) and found.stride() == tensor.stride()
        assert found.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
        assert copier.host.taken_bytes == 0  # nothing was copied on the host
    empty = torch.empty(0, 3)
    assert Copier(CPU).fetch([lying(empty, "parameter v")]).wait()[0] is empty


def test_virtual_ranks_leave_the_callers_tensors_there_but_for_files(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    weight, pointers, values = model.weight, [each.data_ptr() for each in model.parameters()], model.weight.detach().clone()
    store_global(model, compiled(Offload(parameters="host"), "weight", "bias"))
    assert [each.data_ptr() for each in model.parameters()] == pointers
    store_global(model, compiled(Offload(parameters="file", folder=str(tmp_path)), "weight"))
    assert model.weight is weight and model.weight.data_ptr() != pointers[0] and torch.equal(model.weight, values)
    assert model.bias.data_ptr() == pointers[1]


def test_a_model_of_virtual_ranks_on_a_gpu_is_refused() -> None:
    model = nn.Linear(4, 3, device="meta")  # which is no CPU either
    with pytest.raises(
        OffloadError, match=r"'weight' lies on a GPU: Offload\(parameters=\) would leave it there. Keep the model on the CPU"
    ):
        store_global(model, compiled(Offload(parameters="host"), "weight"))
