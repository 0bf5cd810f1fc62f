"""Which sizes are padded, and which are left alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from autopar.ir.mesh import Mesh
from autopar.ir.padding import Padding
from autopar.ir.program import Program
from autopar.passes.global_.pad_atoms import PadAtoms
from tests.support.graphs import assert_unchanged, traced, with_atoms

aten = torch.ops.aten


@dataclass(frozen=True)
class Placed:
    padding: Padding | None


def projection(size: int, width: int = 64, **axes: int) -> Program:
    """x @ w, and a softmax over the 16 rows of x."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        return aten.mul.Tensor(aten.mm.default(x, w), 2.0)

    tensors = torch.randn(16, width), torch.randn(width, size)
    return with_atoms(traced(function, *tensors, mesh=Mesh(tuple(axes.items())), parameters=(1,)))


def sizes(program: Program, chosen: PadAtoms | None = None) -> dict[str, tuple[tuple[int, ...], ...]]:
    return {name: padding.after for name, padding in (chosen or PadAtoms()).decide(program).paddings.items()}


@pytest.mark.parametrize(
    ("size", "axes", "grown"),
    [
        (97, {"tp": 2}, 98),
        (97, {"tp": 4}, 100),
        (97, {"dp": 2, "tp": 4}, 100),
        (97, {"dp": 4}, None),
        (96, {"tp": 4}, None),
        (98, {"tp": 4}, None),  # sub-axes
        (3, {"tp": 4}, 4),
        (5, {"tp": 4}, None),  # 8 would be too many
        (97, {"tp.0": 2, "tp.1": 2}, 100),
    ],
)
def test_a_size_with_no_factor_in_common_with_the_ranks_is_padded(size: int, axes: dict[str, int], grown: int | None) -> None:
    assert sizes(projection(size, **axes)) == ({"1": ((64,), (grown,))} if grown else {})


def test_what_ops_reduce_whole_is_left_alone() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return aten._softmax.default(aten.mm.default(x, w), 1, False)

    program = with_atoms(traced(function, torch.randn(16, 8), torch.randn(8, 97), parameters=(1,)))
    assert sizes(program) == {}


def test_what_does_no_work_is_left_alone() -> None:
    """A table that is looked up only, and a small product beside a large one."""

    def function(ids: Tensor, table: Tensor, w: Tensor, v: Tensor) -> list[Tensor]:
        found = aten.embedding.default(table, ids)
        return [aten.mm.default(found, w), aten.mm.default(found, v)]

    tensors = torch.arange(16), torch.randn(97, 64), torch.randn(64, 4096), torch.randn(64, 3)
    program = with_atoms(traced(function, *tensors, parameters=(1, 2, 3)))
    assert sizes(program) == {}
    assert sizes(program, PadAtoms(least=0.0)) == {"3": ((64,), (4,))}


def test_the_users_sizes_are_left_alone() -> None:
    """17 positions and 63 channels of the batch, though parameters have them, too."""

    def function(x: Tensor, w: Tensor, position: Tensor) -> Tensor:
        return aten.mm.default(aten.add.Tensor(x, position), w)

    program = with_atoms(traced(function, torch.randn(17, 63), torch.randn(63, 64), torch.randn(17, 63), parameters=(1, 2)))
    assert sizes(program) == {}


def heads() -> Program:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return aten._softmax.default(aten.view.default(aten.mm.default(x, w), [16, 3, 8]), -1, False)

    return with_atoms(traced(function, torch.randn(16, 64), torch.randn(64, 24), parameters=(1,)))


def test_on_real_ranks_only_whole_dims_along_one_axis() -> None:
    assert sizes(heads()) == {"1": ((64,), (4, 8))} and sizes(heads(), PadAtoms(is_real=True)) == {}
    assert sizes(projection(97, tp=2), PadAtoms(is_real=True)) == {"1": ((64,), (98,))}
    assert sizes(projection(97, width=2, tp=4), PadAtoms(is_real=True)) == {}, "the axis is broken into two for the other dim"


def test_what_is_placed_stays_as_it_is() -> None:
    unpadded, more = Placed(None), Placed(Padding(((64,), (97,)), ((64,), (104,))))
    assert sizes(projection(97, tp=4), PadAtoms({"1": unpadded})) == {}
    assert sizes(projection(97, tp=4), PadAtoms({"1": more})) == {"1": ((64,), (104,))}
    assert sizes(projection(97, tp=16), PadAtoms({"1": more})) == {"1": ((64,), (112,))}, "104 does not divide"
    assert sizes(projection(96, tp=4), PadAtoms({"1": more})) == {}, "another parameter"


def test_apply_keeps_values_and_counts_the_padding() -> None:
    program = projection(3, tp=2)
    decision = PadAtoms().decide(program)
    assert str(decision) == "1: ((64,), (3,)) → ((64,), (4,))"
    padded = PadAtoms().apply(program, decision)
    assert_unchanged(program, padded, torch.randn(16, 64), torch.randn(64, 3).round())
    assert padded.logical_share == pytest.approx(3 / 4)
    assert padded.signature.inputs[1] == replace(program.signature.inputs[1], padding=decision.paddings["1"])
    assert PadAtoms().apply(program, PadAtoms().decide(projection(4, tp=2))) is program
