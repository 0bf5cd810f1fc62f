"""What is computed with by copies of parameters is read through them, where the level of ZeRO has copies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from autopar.driver.manager import run_passes
from autopar.ir.freedom import Freedom
from autopar.ir.markers import held
from autopar.ir.program import Program
from autopar.ir.zero import ZeRO
from autopar.passes.global_.hold_copies import HoldCopies
from tests.support.graphs import assert_unchanged, text, traced

aten = torch.ops.aten
TENSORS = torch.randn(8, 4), torch.randn(4, 4), torch.randn(4)


def function(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """`weight` is cast, `scale` read as it is."""
    low = aten._to_copy.default(weight, dtype=torch.bfloat16)
    product = aten.mm.default(aten._to_copy.default(x, dtype=torch.bfloat16), low)
    return aten.mul.Tensor(aten._to_copy.default(product, dtype=torch.float32), scale)


def program(zero: ZeRO | None) -> Program:
    freedom = Freedom(shards_parameters=zero is not None, zero=zero)
    return replace(traced(function, *TENSORS, parameters=(1, 2)), freedom=freedom)


def copied(found: Program) -> list[str]:
    return [str(node.args[0]) for node in found.graph.nodes if node.target is held]


@pytest.mark.parametrize(
    ("zero", "wanted"),
    [
        (ZeRO(1), ["_to_copy", "scale_1"]),
        (ZeRO(2), ["_to_copy", "scale_1"]),
        (ZeRO(3), ["_to_copy"]),
        (ZeRO(3, secondary=2), ["_to_copy", "scale_1"]),
    ],
    ids=str,
)
def test_what_is_copied(zero: ZeRO, wanted: list[str]) -> None:
    before = program(zero)
    after = run_passes(before, (HoldCopies(),))
    assert sorted(copied(after)) == sorted(wanted)
    assert_unchanged(before, after, *TENSORS)


def test_readers_read_the_copy() -> None:
    lines = text(run_passes(program(ZeRO(2)), (HoldCopies(),)))
    assert "_to_copy: aten._to_copy.default(weight_1, dtype=torch.bfloat16)" in lines
    assert "mm: aten.mm.default(_to_copy_1, held_1)" in lines or "mm: aten.mm.default(_to_copy_1, held)" in lines


def test_nothing_is_copied_where_no_level_was_asked_for() -> None:
    before = program(None)
    assert HoldCopies().apply(before) is before


def test_a_frozen_parameter_has_no_copy_below_level_3() -> None:
    before = program(ZeRO(2))
    inputs = tuple(replace(item, requires_grad=False) for item in before.signature.inputs)
    before = replace(before, signature=replace(before.signature, inputs=inputs))
    assert copied(HoldCopies().apply(before)) == []
