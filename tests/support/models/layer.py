"""A one-layer model that computes what a test says, and its capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autopar.frontend.capture import capture
from autopar.ir.mesh import virtual_mesh
from autopar.ir.program import Program
from autopar.passes.global_.trace_joint import TraceJoint
from tests.support.programs import Values, assert_close, inputs_of, run, run_forward

MESH = virtual_mesh(dp=2)
X, Y = torch.randn(8, 4), torch.randn(8, 4)


class Layer(nn.Module):
    """`compute(self, *args)` over a 4 × 4 linear layer."""

    def __init__(self, compute: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.compute = compute

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.compute(self, *args, **kwargs)


class Calls(nn.Module):
    """No parameters: one call of `function`."""

    def __init__(self, function: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> object:
        return self.function(x)


def of(compute: Callable[..., Any], *args: Any, **options: Any) -> Program:
    return capture(Layer(compute), args, {}, MESH, **options)


def assert_as_model(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], program: Program | None = None) -> None:
    """The FORWARD program, and the traced one, give the model's loss and gradients."""
    program = program or capture(model, args, kwargs, MESH)
    inputs = inputs_of(program, model, args, kwargs)
    output = model(*args, **kwargs)
    loss = getattr(output, "loss", output)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss, [model.get_parameter(name) for name in names], allow_unused=True)
    wanted = {("loss", "0"): loss.detach()} | {
        ("gradient", name): value for name, value in zip(names, gradients, strict=True) if value is not None
    }
    assert_close(but_checks(run_forward(program, inputs)), wanted, 1e-6)
    joint = TraceJoint().apply(program)
    assert_close(but_checks(run(joint, inputs_of(joint, model, args, kwargs))), wanted, 1e-6)


def but_checks(values: Values) -> Values:
    """What a program gives to its caller; of what it asserts nothing is violated."""
    assert not any(value.item() for (kind, _), value in values.items() if kind == "check"), values
    return {key: value for key, value in values.items() if key[0] != "check"}
