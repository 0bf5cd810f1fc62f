"""What a form read is written in place behind it, where plain torch had kept a copy of it, or nothing: an op of ours would keep itself."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar


class Written(nn.Module):
    bank: Tensor
    bias: Tensor

    def __init__(self, compute: Callable[[Written, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.compute = nn.Linear(4, 4), nn.Linear(4, 4), compute
        self.register_buffer("bank", torch.randn(12, 4))
        self.register_buffer("bias", torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, self.first(x)).square().mean()


def memory(model: Written, z: Tensor) -> Tensor:
    bank = model.bank.clone()
    read = (z @ bank.T).softmax(1) @ bank
    with torch.no_grad():
        model.bank.mul_(0.9)
    return read


def mask(model: Written, z: Tensor) -> Tensor:
    read = (z @ z.T + model.bias).softmax(1) @ z
    with torch.no_grad():
        model.bias.mul_(0.9)
    return read


def layer_norm(model: Written, z: Tensor) -> Tensor:
    centred = z - z.mean(-1, keepdim=True)
    z += model.second(centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-5))
    return z


def rms_norm(model: Written, z: Tensor) -> Tensor:
    wide = z.double()
    z += model.second((wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(z.dtype))
    return z


def biased(model: Written, z: Tensor) -> Tensor:
    z += model.second(F.gelu(z + model.second.bias))
    return z


def gate(model: Written, z: Tensor) -> Tensor:
    wide = z.double()
    z += (F.silu(wide) * (z + 1.0).double()).to(z.dtype)
    return z


@pytest.mark.parametrize("compute", [memory, mask, layer_norm, rms_norm, biased, gate])
def test_an_operand_may_be_written_behind_a_form(compute: Callable[[Written, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Written(compute), torch.randn(8, 4)
    reference = copy.deepcopy(model)
    parallel = autopar.compile(model, autopar.virtual_mesh(dp=2), example_inputs=(x,), backend="eager", kernels="triton")
    for each in (parallel, reference):
        each(x).backward()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    torch.testing.assert_close({name: parameter.grad for name, parameter in parallel.named_parameters()}, expected)
    torch.testing.assert_close(dict(model.named_buffers()), dict(reference.named_buffers()))
