"""Many ways to write the same thing, captured as one model and run before and after a rewriting pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from autopar.frontend.capture import capture
from autopar.graph.promote import default_float64, promote
from autopar.ir.fusion import FusionDecision, FusionSite
from autopar.ir.mesh import virtual_mesh
from autopar.ir.program import Program

MESH = virtual_mesh(dp=1)


class Form(Protocol):
    """A way to write something: its name and a model of it, without inputs."""

    @property
    def name(self) -> str: ...

    def module(self) -> nn.Module: ...


class Rewriting(Protocol):
    """A pass that decides and applies."""

    def decide(self, program: Program) -> FusionDecision: ...

    def apply(self, program: Program, decision: FusionDecision) -> Program: ...


class Suite(nn.Module):
    """Many forms in one model, captured at once; `suite_i` is the i-th."""

    def __init__(self, forms: Sequence[Form]) -> None:
        super().__init__()
        for position, form in enumerate(forms):
            self.add_module(f"suite_{position}", form.module())
        self.num_forms = len(forms)

    def forward(self) -> list[Any]:
        return [getattr(self, f"suite_{position}")() for position in range(self.num_forms)]


@dataclass(frozen=True)
class Captured:
    """A suite before and after; what was found, by the name of the form."""

    program: Program
    decision: FusionDecision
    after: Program
    found: dict[str, list[FusionSite]]


@dataclass(frozen=True)
class Ran:
    """What was found, and what a suite computes before and after, exactly and in its own dtype, by the name of the form."""

    found: dict[str, list[FusionSite]]
    exact: dict[str, list[Tensor]]
    exact_after: dict[str, list[Tensor]]
    own: dict[str, list[Tensor]]
    own_after: dict[str, list[Tensor]]


def captured_suite(rewriting: Rewriting, forms: Sequence[Form], suite: nn.Module | None = None) -> Captured:
    program = capture(suite or Suite(forms), (), {}, MESH, outputs="all")
    decision = rewriting.decide(program)
    found: dict[str, list[FusionSite]] = {form.name: [] for form in forms}
    for each in decision.found:
        found[forms[int(each.source.module.removeprefix("suite_"))].name].append(each)
    return Captured(program, decision, rewriting.apply(program, decision), found)


def ran_suite(rewriting: Rewriting, forms: Sequence[Form], training: bool, dtype: torch.dtype) -> Ran:
    """All forms in `dtype`: their outputs, and in training the gradients of their parameters."""
    suite = Suite(forms).to(dtype).train(training).requires_grad_(training)
    captured = captured_suite(rewriting, forms, suite)
    values = values_of(captured.program, suite)
    wide = [value.double() if value.is_floating_point() else value for value in values]
    names = [form.name for form in forms]
    pair = (captured.program, captured.after)
    with default_float64():
        exact, exact_after = (results(promote(each), wide, training, names) for each in pair)
    own, own_after = (results(each, values, training, names) for each in pair)
    return Ran(captured.found, exact, exact_after, own, own_after)


def values_of(program: Program, module: nn.Module) -> list[Tensor]:
    """What the placeholders take."""
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    items = program.signature.inputs
    return [program.constants[item.name] if item.kind == "constant" else state[item.name].detach() for item in items]


def results(program: Program, values: list[Tensor], training: bool, names: Sequence[str]) -> dict[str, list[Tensor]]:
    """By form: its output, and in training the gradients of its parameters, of a weighted sum of all outputs."""
    inputs = program.signature.inputs
    values = [value.clone().requires_grad_(item.requires_grad) for value, item in zip(values, inputs, strict=True)]
    outputs = list(program.module()(*values))
    assert len(outputs) == len(names)
    found = {name: [output.detach()] for name, output in zip(names, outputs, strict=True)}
    if training:
        draw = torch.Generator().manual_seed(3)
        total = sum((out.double() * torch.randn(out.shape, generator=draw, dtype=torch.float64)).sum() for out in outputs)
        trained = [(item.name, value) for item, value in zip(inputs, values, strict=True) if item.requires_grad]
        gradients = torch.autograd.grad(total, [value for _, value in trained], allow_unused=True)  # type: ignore[arg-type]
        for (name, value), gradient in zip(trained, gradients, strict=True):
            place = int(name.split(".")[0].removeprefix("suite_"))
            found[names[place]].append(torch.zeros_like(value) if gradient is None else gradient)
    return found


def targets(program: Program) -> list[Any]:
    return [node.target for node in program.graph.nodes if node.op == "call_function"]
