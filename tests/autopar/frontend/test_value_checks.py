"""A user's `assert` on values is no branch: it is an output of the program."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.errors import CaptureError
from autopar.frontend.capture import capture
from tests.support.models import asserting
from tests.support.models.asserting import careful
from tests.support.models.layer import MESH, Layer, X, assert_as_model, of
from tests.support.programs import inputs_of, run_forward


def test_an_assert_is_an_output_with_its_text_and_line() -> None:
    program = of(careful, X)
    assert [(item.kind, item.name, item.dtype) for item in program.signature.outputs[1:]] == [
        ("check", "0", torch.int64),
        ("check", "1", torch.int64),
    ]
    first, second = program.signature.checks
    assert first.startswith("x is too large\n") and f"{asserting.__file__}:" in first and "assert (x.abs() < 100).all()" in first
    assert "assert y.mean() < 1e6" in second
    layer = Layer(careful)
    assert_as_model(layer, (X,), {})
    inputs = inputs_of(program, layer, (X,), {})
    found = run_forward(program, inputs | {("batch", "0"): torch.cat([X[:6], torch.full((2, 4), 1e9)])})
    assert found["check", "0"] == 8 and found["check", "1"] in (0, 1)


def test_an_assertion_without_a_text_is_kept() -> None:
    def compute(layer: Layer, x: Tensor) -> Tensor:
        torch._assert_async((x.abs() < 100).all())
        return layer.linear(x).sum()

    program = of(compute, X)
    (text,) = program.signature.checks
    assert text.startswith("an assertion on a tensor does not hold\n") and f"{__file__}:" in text
    found = run_forward(program, inputs_of(program, Layer(compute), (X,), {}) | {("batch", "0"): torch.full_like(X, 1e9)})
    assert found["check", "0"] == X.numel()


def test_all_is_counted_where_the_values_are() -> None:
    program = of(careful, X)
    assert not list(program.graph.find_nodes(op="call_function", target=torch.ops.aten.all.default))


def test_a_branch_that_is_no_assert_is_refused_as_before() -> None:
    def compute(layer: Layer, x: Tensor) -> Tensor:
        if (x > 100).any():
            raise ValueError("too large")
        return layer.linear(x).sum()

    with pytest.raises(CaptureError, match=r"if \(x > 100\)\.any\(\)"):
        capture(Layer(compute), (X,), {}, MESH)
