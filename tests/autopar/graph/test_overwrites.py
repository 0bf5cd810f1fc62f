"""Who writes whose memory, and who else would read it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Node

from autopar.frontend.capture import capture
from autopar.graph.overwrites import between, is_last_reader, memory_of, overwritten, sources_of, writers_of
from autopar.ir.mesh import virtual_mesh
from autopar.ir.program import Program

aten = torch.ops.aten


class Computing(torch.nn.Module):
    """`compute(x)` of a fresh x [4, 6]."""

    def __init__(self, compute: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 6))
        self.compute = compute

    def forward(self) -> Any:
        return self.compute(self.weight.exp())


def program_of(compute: Callable[..., Any]) -> Program:
    return capture(Computing(compute).requires_grad_(False), (), {}, virtual_mesh(dp=1), outputs="all")


def call(program: Program, target: Any) -> Node:
    (found,) = program.graph.find_nodes(op="call_function", target=target)
    return found


def halves(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return first.relu_() + second


def one_half_twice(x: torch.Tensor) -> torch.Tensor:
    chunks = torch.split(x, 3, -1)
    return chunks[0].relu_() + torch.select(x, 1, 0).sum()


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (lambda x: x.relu_(), True),
        (lambda x: x.view(24).relu_(), True),
        (lambda x: x[:, :3].relu_() + 1, True),
        (halves, True),
        (one_half_twice, False),
        (lambda x: x.view(24).relu_().sum() + x.sum(), False),
        (lambda x: x[:, :3].relu_() + x[:, 3:], False),
    ],
    ids=["fresh", "a view", "a slice", "one of two chunks", "a chunk of what is read", "read below its view", "two slices"],
)
def test_the_last_reader(compute: Callable[..., Any], expected: bool) -> None:
    writer = call(program_of(compute), aten.relu_.default)
    assert is_last_reader(writer, writer.all_input_nodes[0]) is expected


def test_inputs_are_read_by_all() -> None:
    program = program_of(lambda x: x.sum())
    exponential = call(program, aten.exp.default)
    assert not is_last_reader(exponential, exponential.all_input_nodes[0])


def test_what_is_written_between() -> None:
    def compute(x: torch.Tensor) -> torch.Tensor:
        y = x.view(24).sin()
        x.view(24).add_(1.0)
        return y * x.view(24)

    program = program_of(compute)
    (writer,) = writers_of(program.graph)
    x, y, product = (call(program, target) for target in (aten.exp.default, aten.sin.default, aten.mul.Tensor))
    assert writer.target is aten.add_.Tensor and memory_of(writer.all_input_nodes[0]) is x and memory_of(y) is y
    assert overwritten([x], product, (writer,)) is writer and overwritten([y], product, (writer,)) is None
    assert overwritten([x], product, (writer,), own=(writer,)) is None and overwritten([x], y, (writer,)) is None


def test_ways_between_two_values() -> None:
    program = program_of(lambda x: (x.sin() * x.cos()).sum() + x.tan().sum())
    x, sine, cosine, product, tangent = (
        call(program, target) for target in (aten.exp.default, aten.sin.default, aten.cos.default, aten.mul.Tensor, aten.tan.default)
    )
    assert between(x, product) == {x, sine, cosine, product} and between(sine, product) == {sine, product}
    assert between(tangent, product) == set() and between(x, x) == {x}
    assert sources_of([product]) == {*x.all_input_nodes, x, sine, cosine, product}
