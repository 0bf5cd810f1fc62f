from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autopar._torch import fake_mode
from autopar.graph.autocast import NOTHING, Autocast, CastInsideError, Casts, CastsOfCalls, autocast_off, casts_not_cached

aten = torch.ops.aten
BF16, F32 = torch.bfloat16, torch.float32


def casts_of(target: Any, *args: Any, device: str = "cpu", **kwargs: Any) -> Casts:
    mode = fake_mode()
    with mode:
        fakes = torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
    return CastsOfCalls(mode).of(target, *fakes, Autocast(device, BF16))


def full(*shape: int) -> Tensor:
    return torch.zeros(*shape)


def low(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=BF16)


# By op: its operands, and what each device's autocast does, as torch's documentation lists it.
LISTED: dict[str, tuple[Any, tuple[Any, ...], Casts, Casts]] = {
    "linear": (aten.linear.default, (full(2, 4), full(3, 4)), Casts({0: BF16, 1: BF16}), Casts({0: BF16, 1: BF16})),
    "one is low": (aten.matmul.default, (low(2, 4), full(4, 3)), Casts({1: BF16}), Casts({1: BF16})),
    "layer norm": (aten.layer_norm.default, (low(2, 4), [4], full(4)), NOTHING, Casts({0: F32})),
    "softmax": (aten.softmax.int, (low(2, 4), -1), NOTHING, Casts(dtype=F32)),
    "softmax with a dtype": (aten.softmax.int, (low(2, 4), -1, F32), NOTHING, NOTHING),
    "sum": (aten.sum.dim_IntList, (low(2, 4), [1]), NOTHING, Casts(dtype=F32)),
    "power": (aten.pow.Tensor_Scalar, (low(2, 4), 2), NOTHING, Casts({0: F32})),
    "squared error": (aten.mse_loss.default, (low(2, 4), full(2, 4)), Casts({0: F32}), Casts({0: F32})),
    "cross entropy": (aten.cross_entropy_loss.default, (low(2, 4), torch.zeros(2).long()), Casts({0: F32}), Casts({0: F32})),
    "a sum of two": (aten.add.Tensor, (low(2, 4), full(2, 4)), NOTHING, NOTHING),
    "gelu": (aten.gelu.default, (low(2, 4),), NOTHING, NOTHING),
    "batch norm": (aten.batch_norm.default, (low(2, 4), *(full(4) for _ in range(4)), True, 0.1, 1e-5, True), NOTHING, NOTHING),
    "float64 is let alone": (aten.linear.default, (full(2, 4).double(), full(3, 4).double()), NOTHING, NOTHING),
    "integers are let alone": (aten.add.Tensor, (torch.zeros(2).long(), 1), NOTHING, NOTHING),
}


@pytest.mark.parametrize("name", LISTED)
def test_operands_are_cast_as_torch_does(name: str) -> None:
    target, args, on_cpu, on_cuda = LISTED[name]
    found = casts_of(target, *args), casts_of(target, *args, device="cuda")
    assert [(dict(each.operands), each.dtype, each.events) for each in found] == [
        (dict(each.operands), each.dtype, each.events) for each in (on_cpu, on_cuda)
    ]


def test_tensors_in_lists_count_as_operands() -> None:
    assert dict(casts_of(aten.cat.default, [low(2, 4), full(2, 4)]).operands) == {0: F32}


def test_a_call_that_is_cast_inside_is_taken_apart() -> None:
    found = casts_of(aten.einsum.default, "ij,jk->ik", [full(2, 4), full(4, 3)])
    names = [str(event.target) for event in found.events]
    assert not found.operands and names.count("aten._to_copy.default") == 2 and "aten.bmm.default" in names
    assert dict(casts_of(aten.einsum.default, "ij,jk->ik", [full(2, 4), full(4, 3)], device="cuda").operands) == {1: BF16, 2: BF16}


def lstm(device: str) -> Casts:
    weights = [full(12, 4), full(12, 3), full(12), full(12)]
    return casts_of(aten.lstm.input, full(2, 1, 4), [full(1, 1, 3)] * 2, weights, True, 1, 0.0, False, False, False, device=device)


def test_what_differs_by_device_inside_is_refused() -> None:
    with pytest.raises(CastInsideError, match="lstm.input is cast inside"):
        lstm("cuda")


def test_a_layer_of_an_lstm_is_plain_ops_on_a_cpu() -> None:
    before, names = torch.backends.mkldnn.enabled, [str(event.target) for event in lstm("cpu").events]
    assert "aten._to_copy.default" in names and "aten.sigmoid_.default" in names and "aten.mkldnn_rnn_layer.default" not in names
    assert torch.backends.mkldnn.enabled == before


def test_functions_of_python_are_refused_only_if_something_in_them_is_cast() -> None:
    assert casts_of(lambda x: (x * 2,), full(2, 4)) == NOTHING
    with pytest.raises(CastInsideError, match="autograd.Function"):
        casts_of(lambda x: ((x + 1) @ (x + 1).T,), full(2, 4))


def test_the_state_around_a_call() -> None:
    assert Autocast.around("cpu") is None
    with torch.autocast("cpu", torch.float16, cache_enabled=False):
        assert Autocast.around("cpu") == Autocast.around("meta") == Autocast("cpu", torch.float16, caches=False)
        assert Autocast.around("cuda") is None
        with autocast_off():
            assert Autocast.around("cpu") is None
    with torch.autocast("cpu", BF16), casts_not_cached():
        assert Autocast.around("cpu") == Autocast("cpu", BF16, caches=False)
    assert torch.is_autocast_cache_enabled()
