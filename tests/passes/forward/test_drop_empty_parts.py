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
from tests.support.captures import compiled

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
    "of one": (lambda x, empty: torch.cat([x], dim=1), (0,)),
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


def _one_written(x: Tensor, empty: Tensor) -> Tensor:
    whole = torch.cat([x])
    whole.mul_(3.0)
    return whole + x


COPIED: dict[str, Body] = {
    "of one, written in place": _one_written,
    "written in place": _written,
    "its operand is written": _operand_written,
    "its layout is read": lambda x, empty: torch.cat((empty, x)).as_strided((24,), (1,)),
}


@pytest.mark.parametrize("name", list(COPIED))
def test_memory_that_counts_is_kept(name: str) -> None:
    _, ops = dropped(COPIED[name])
    assert aten.cat.default not in ops and aten.clone.default in ops


class Beside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x).square().mean(), torch.cat([x])


class Packed(nn.Module):
    """As `einops.pack` and `unpack` lay samples and heads in one dim around an attention."""

    def __init__(self, pack: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.pack = nn.Linear(8, 16), nn.Linear(4, 8), pack

    def forward(self, x: Tensor) -> Tensor:
        q = self.first(x).unflatten(2, (4, 4)).transpose(1, 2)
        packed = self.pack(q.reshape(-1, *q.shape[2:]))
        packed = (packed @ packed.mT).softmax(-1) @ packed
        return self.last(packed.view(q.shape)).square().mean()


PACKS: dict[str, Callable[[Tensor], Tensor]] = {
    "cat": lambda x: torch.cat([x], dim=0),
    "vstack": lambda x: torch.vstack([x]),
    "one chunk": lambda x: x.chunk(1)[0],
    "one part, asked to be longer": lambda x: torch.cat(x.split(64)),
}


@pytest.mark.parametrize("name", list(PACKS))
def test_samples_are_split_through_a_cat_of_one(name: str) -> None:
    torch.manual_seed(0)
    model, x = Packed(PACKS[name]), torch.randn(8, 6, 8)
    for mesh, number in (({"pp": 2}, 2), ({"dp": 4}, 1)):
        parallel = compiled(model, mesh, (x,), num_microbatches=number)
        assert parallel.verify(x, promote=True).worst <= 1e-9
        assert parallel.summary()["flops_split"] == 1.0


def test_a_cat_of_an_input_is_a_tensor_of_its_own() -> None:
    x = torch.randn(8, 8)
    seen = compiled(Beside(), {"dp": 2}, (x,), outputs="all")(x)[1]
    assert torch.equal(seen, x) and seen.data_ptr() != x.data_ptr()


def test_an_empty_tensor_counts_in_the_dtype() -> None:
    _, ops = dropped(lambda x, empty: torch.cat((empty, x.float())))
    assert aten.cat.default in ops


def test_nothing_at_all_stays() -> None:
    _, ops = dropped(lambda x, empty: x + torch.cat((empty, empty)).sum())
    assert aten.cat.default in ops
