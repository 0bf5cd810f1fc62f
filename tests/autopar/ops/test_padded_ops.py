"""What grows an op, and what is known of the padding of its results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node

import autopar.kernels.dropout  # noqa: F401 (it registers ops, as the next does)
import autopar.kernels.gated  # noqa: F401
from autopar.ir.keys import DIMS
from autopar.ir.padding import Padding
from autopar.ops.localise import LocalBuilder
from autopar.ops.padded_ops import can_grow, inside, keeps_clean, mask, pad, unpad, with_atoms
from autopar.ops.strategies import space_of
from autopar.testing.prove import instance
from tests.support.graphs import traced
from tests.support.graphs import with_atoms as with_dims

aten = torch.ops.aten
HEADS = Padding(((4,), (2, 3, 2)), ((4,), (2, 4, 2)))


def run(builder: LocalBuilder, result: Node, *tensors: Tensor) -> Tensor:
    builder.graph.output(result)
    return torch.fx.Interpreter(torch.fx.GraphModule(torch.nn.Module(), builder.graph)).run(*tensors)


def test_padding_and_cutting_are_those_of_whole_values() -> None:
    whole = torch.randn(4, 12)
    builder = LocalBuilder(Graph())
    assert torch.equal(run(builder, pad(builder.placeholder("x", (4, 12), torch.float32), HEADS, builder), whole), HEADS.pad(whole))
    builder = LocalBuilder(Graph())
    assert torch.equal(run(builder, unpad(builder.placeholder("x", (4, 16), torch.float32), HEADS, builder), HEADS.pad(whole)), whole)


@pytest.mark.parametrize(
    ("kind", "dtype", "other"),
    [("sum", torch.float32, 0), ("max", torch.float32, -float("inf")), ("max", torch.int32, -(2**31)), ("max", torch.bool, False)],
)
def test_a_mask_leaves_what_the_reduction_passes_over(kind: str, dtype: torch.dtype, other: float) -> None:
    grown = torch.full((4, 16), float("nan")).to(dtype) if dtype.is_floating_point else torch.ones(4, 16, dtype=dtype)
    builder = LocalBuilder(Graph())
    x = builder.placeholder("x", (4, 16), dtype)
    found = run(builder, mask(x, inside(HEADS, 2, builder), HEADS.after, 2, kind, builder), grown)  # type: ignore[arg-type]
    atoms = found.view(4, 2, 4, 2)
    assert found.dtype == dtype and (atoms[:, :, 3] == other).all()
    assert torch.equal(HEADS.unpad(found).isnan(), HEADS.unpad(grown).isnan())


def test_ranges_grow_over_one_atom_only() -> None:
    program = with_dims(traced(lambda x: aten.add.Tensor(x, aten.arange.default(6)), torch.randn(2, 6)))
    (node,) = program.graph.find_nodes(op="call_function", target=aten.arange.default)
    assert can_grow(node, ((6,),)) and not can_grow(node, ((2, 3),))


@pytest.mark.parametrize(
    ("name", "clean", "expected"),
    [
        ("mul.Tensor", {0, 1}, True),
        ("mul.Tensor", {0}, False),  # 0 · ∞
        ("add.Tensor", {0, 1}, True),
        ("add.Tensor", {1}, False),
        ("div.Tensor", {0, 1}, False),  # 0 / 0
        ("sub.Tensor", {0, 1}, True),
        ("maximum.default", {0, 1}, False),  # it is not known to be zero
    ],
)
def test_what_is_zero_in_the_padding_of_a_result(name: str, clean: set[int], expected: bool) -> None:
    packet, overload = name.split(".")
    target = getattr(getattr(aten, packet), overload)
    program = with_dims(traced(lambda x, y: target(x, y), torch.randn(4, 6), torch.randn(4, 6)))
    (node,) = program.graph.find_nodes(op="call_function", target=target)
    assert DIMS[node] == (((4,), (6,)),)
    assert keeps_clean(node, space_of(node), 0, 1, lambda operand, place: place == 1 and operand in clean) is expected


@pytest.mark.parametrize(
    ("name", "activation", "shapes", "clean", "expected"),
    [
        ("gated", "silu", ((4, 6), (4, 6)), {0, 1}, True),
        ("gated", "sigmoid", ((4, 6), (4, 6)), {0, 1}, True),
        ("gated", "silu", ((4, 6), (4, 6)), {1}, False),  # ∞ · 0
        ("gated", "silu", ((4, 6), (4, 6)), {0}, False),
        ("gated_backward", "gelu", ((4, 6), (4, 6), (4, 6)), {0, 1, 2}, True),
        ("gated_backward", "gelu", ((4, 6), (4, 6), (4, 6)), {1, 2}, False),
        ("bias_activation", "gelu", ((4, 6), (6,)), {0, 1}, True),
        ("bias_activation", "gelu", ((4, 6), (6,)), {0}, False),
        ("bias_activation", "sigmoid", ((4, 6), (6,)), {0, 1}, False),  # one half
        ("bias_activation_backward", "sigmoid", ((4, 6), (4, 6), (6,)), {0, 1, 2}, True),
    ],
)
def test_what_is_zero_in_the_padding_of_gates(
    name: str, activation: str, shapes: tuple[tuple[int, ...], ...], clean: set[int], expected: bool
) -> None:
    node = instance(getattr(torch.ops.autopar, name).default, *map(torch.empty, shapes), activation=activation)
    assert keeps_clean(node, space_of(node), 0, 1, lambda operand, _: operand in clean) is expected


@pytest.mark.parametrize(
    ("name", "clean", "expected"), [("dropout", {0}, True), ("add_dropout", {0, 1}, True), ("add_dropout", {0}, False)]
)
def test_what_is_dropped_of_zero_is_zero(name: str, clean: set[int], expected: bool) -> None:
    positions = [torch.zeros(shape, dtype=torch.int64) for shape in ((4, 1), (4, 1), (6,))]
    values = [torch.randn(4, 6)] * (2 if name == "add_dropout" else 1)
    options = {"keep_below": 2**31, "scale": 2.0} | ({"dtype": torch.float32} if name == "dropout" else {})
    node = instance(getattr(torch.ops.autopar, name).default, *values, *positions, **options)
    # Positions are of the elements outside, too: that they are zero is not known.
    assert keeps_clean(node, space_of(node), 0, 1, lambda operand, _: operand in clean) is expected


def test_sizes_are_replaced_by_position() -> None:
    assert with_atoms(((2, 3), (), (5,)), {1: 4, 2: 6}) == ((2, 4), (), (6,))
