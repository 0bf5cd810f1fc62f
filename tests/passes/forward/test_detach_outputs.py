"""The loss alone is differentiated where the backward runs inside the call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import CaptureError
from autopar.ir.program import Program
from autopar.passes.forward.detach_outputs import DetachOutputs
from autopar.passes.global_.trace_joint import TraceJoint
from autopar.pipeline.schedules import generate
from tests.support.models.layer import Layer, X, Y, of
from tests.support.programs import assert_close, inputs_of, run_forward

IN_TWO = generate("1f1b", 1, 2)


def in_two(program: Program) -> Program:
    """To run in two microbatches."""
    return replace(program, order=IN_TWO)


def both(layer: Layer, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    predicted = layer.linear(x)
    return {"loss": (predicted - y).square().mean(), "predicted": predicted}


def tangents(program: Program) -> list[str]:
    return [item.name for item in TraceJoint().apply(program).signature.inputs_of("tangent")]


def test_gradients_come_back_through_the_loss_alone() -> None:
    captured = of(both, X, Y, outputs="all")
    assert DetachOutputs().apply(captured) is captured, "one microbatch through one stage"
    detached = DetachOutputs().apply(in_two(captured))
    assert len(tangents(captured)) == 2 and tangents(detached) == [detached.signature.outputs_of("loss")[0].name]
    assert [item.requires_grad for item in detached.signature.outputs] == [item.kind == "loss" for item in detached.signature.outputs]


def test_outputs_that_had_a_gradient_are_told_from_those_that_had_none() -> None:
    captured = of(lambda layer, x, y: {**both(layer, x, y), "same": y * 2, "best": layer.linear(x).argmax(-1)}, X, Y, outputs="all")
    structure = {item.name: item.is_detached for item in DetachOutputs().apply(in_two(captured)).signature.outputs}
    assert list(structure.values()) == [False, True, False, False]


def test_values_are_what_they_were_and_gradients_those_of_the_loss() -> None:
    layer = Layer(both)
    inputs = inputs_of(of(both, X, Y), layer, (X, Y), {})
    found = run_forward(DetachOutputs().apply(in_two(of(both, X, Y, outputs="all"))), inputs)
    wanted = run_forward(of(both, X, Y), inputs)
    predicted = ("output", next(name for kind, name in found if kind == "output"))
    torch.testing.assert_close(found.pop(predicted), layer_of(inputs, X))
    assert_close(found, wanted, 1e-6)


def layer_of(inputs: dict[tuple[str, str], Tensor], x: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, inputs["parameter", "linear.weight"], inputs["parameter", "linear.bias"])


def test_a_model_without_a_loss_is_refused_in_training_only() -> None:
    captured = in_two(of(lambda layer, x: layer.linear(x), X))
    with pytest.raises(CaptureError, match=r"needs a loss to start from, and this model returns none: let it return a scalar or .loss"):
        DetachOutputs(training=True).apply(captured)
    assert DetachOutputs(training=False).apply(captured) is captured


@pytest.mark.parametrize("axes", [{"pp": 2}, {"dp": 2}], ids=str)
def test_a_model_that_trains_nothing_needs_no_loss(axes: dict[str, int]) -> None:
    """A teacher, with gradients on."""
    teacher = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).requires_grad_(False)
    x = torch.randn(4, 4)
    parallel = autopar.compile(teacher, autopar.virtual_mesh(**axes), example_inputs=(x,), backend="eager", num_microbatches=2)
    torch.testing.assert_close(parallel(x), teacher(x))
    teacher[0].requires_grad_(True)
    with pytest.raises(CaptureError, match="needs a loss to start from"):
        parallel(x)


def written(layer: Layer, x: Tensor) -> Tensor:
    found = torch.zeros(len(x), 2)
    found[:, :1] = layer.linear(x)[:, :1]
    return found


def written_through_a_view(layer: Layer, x: Tensor) -> Tensor:
    found = torch.zeros_like(layer.linear(x))
    found.view(-1).copy_(layer.linear(x).flatten())
    return found


@pytest.mark.parametrize("compute", [written, written_through_a_view])
def test_memory_that_is_written_into_is_made_of_what_trains(compute: Callable[[Layer, Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match="needs a loss to start from"):
        DetachOutputs().apply(in_two(of(compute, X)))
    captured = of(lambda layer, x: {"loss": compute(layer, x).square().mean(), "out": compute(layer, x)}, X, outputs="all")
    assert [item.is_detached for item in DetachOutputs().apply(in_two(captured)).signature.outputs] == [False, True]


def test_two_scalars_are_named_where_one_loss_is_needed() -> None:
    captured = of(lambda layer, x: (layer.linear(x).sum(), x, layer.linear(x).mean()), X)
    expected = (
        r'returns 2 scalars \(outputs 0 and 2\), of which none is called loss: let it return \{"loss": \.\.\.\} or an object with \.loss'
    )
    with pytest.raises(CaptureError, match=expected):
        DetachOutputs().apply(in_two(captured))
