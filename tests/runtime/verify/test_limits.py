"""What errors may be follows from what rounding does to the original itself, and what is wrong is told from that."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopar
from autopar.ir.program import operands
from autopar.runtime.verify.compare_forms import verify_compiled
from autopar.runtime.verify.limits import Limits
from autopar.runtime.verify.report import Report
from tests.support.faults.compiled import first

aten = torch.ops.aten


def test_in_a_lower_dtype_gradients_may_be_off_by_what_that_takes_them_from_the_original() -> None:
    limits = Limits.of(torch.bfloat16, None)
    assert (limits.tolerance, limits.gradients, limits.floor) == (0.0625, 0.0625, 0.0625)
    assert limits.beside(0.01, 0.0).gradients == 0.0625 and limits.beside(0.1, 0.0).gradients == 0.2
    # No farther than rounding explains, whatever was measured.
    assert limits.beside(0.9, 0.0).gradients == limits.beside(math.nan, 0.0).gradients == limits.casts == 4 * 2**-3.5
    assert Limits.of(torch.bfloat16, 1e-3).beside(0.1, 0.0, {"w": 0.2}) == replace(Limits.of(torch.bfloat16, 1e-3), cast_loss_error=0.0)
    # One that is behind a relu is off by more than all together, and by as much again where it is computed by others.
    limits = limits.beside(0.02, 0.0, {"relu.weight": 0.07, "other.weight": 0.02})
    assert (limits.gradients, limits.by_gradient) == (0.0625, {"relu.weight": 0.14})
    options: dict[str, Any] = {"tolerance": limits.tolerance, "gradient_limits": limits.by_gradient}
    assert Report(0.0, {"relu.weight": 0.08, "other.weight": 0.06}, **options)
    assert not Report(0.0, {"relu.weight": 0.15}, **options) and not Report(0.0, {"other.weight": 0.08}, **options)
    for dtype in (torch.float32, torch.float64):
        assert not Limits.of(dtype, None).is_low


def test_a_gradient_may_be_off_by_four_times_what_rounding_takes_it_from_the_original() -> None:
    limits = Limits.of(torch.float32, None).beside_rounding({"a": 2e-3, "b": 2e-5, "c": 0.5, "d": math.inf, "e": math.nan})
    assert limits.by_gradient == {"a": 8e-3, "c": pytest.approx(0.1)} and limits.gradients == limits.tolerance == 1e-4
    finer = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    assert Limits.of(torch.float64, 1e-9).beside_rounding({"a": 2.0, "b": 0.1}, finer).by_gradient == {"a": pytest.approx(8 * finer)}


def test_one_that_is_nothing_but_rounding_may_be_off_by_more() -> None:
    limits = Limits.of(torch.float32, None).beside_rounding({"a": 2e-3, "b": 2e-3, "c": 2e-4}, vanishing=["a", "c"])
    assert limits.by_gradient == {"a": pytest.approx(0.1), "b": 8e-3, "c": pytest.approx(0.0128)}


class Amplified(nn.Module):
    """A norm over nearly equal rows: the gradient of the bias in front is a sum of large numbers that is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        nn.init.normal_(self.inner.weight, std=1e-3)
        nn.init.constant_(self.norm.weight, 50.0)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.norm(self.inner(x)))), labels)


def test_what_a_norm_amplifies_is_no_difference_and_what_is_wrong_is_one() -> None:
    torch.manual_seed(0)
    model, call = Amplified(), {"x": 1e-2 * torch.randn(32, 16), "labels": torch.randint(0, 4, (32,))}
    parallel = autopar.compile(model, autopar.virtual_mesh(dp=2), example_inputs=call, backend="eager")
    report = parallel.verify(**call)
    assert report and report.worst > report.tolerance and "inner.bias" in report.gradient_limits, str(report)
    assert report.gradient_limits["inner.bias"] == pytest.approx(0.1) and report.gradient_limits["inner.weight"] < 1e-3
    assert "farther off than 0.0001, as rounding takes the original's own" in str(report) and "allowed of inner.bias" in str(report)
    assert not parallel.verify(**call, tolerance=report.tolerance), "a tolerance that was asked for is that of all"
    promoted = parallel.verify(**call, promote=True)
    assert promoted, str(promoted)

    program = parallel.compiled.local.copy()
    slope = first(program, lambda node: node.target is aten.tanh_backward.default)
    slope.replace_all_uses_with(operands(slope)[0])
    broken = verify_compiled(model, parallel.compiled.with_forms(local=program), (), call)
    assert not broken and broken.first_difference is not None and broken.gradient_errors["inner.weight"] > 0.01, str(broken)


class OneDtype(torch.autograd.Function):
    """As a kernel that has one dtype alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.float32
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return 2 * gradients[0]


class OfOneDtype(Amplified):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        doubled: Any = OneDtype.apply(self.inner(x))
        return F.cross_entropy(self.head(torch.tanh(doubled)), labels)


def test_what_cannot_run_in_float64_is_judged_without() -> None:
    torch.manual_seed(0)
    model, call = OfOneDtype(), {"x": torch.randn(32, 16), "labels": torch.randint(0, 4, (32,))}
    nn.init.normal_(model.inner.weight)
    parallel = autopar.compile(model, autopar.virtual_mesh(dp=2), example_inputs=call, backend="eager")
    assert parallel.verify(**call)
    program = parallel.compiled.local.copy()
    slope = first(program, lambda node: node.target is aten.tanh_backward.default)
    slope.replace_all_uses_with(operands(slope)[0])
    assert not verify_compiled(model, parallel.compiled.with_forms(local=program), (), call)


class Keys(nn.Module):
    """T5's softmax, whose key bias has a gradient that is zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key = (each(x).view(4, 8, 2, 8).transpose(1, 2) for each in (self.query, self.key))
        scores = query @ key.transpose(2, 3)
        return (F.softmax(scores.float(), dim=-1).type_as(scores) @ key.detach()).square().mean()


def test_what_cancels_is_measured_by_the_dtype_that_rounds() -> None:
    torch.manual_seed(0)
    x, parallel = torch.randn(4, 8, 16).double(), autopar.compile(Keys().double(), autopar.virtual_mesh(dp=2, tp=2), backend="eager")
    report = parallel.verify(x)
    assert report and report.tolerance == 1e-4, report
    assert Limits.of(torch.float32, None).floor == 1e-3 and Limits.of(torch.float64, None).floor == 1e-6
