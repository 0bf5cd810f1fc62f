"""What a `cat` with empty tensors becomes, against the model's own values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.frontend.capture import capture
from autopar.ir.mesh import virtual_mesh
from autopar.ir.program import Program
from autopar.passes.forward.drop_empty_parts import DropEmptyParts

aten = torch.ops.aten

Body = Callable[[Tensor, Tensor], Tensor]


class Model(nn.Module):
    """`body` of its parameter [2, 3, 4], transposed, and of an empty tensor."""

    def __init__(self, body: Body, empty: tuple[int, ...] = (0,)) -> None:
        super().__init__()
        self.weight, self.body, self.empty = nn.Parameter(torch.randn(2, 4, 3, dtype=torch.float64)), body, empty

    def forward(self) -> Tensor:
        return self.body((self.weight * 2.0).transpose(1, 2), torch.empty(self.empty, dtype=torch.float64)) * 1.5


def dropped(body: Body, empty: tuple[int, ...] = (0,)) -> tuple[Program, list[Any]]:
    """The program without empty parts, found to compute what the model does, and its ops."""
    torch.manual_seed(0)
    model = Model(body, empty)
    program = DropEmptyParts().apply(capture(model, (), {}, virtual_mesh(dp=1), outputs="all"))
    (got,), wanted = program.module()(model.weight), model()
    assert torch.equal(got, wanted)
    ours, theirs = (torch.autograd.grad(value.square().sum(), model.weight)[0] for value in (got, wanted))
    assert torch.equal(ours, theirs)
    return program, [node.target for node in program.graph.nodes if node.op == "call_function"]


GONE: dict[str, tuple[Body, tuple[int, ...]]] = {
    "in front": (lambda x, empty: torch.cat((empty, x), dim=-2), (0,)),
    "behind, of a shape": (lambda x, empty: torch.cat((x, empty), dim=1), (2, 0, 4)),
    "two": (lambda x, empty: torch.cat((empty, x, empty), dim=0), (0,)),
    "viewed below": (lambda x, empty: torch.cat((empty, x)).unsqueeze(0).view(6, 4).view(-1), (0,)),
}


@pytest.mark.parametrize("name", list(GONE))
def test_a_cat_with_nothing_is_its_operand(name: str) -> None:
    _, ops = dropped(*GONE[name])
    assert not {aten.cat.default, aten.clone.default, aten.empty.memory_format} & set(ops)


def test_what_is_not_empty_stays_together() -> None:
    program, ops = dropped(lambda x, empty: torch.cat((x, empty, x + 1.0), dim=1))
    assert ops.count(aten.cat.default) == 1
    (cat,) = (node for node in program.graph.nodes if node.target is aten.cat.default)
    assert len(cat.all_input_nodes) == 2


def _written(x: Tensor, empty: Tensor) -> Tensor:
    whole = torch.cat((empty, x))
    whole[0].mul_(3.0)
    return whole + x


def _operand_written(x: Tensor, empty: Tensor) -> Tensor:
    whole = torch.cat((empty, x))
    x.mul_(3.0)
    return whole + x


COPIED: dict[str, Body] = {
    "written in place": _written,
    "its operand is written": _operand_written,
    "its layout is read": lambda x, empty: torch.cat((empty, x)).as_strided((24,), (1,)),
}


@pytest.mark.parametrize("name", list(COPIED))
def test_memory_that_counts_is_kept(name: str) -> None:
    _, ops = dropped(COPIED[name])
    assert aten.cat.default not in ops and aten.clone.default in ops


def test_an_empty_tensor_counts_in_the_dtype() -> None:
    _, ops = dropped(lambda x, empty: torch.cat((empty, x.float())))
    assert aten.cat.default in ops


def test_nothing_at_all_stays() -> None:
    _, ops = dropped(lambda x, empty: x + torch.cat((empty, empty)).sum())
    assert aten.cat.default in ops
