"""Parameters of which ZeRO makes no equal parts are padded, and nothing else is."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.ir.freedom import Freedom
from autopar.ir.keys import DIMS
from autopar.ir.padding import Padding
from autopar.ir.program import Program
from autopar.ir.zero import ZeRO
from autopar.passes.global_.pad_parameters import PadParameters
from tests.support.graphs import MESH, text, traced, with_atoms

aten = torch.ops.aten


def program(zero: ZeRO | None) -> Program:
    """x @ w + b, with 5 columns."""

    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return aten.add.Tensor(aten.mm.default(x, w), b)

    found = traced(function, torch.randn(8, 4), torch.randn(4, 5), torch.randn(5), parameters=(1, 2))
    return with_atoms(replace(found, freedom=Freedom(shards_parameters=zero is not None, zero=zero)))


def test_the_longest_dim_of_what_does_not_divide() -> None:
    """The weight has a dim of 4, which two ranks divide."""
    before = program(ZeRO(3))
    assert MESH.size_of(["dp"]) == 2
    decision = PadParameters().decide(before)
    assert str(decision) == "2: dim 0 has 6 elements"
    after = PadParameters().apply(before, decision)
    (bias,) = [(item, node) for item, node in after.named_inputs() if item.name == "2"]
    assert bias[0].shape == (5,) and DIMS[bias[1]][0] == ((6,),) and bias[1].meta["val"].shape == (6,)
    assert bias[0].padding is not None and (bias[0].padding.before, bias[0].padding.after) == (((5,),), ((6,),))
    assert any("aten.slice.Tensor(b_1, 0, 0, 5)" in line for line in text(after)), text(after)
    assert PadParameters().read(before, PadParameters().written(before, decision)) == decision


def test_nothing_is_padded_without_zero_or_below_level_3_where_nothing_is_trained() -> None:
    plain = program(None)
    assert not PadParameters().decide(plain).sizes
    assert PadParameters().apply(plain, PadParameters().decide(plain)) is plain
    frozen = program(ZeRO(2))
    inputs = tuple(replace(item, requires_grad=False) for item in frozen.signature.inputs)
    assert not PadParameters().decide(replace(frozen, signature=replace(frozen.signature, inputs=inputs))).sizes


class Head(nn.Module):
    """5 classes on 2 ranks: the bias is padded for itself, and the weight, whose other dim divides, is not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = nn.Linear(9, 14), nn.Linear(14, 5)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        logits = self.head(self.inner(x).relu())
        return logits if y is None else F.cross_entropy(logits, y)


@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("zero", [1, 3])
def test_calls_of_another_kind_find_parameters_as_they_lie(zero: int, axes: dict[str, int]) -> None:
    model, x, y = Head(), torch.randn(4, 9), torch.randint(0, 5, (4,))
    parallel = autopar.compile(model, autopar.virtual_mesh(**axes), backend="eager", zero=zero)
    parallel(x, y).backward()
    with torch.no_grad():
        torch.testing.assert_close(parallel(x, y), model(x, y))
        torch.testing.assert_close(parallel(x), model(x))
    more = torch.randn(6, 9), torch.randint(0, 5, (6,))
    assert parallel.verify(*more)
    parallel.eval()
    torch.testing.assert_close(parallel(*more), model(*more))


@pytest.mark.parametrize("axes", [{"dp": 2}, {"pp": 2, "dp": 2}], ids=str)
def test_what_is_frozen_later_is_read_as_it_lies(axes: dict[str, int]) -> None:
    """Below level 3 no frozen parameter is wanted in parts, but one that was trained lies so, with its padding."""
    model, x, y = Head(), torch.randn(4, 9), torch.randint(0, 5, (4,))
    parallel = autopar.compile(model, autopar.virtual_mesh(**axes), backend="eager", zero=1)
    parallel(x, y).backward()
    parallel.head.requires_grad_(False)
    assert parallel.verify(x, y)
    parallel.requires_grad_(False)
    with torch.no_grad():
        torch.testing.assert_close(parallel(x, y), model(x, y))
    parallel.requires_grad_(True)
    assert parallel.verify(x, y)


def test_a_dim_that_lies_padded_within_its_atoms_is_left_to_those() -> None:
    @dataclass(frozen=True)
    class Known:
        padding: Padding | None

    before = program(None)
    alone, heads = Known(Padding(((5,),), ((6,),))), Known(Padding(((4,), (5, 1)), ((4,), (6, 1))))
    assert PadParameters({"2": alone, "1": heads}).decide(before).sizes == {"2": (0, 6)}
    assert not PadParameters({"2": Known(None)}).decide(before).sizes
