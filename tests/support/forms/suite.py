"""Many ways to write the same thing, captured as one model and run before and after a rewriting pass."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.driver.manager import run_passes
from autopar.frontend.capture import capture
from autopar.graph.promote import default_float64, promote
from autopar.ir.fusion import FusionDecision, FusionSite
from autopar.ir.mesh import virtual_mesh
from autopar.ir.program import Program
from autopar.runtime.execute.random_key import random_key

MESH = virtual_mesh(dp=1)
Shape = tuple[int, ...]
Inputs = tuple[Tensor, ...]


class Rewriting(Protocol):
    """A pass that decides and applies."""

    def decide(self, program: Program) -> FusionDecision: ...

    def apply(self, program: Program, decision: FusionDecision) -> Program: ...


class Operands:
    """What a form computes from: a tensor by name, computed from a parameter of its shape, as a projection would; tables; `training`."""

    def __init__(self, values: dict[str, Tensor], training: bool) -> None:
        self.training = training
        for name, value in values.items():
            setattr(self, name, value)


class Computing(nn.Module):
    """`compute(operands, *inputs)`. `tables` are not trained; what `derive` sets is computed from them."""

    def __init__(
        self,
        compute: Callable[..., Any],
        shapes: Mapping[str, Shape],
        tables: Mapping[str, Tensor] | None = None,
        derive: Callable[[Any], None] | None = None,
    ) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterDict(
            {name: nn.Parameter(torch.randn(shape, generator=draw, dtype=torch.float64)) for name, shape in shapes.items()}
        )
        self.tables = tuple(tables or ())
        for name, table in (tables or {}).items():
            self.register_buffer(name, table.clone())
        self.compute, self.derive = compute, derive

    def forward(self, *inputs: Tensor) -> Any:
        values = {name: weight.asinh() for name, weight in self.weights.items()} | {name: getattr(self, name) for name in self.tables}
        operands = Operands(values, self.training)
        if self.derive is not None:
            self.derive(operands)
        return self.compute(operands, *inputs)


@dataclass(frozen=True)
class Form:
    """A way to write something. `says`: a pattern of what a pass says of each place in it; of a near miss, of a part of the reason."""

    name: str
    compute: Callable[..., Any]
    shapes: Mapping[str, Shape]
    says: tuple[str, ...] = ("",)
    inputs: Callable[[], Inputs] = tuple
    tables: Mapping[str, Tensor] = field(default_factory=dict)
    derive: Callable[[Any], None] | None = None

    @property
    def file(self) -> str:
        """Where its author wrote it."""
        return os.path.basename(self.compute.__code__.co_filename)

    def module(self) -> nn.Module:
        return Computing(self.compute, self.shapes, self.tables, self.derive)


@dataclass(frozen=True)
class Catalogue:
    """Forms of one kind by name, and the near misses."""

    forms: dict[str, Form] = field(default_factory=dict)
    near_misses: dict[str, Form] = field(default_factory=dict)

    def adds(
        self, name: str, shapes: Mapping[str, Shape], says: tuple[str, ...], is_near_miss: bool, **more: Any
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Registers the function that it decorates."""

        def register(compute: Callable[..., Any]) -> Callable[..., Any]:
            assert name not in self.forms and name not in self.near_misses, name
            (self.near_misses if is_near_miss else self.forms)[name] = Form(name, compute, shapes, says, **more)
            return compute

        return register


class Suite(nn.Module):
    """Many forms in one model, captured at once; `suite_i` is the i-th."""

    def __init__(self, forms: Sequence[Form]) -> None:
        super().__init__()
        for position, form in enumerate(forms):
            self.add_module(f"suite_{position}", form.module())
        self.num_forms = len(forms)

    def forward(self, *inputs: Inputs) -> list[Any]:
        return [getattr(self, f"suite_{position}")(*inputs[position]) for position in range(self.num_forms)]


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


def fused(rewriting: Rewriting, module: nn.Module, inputs: tuple[Any, ...] = (), *before: Any) -> tuple[Program, FusionDecision, Program]:
    """`module` captured and taken through the passes `before`, what `rewriting` says of it, and what becomes of it."""
    program = run_passes(capture(module, inputs, {}, MESH, outputs="all"), before)
    decision = rewriting.decide(program)
    return program, decision, rewriting.apply(program, decision)


def captured_suite(rewriting: Rewriting, forms: Sequence[Form], *before: Any) -> Captured:
    return _captured(rewriting, forms, Suite(forms), tuple(form.inputs() for form in forms), before)


def ran_suite(rewriting: Rewriting, forms: Sequence[Form], training: bool, dtype: torch.dtype, *before: Any) -> Ran:
    """All forms in `dtype`: their outputs, and in training the gradients of their parameters."""
    suite = Suite(forms).to(dtype).train(training).requires_grad_(training)
    inputs = tuple(tuple(_as_float(value, dtype) for value in form.inputs()) for form in forms)
    captured = _captured(rewriting, forms, suite, inputs, before)
    values = values_of(captured.program, suite, inputs)
    wide = [_as_float(value, torch.float64) for value in values]
    names = [form.name for form in forms]
    pair = (captured.program, captured.after)
    with default_float64():
        exact, exact_after = (results(promote(each), wide, training, names) for each in pair)
    own, own_after = (results(each, values, training, names) for each in pair)
    return Ran(captured.found, exact, exact_after, own, own_after)


def _captured(
    rewriting: Rewriting, forms: Sequence[Form], suite: nn.Module, inputs: tuple[Inputs, ...], before: tuple[Any, ...]
) -> Captured:
    program, decision, after = fused(rewriting, suite, inputs, *before)
    found: dict[str, list[FusionSite]] = {form.name: [] for form in forms}
    for each in decision.found:
        found[forms[int(each.source.module.removeprefix("suite_"))].name].append(each)
    return Captured(program, decision, after, found)


def _as_float(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def values_of(program: Program, module: nn.Module, inputs: Any = ()) -> list[Tensor]:
    """What the placeholders take."""
    state, batch = dict(module.named_parameters()) | dict(module.named_buffers()), pytree.tree_leaves(inputs)
    found: list[Tensor] = []
    for item in program.signature.inputs:
        if item.kind == "batch":
            found.append(batch[int(item.name)])
        elif item.kind == "random_key":
            found.append(torch.tensor(random_key(7, 0)))
        else:
            found.append(program.constants[item.name] if item.kind == "constant" else state[item.name].detach())
    return found


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
            place = int(name.removeprefix("suite_").split(".")[0]) if name.startswith("suite_") else 0
            found[names[place]].append(torch.zeros_like(value) if gradient is None else gradient)
    return found


def targets(program: Program) -> list[Any]:
    return [node.target for node in program.graph.nodes if node.op == "call_function"]
