"""What is copied away and back is what it was: values, shapes, strides, and which views share memory."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from autopar.errors import OffloadError
from autopar.ir.instructions import Memory
from autopar.runtime.offload.copier import Copier, copier_of

CPU = torch.device("cpu")


@pytest.fixture
def copier(tmp_path: Path) -> Copier:
    return Copier(CPU, str(tmp_path))


@pytest.mark.parametrize("memory", ["host", "file"])
def test_views_come_back_as_views(copier: Copier, memory: Memory) -> None:
    base = torch.randn(3, 400, dtype=torch.float64)
    tensors = [base[1:].t(), base[2, 5:9], base.view(torch.int64)[1:], torch.arange(7.0)[::2]]
    parked = copier.park(memory, tensors, list("abcd")).wait()
    arriving = copier.fetch(parked)
    found = arriving.wait()
    for one, other in zip(tensors, found, strict=True):
        assert torch.equal(one, other) and (one.stride(), one.dtype) == (other.stride(), other.dtype)
        assert one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
    found[0].fill_(3.0)
    assert (found[1] == 3.0).all()
    assert found[0].untyped_storage().nbytes() < base.nbytes  # what nobody looked at stayed


def test_memory_is_that_of_the_largest_step(copier: Copier) -> None:
    for _ in range(3):
        parked = [copier.park("host", [torch.zeros(5000)], ["a"]).wait() for _ in range(2)]
        assert copier.host.used_bytes == 40000
        del parked
    gc.collect()
    assert copier.host.used_bytes == 0 and copier.host.peak_bytes == 40000 and copier.host.taken_bytes == 2 * 20480


def test_what_goes_wrong_is_heard_of_at_the_wait(copier: Copier) -> None:
    (parked,) = copier.park("file", [torch.ones(100)], ["buffer h of rank 0"]).wait()
    os.pwrite(copier.file._file, b"x", 3)
    with pytest.raises(OffloadError, match="buffer h of rank 0 came back damaged"):
        copier.fetch([parked]).wait()


def test_each_owner_has_one_as_long_as_it_is_there() -> None:
    class Owner:
        pass

    owner = Owner()
    assert copier_of(owner, CPU) is copier_of(owner, CPU) is not copier_of(Owner(), CPU)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("memory", ["host", "file"])
def test_a_gpu(memory: Memory, tmp_path: Path) -> None:
    copier, device = Copier(torch.device("cuda"), str(tmp_path)), torch.device("cuda")
    for _ in range(4):
        tensor = torch.randn(1 << 20, device=device)
        wanted = tensor.cpu()
        departure = copier.park(memory, [tensor], ["a"])
        parked = departure.wait()
        tensor.zero_()  # behind the copy, on the stream that computes
        (found,) = copier.fetch(parked).wait()
        assert torch.equal(found.cpu(), wanted)
