"""The list of passes as a whole."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

import autopar.compiler
from autopar.compiler import default_passes
from autopar.driver.manager import text_of
from autopar.ir.program import Program
from autopar.kernels.dropout import add_dropout
from autopar.passes.global_.choose_shardings import ChooseShardings
from autopar.passes.global_.find_atoms import FindAtoms
from autopar.passes.global_.insert_reshards import InsertReshards
from autopar.passes.global_.mark_pinned import MarkPinned
from autopar.passes.global_.trace_joint import TraceJoint
from autopar.passes.local.copy_to_stages import CopyToStages
from autopar.passes.local.separate_microbatches import SeparateMicrobatches
from autopar.passes.schedule.hand_out import HandOut
from tests.support.captures import compiled

# What these write is not in the text: keys of nodes, the signature, a schedule's inputs and outputs.
SILENT = {FindAtoms, ChooseShardings, InsertReshards, HandOut}


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


@pytest.mark.parametrize("axes", [{"dp": 1}, {"pp": 2, "dp": 2}], ids=str)
def test_a_pass_with_nothing_to_do_returns_what_it_got(axes: dict[str, int]) -> None:
    found = compiled(Mlp(), axes, {"x": torch.randn(8, 8), "y": torch.randn(8, 8)}).compiled
    steps = [*found.steps, *found.schedule_steps]
    pairs = [(before, after) for before, after in zip(steps, steps[1:], strict=False) if text_of(before.program) == text_of(after.program)]
    again = {after.kind for before, after in pairs if before.program is not after.program}
    assert again <= SILENT
    idle = [after.name for before, after in pairs if before.program is after.program]
    assert {"detach outputs", "views of chunks"} <= set(idle) or "pp" in axes
    assert len(idle) > 20


@dataclass(frozen=True)
class Mark:
    """A pass of somebody else's, right before another: it leaves its mark on the program."""

    follower: type[object]

    @property
    def name(self) -> str:
        return f"before {self.follower.__name__}"

    def apply(self, program: Program) -> Program:
        return replace(program, written=(*program.written, self.name))


def test_what_others_put_between_the_passes_is_seen_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    followers = (TraceJoint, MarkPinned, SeparateMicrobatches, CopyToStages)

    def more(*given: Any, **named: Any) -> tuple[Any, ...]:
        passes = default_passes(*given, **named)
        return tuple(each for one in passes for each in ([Mark(type(one)), one] if isinstance(one, followers) else [one]))

    monkeypatch.setattr(autopar.compiler, "default_passes", more)
    parallel = compiled(Mlp(), {"dp": 2}, {"x": torch.randn(8, 8), "y": torch.randn(8, 8)})
    found = parallel.compiled
    marks = [f"before {each.__name__}" for each in followers]
    assert found.decide_again is not None
    assert list(found.forward.written) == marks[:1]
    assert list(found.local.written) == marks[1:3]  # what forward sets is told of FORWARD alone
    decided, _ = found.decide_again({})
    assert list(decided.written) == marks[1:2]
    assert parallel.verify(x=torch.randn(8, 8), y=torch.randn(8, 8))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + nn.functional.dropout(self.layer(x), 0.5)).square().sum()


def test_the_forward_program_has_what_the_last_forward_pass_wrote() -> None:
    """It is what `verify` runs as FORWARD: a fault of the last fusion is one of the forward passes."""
    batch = {"x": torch.randn(4, 8)}
    parallel = compiled(Residual(), {"dp": 2}, batch, kernels="triton")
    assert add_dropout in {node.target for node in parallel.compiled.forward.graph.nodes}
    report = parallel.verify(**batch, promote=True)
    assert report and report.worst < 1e-12, str(report)
