"""Which calls stand in a layer, and which before, between and behind layers, in the forward and in the backward."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.fx import Node

from autopar.ir.keys import PHASE, SOURCE
from autopar.ir.program import Program
from autopar.recompute.again import computed_again, is_forward
from autopar.recompute.choices import within
from autopar.recompute.segments import segments, segments_of_backward
from tests.support.models.residual import Residual, parallel_residual


def placed(model: nn.Module | None = None) -> Program:
    """As recomputation gets it."""
    steps = parallel_residual(model, dp=1, tp=1).compiled.steps
    return next(step.program for step in steps if step.name == "choose order")


def backward(program: Program) -> list[Node]:
    return [node for node in program.graph.nodes if node.op == "call_function" and PHASE[node] == "backward"]


def order(names: Iterable[str]) -> list[str]:
    """Each time another one begins."""
    found = list(names)
    return [name for name, before in zip(found, [None, *found], strict=False) if name != before]


def test_the_forward_is_all_in_segments() -> None:
    program = placed()
    found = segments(program)
    assert order(found.values()) == ["before the layers", "blocks.0", "blocks.1", "behind blocks.1"]
    assert all(is_forward(node) == (node in found) for node in program.graph.nodes)
    assert {SOURCE[node].module for node, name in found.items() if name == "behind blocks.1"} == {"", "head"}


def test_the_backward_goes_through_them_the_other_way() -> None:
    program = placed()
    found = segments_of_backward(backward(program), list(dict.fromkeys(segments(program).values())))
    assert order(found.values()) == ["behind blocks.1", "blocks.1", "blocks.0", "before the layers"]


class Scaled(Residual):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x).tanh()
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def test_what_stands_between_layers_is_a_segment() -> None:
    program = placed(Scaled().double())
    names = ["before the layers", "blocks.0", "behind blocks.0", "blocks.1", "behind blocks.1"]
    assert order(segments(program).values()) == names
    assert order(segments_of_backward(backward(program), names).values()) == names[::-1]


def test_copies_stand_in_the_segment_that_reads_them() -> None:
    program = placed()
    names = list(dict.fromkeys(segments(program).values()))
    again = computed_again(program, within(program, segments(program)))
    found = segments_of_backward(backward(again), names)
    assert order(found[node] for node in backward(again)) == names[::-1]
