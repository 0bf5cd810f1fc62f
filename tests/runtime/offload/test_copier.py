"""What is copied away and back is what it was: values, shapes, strides, and which views share memory."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
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


def negative() -> torch.Tensor:
    """A real tensor whose memory has its values with the other sign."""
    return torch.randn(3, 4, dtype=torch.complex64).conj().imag


KINDS: dict[str, Callable[[], list[torch.Tensor]]] = {
    "conjugate": lambda: [torch.randn(3, 4, dtype=torch.complex64).conj()],
    "negative": lambda: [negative()],
    "conjugate and its base": lambda: [x := torch.randn(5, dtype=torch.complex128), x.conj(), x.imag, x.conj().imag],
    "bool": lambda: [torch.tensor([True, False, True])],
    "float8": lambda: [torch.randn(4, 4).to(torch.float8_e4m3fn), torch.randn(3).to(torch.float8_e5m2)],
    "channels last": lambda: [torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)],
    "expanded": lambda: [torch.randn(3, 1).expand(3, 5), torch.randn(()).expand(2, 2)],
    "overlapping": lambda: [torch.randn(10).as_strided((4, 3), (2, 1), 1)],
    "no elements": lambda: [torch.empty(0), torch.empty(3, 0, dtype=torch.int64), torch.randn(8)[5:5], torch.ones(2)],
    "sparse": lambda: [torch.eye(3).to_sparse(), torch.ones(2)],
    "of a class of its own": lambda: [Named(torch.randn(3))],
}


class Named(torch.Tensor):
    pass


@pytest.mark.parametrize("memory", ["host", "file"])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost_on_the_way(copier: Copier, kind: str, memory: Memory) -> None:
    tensors = KINDS[kind]()
    found = copier.fetch(copier.park(memory, tensors, list(map(str, range(9)))[: len(tensors)]).wait()).wait()
    for one, other in zip(tensors, found, strict=True):
        assert (one.dtype, one.shape, one.layout, type(one)) == (other.dtype, other.shape, other.layout, type(other))
        assert (one.is_conj(), one.is_neg()) == (other.is_conj(), other.is_neg())
        if not one.is_sparse:
            assert one.stride() == other.stride()
            one, other = ((each + 0.0 if one.is_complex() else each.float()) for each in (one, other))
        assert torch.equal(one, other) if not one.is_sparse else torch.equal(one.to_dense(), other.to_dense())


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
