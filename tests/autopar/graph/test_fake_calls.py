"""Fake values by meta kernels are those of a fake mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar._torch import fake_mode, fake_mode_of, is_fake
from autopar.graph.fake_calls import fake_call

aten = torch.ops.aten
SHAPES = ((4, 6, 8), (1, 6, 8), (4, 1, 1))


def operand(shape: tuple[int, ...], layout: str) -> torch.Tensor:
    value = torch.empty(shape)
    if layout == "transposed":
        return torch.empty(shape[::-1]).permute(2, 1, 0)
    return value.expand(4, 6, 8) if layout == "expanded" else value


CALLS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "reshape": (aten.reshape.default, ([24, 8],), {}),
    "reshape by -1": (aten.reshape.default, ([-1, 2],), {}),
    "permute": (aten.permute.default, ([1, 2, 0],), {}),
    "clone": (aten.clone.default, (), {"memory_format": torch.contiguous_format}),
    "clone, kept": (aten.clone.default, (), {}),
    "slice": (aten.slice.Tensor, (1, 0, 3), {}),
    "select": (aten.select.int, (1, 0), {}),
    "add a number": (aten.add.Tensor, (1.5,), {}),
    "compare": (aten.ge.Scalar, (0,), {}),
    "exp": (aten.exp.default, (), {}),
    "sum": (aten.sum.dim_IntList, ([1], True), {}),
    "sum in float64": (aten.sum.default, (), {"dtype": torch.float64}),
    "amax": (aten.amax.default, ([0],), {}),
    "logsumexp": (aten.logsumexp.default, ([0],), {}),
}


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "expanded"])
@pytest.mark.parametrize("name", CALLS)
def test_as_a_fake_mode_has_it(name: str, layout: str) -> None:
    target, arguments, options = CALLS[name]
    mode = fake_mode()
    with mode:
        values = [operand(shape, layout) for shape in SHAPES if layout != "expanded" or 1 in shape]
    for value in values:
        if name.startswith("reshape") and value.numel() != 192:
            continue
        got = fake_call(mode, target, (value, *arguments), options)
        with mode:
            wanted = target(value, *arguments, **options)
        assert is_fake(got) and fake_mode_of(got) is mode
        assert (got.shape, got.stride(), got.dtype, got.device) == (wanted.shape, wanted.stride(), wanted.dtype, wanted.device)


def test_of_two_layouts() -> None:
    mode = fake_mode()
    with mode:
        left, right = operand((4, 6, 8), "transposed"), operand((4, 6, 8), "contiguous")
    for pair in ((left, right), (right, left), (left, left)):
        with mode:
            wanted = aten.mul.Tensor(*pair)
        assert fake_call(mode, aten.mul.Tensor, pair, {}).stride() == wanted.stride()


def test_other_calls_are_the_modes() -> None:
    mode = fake_mode()
    with mode:
        value = torch.empty(4, 6)
    assert is_fake(fake_call(mode, aten.arange.default, (4,), {"device": torch.device("cpu")}))
    outputs = fake_call(mode, aten.max.dim, (value, 1), {})
    assert [output.dtype for output in outputs] == [torch.float32, torch.int64]
    assert fake_call(mode, aten.add_.Tensor, (value, 1.0), {}) is value
