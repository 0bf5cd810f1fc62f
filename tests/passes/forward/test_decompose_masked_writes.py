"""Writes by a mask as choices: values and gradients as torch's own, and split over every axis."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import CaptureError
from autopar.frontend.capture import capture
from autopar.ir.mesh import virtual_mesh
from autopar.ir.program import Program
from autopar.passes.forward.decompose_masked_writes import DecomposeMaskedWrites

Write = Callable[[Tensor, Tensor, Tensor], Tensor]


def put(
    value: Callable[[Tensor], Tensor | float],
    *front: slice,
    at: Callable[[Tensor], Tensor] = lambda mask: mask,
    behind: tuple[slice | int, ...] = (),
) -> Write:
    def write(x: Tensor, mask: Tensor, token: Tensor) -> Tensor:
        x[(*front, at(mask), *behind)] = value(token)
        return x

    return write


WRITES: dict[str, Write] = {
    "a row": put(lambda token: token),
    "a number": put(lambda token: token.sum()),
    "a constant": put(lambda token: 0.5),
    "a row of rows": put(lambda token: token[None]),
    "samples": put(lambda token: token, at=lambda mask: mask[:, 0]),
    "positions": put(lambda token: token, slice(None), at=lambda mask: mask[0]),
    "a row for each sample": put(lambda token: token * torch.arange(8.0).view(8, 1, 1), slice(None), at=lambda mask: mask[0]),
    "elements": put(lambda token: token[:1], at=lambda mask: mask[..., None].expand(8, 4, 6)),
    "a mask and a slice": put(lambda token: token, behind=(slice(None),)),
    "a mask and a number": put(lambda token: token[0], behind=(0,)),
    "added": lambda x, mask, token: x.index_put((mask,), token, accumulate=True),
}


class Model(nn.Module):
    def __init__(self, write: Write) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.token, self.write = nn.Linear(6, 6), nn.Parameter(torch.randn(6)), write

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.write(self.inner(x).clone(), mask, self.token).square().mean()


def batch() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {"x": torch.randn(8, 4, 6, generator=draw), "mask": torch.rand(8, 4, generator=draw) > 0.5}


def num_writes(program: Program) -> int:
    return sum("index_put" in str(node.target) for node in program.graph.nodes)


@pytest.mark.parametrize("name", WRITES)
def test_exact_and_split(name: str) -> None:
    model = Model(WRITES[name])
    found = capture(model, (), batch(), virtual_mesh(dp=1))
    # Since torch 2.15 a constant is written by masked_fill.
    assert (
        num_writes(found) == (name != "a constant" or "masked_fill" not in str(found.graph))
        and num_writes(DecomposeMaskedWrites().apply(found)) == 0
    )
    parallel = autopar.compile(model, autopar.virtual_mesh(dp=2, tp=2), example_inputs=batch(), backend="eager")
    assert parallel.verify(**batch()) and "no rank repeats another's work" in parallel.explain()


def test_on_the_default_backend() -> None:
    parallel = autopar.compile(Model(WRITES["a row"]), autopar.virtual_mesh(dp=2, tp=2), example_inputs=batch())
    assert parallel.verify(**batch())


def test_what_is_overwritten_is_seen_by_other_names() -> None:
    def write(x: Tensor, mask: Tensor, token: Tensor) -> Tensor:
        rows = x[:, 1:]
        rows[mask[:, 1:]] = token
        return x

    parallel = autopar.compile(Model(write), autopar.virtual_mesh(dp=2), example_inputs=batch(), backend="eager")
    assert parallel.verify(**batch())


def test_a_copy_lies_in_memory_as_a_choice_does() -> None:
    """torch's has the strides of what it is a copy of, by which forward may view it; a choice has those of the mask."""

    class Copied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.token = nn.Linear(6, 6), nn.Parameter(torch.randn(6))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            written = self.linear(x).transpose(0, 1).index_put((mask,), self.token)
            return written.transpose(0, 1).view(len(x), -1).square().mean()

    given = {"x": torch.randn(8, 4, 6), "mask": torch.rand(4, 8) < 0.5}
    parallel = autopar.compile(Copied(), autopar.virtual_mesh(dp=2), example_inputs=given, backend="eager")
    assert parallel.verify(**given)


def test_what_no_choice_can_say_is_refused_with_its_line() -> None:
    num_rows = int(batch()["mask"].sum())

    def own_values(x: Tensor, mask: Tensor, token: Tensor) -> Tensor:
        return x.index_put((mask,), token.expand(num_rows, 6))

    with pytest.raises(CaptureError, match=r"(?s)depends on .*test_decompose_masked_writes.py.*how to mend it"):
        autopar.compile(Model(own_values), autopar.virtual_mesh(dp=2), example_inputs=batch(), backend="eager")
