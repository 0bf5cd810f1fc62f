"""Errors measure what they should, and a report says it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from autopar.runtime.verify.limits import floor_of, own_tolerance
from autopar.runtime.verify.report import Difference, Report, error_of, norm

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("value", "wanted", "expected"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 4.5], [3.0, 4.0], 0.1),
        ([NAN, 1.0], [NAN, 1.0], 0.0),
        ([NAN, 1.0], [0.0, 1.0], INF),
        ([0.0, 1.0], [NAN, 1.0], INF),
        ([-INF, 2.0], [-INF, 1.0], 1.0),
        ([INF, 1.0], [-INF, 1.0], INF),
        ([-3.4e38, 2.0], [-3.4e38, 1.0], 1.0),
        ([-3.4e38, 1.0], [0.0, 1.0], INF),
        ([1e-20, 0.0], [0.0, 0.0], INF),
        ([], [], 0.0),
    ],
)
def test_errors_of_floats(value: list[float], wanted: list[float], expected: float) -> None:
    assert error_of(torch.tensor(value), torch.tensor(wanted)) == pytest.approx(expected)


def test_a_value_that_is_zero_by_cancellation_is_measured_by_the_floor() -> None:
    for dtype, expected in ((torch.float64, 1e-11), (torch.float32, 1e-14), (torch.bfloat16, 1e-14)):
        noise, zero = torch.tensor([1e-17], dtype=dtype), torch.tensor([2e-17], dtype=dtype)
        assert error_of(noise, zero) == pytest.approx(0.5, rel=1e-2)
        assert error_of(noise, zero, floor_of(dtype) * 1.0) == pytest.approx(expected, rel=1e-2)


def test_errors_of_integers_are_the_share_that_differs() -> None:
    assert error_of(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5])) == 0.25
    assert error_of(torch.tensor([True, False]), torch.tensor([True, True])) == 0.5
    # As floats these two are equal.
    assert error_of(torch.tensor([2**60 + 1]), torch.tensor([2**60])) == 1.0


def test_what_is_not_computed_counts_as_zeros() -> None:
    gradient = torch.tensor([3.0, 4.0])
    assert error_of(None, gradient, 1.0) == 1.0 and error_of(gradient, None, 10.0) == 0.5
    assert error_of(None, torch.zeros(2), 1.0) == 0.0 and error_of(None, None) == 0.0
    assert error_of(torch.zeros(2, 1), torch.zeros(1, 2)) == INF


def test_norms_leave_masks_out() -> None:
    assert norm(torch.tensor([3.0, 4.0, -INF, NAN, -3.4e38])) == 5.0
    assert norm(torch.tensor([3, 4])) == 0.0


def test_a_report_is_truthy_when_all_errors_are_within_tolerance() -> None:
    def report(**changes: object) -> Report:
        known: dict[str, object] = {"loss_error": 0.0, "gradient_errors": {"w": 1e-10}, "tolerance": 1e-9}
        return Report(**(known | changes))  # type: ignore[arg-type]

    assert report()
    assert not report(loss_error=1e-8) and not report(loss_error=NAN)
    assert not report(gradient_errors={"v": 0.0, "w": NAN}) and not report(gradient_errors={"w": 1e-8})
    assert not report(buffer_errors={"b": 1.0}) and not report(replica_errors={"loss 0": 1.0})
    assert not report(first_difference=Difference("mm", "", "lower", 1.0))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-4), (torch.float32, 1e-4), (torch.bfloat16, 0.0625)])
def test_what_is_asked_for_is_what_the_dtype_can_give(dtype: torch.dtype, tolerance: float) -> None:
    assert own_tolerance(dtype) == tolerance
    text = str(Report(0.5, {}, tolerance, narrowest=dtype))
    assert ("bfloat16 in part" in text) == ("promote=True compares without" in text) == (dtype == torch.bfloat16)
    assert "promote=True" not in str(Report(0.0, {}, tolerance, narrowest=dtype)), "there is nothing to explain"


def test_a_report_reads_verdict_first_and_the_worst_five() -> None:
    difference = Difference("mm_3", "model.py:7 in h.0", "lower", 0.25, "ranks 0 and 1 should hold the same")
    errors = {f"layer.{index}": index * 1e-3 for index in range(8)}
    lines = str(Report(0.5, errors, 1e-9, "forward program", True, {"mean": 1e-3}, {"loss 0": 0.0}, difference)).splitlines()
    assert lines[0] == "NOT EQUAL to the forward program, promoted to float64: worst error 0.5, tolerance 1e-09"
    assert "  first difference: %mm_3, model.py:7 in h.0: off by 0.25 (ranks 0 and 1 should hold the same), made by lower" in lines
    gradients = [line.split()[1] for line in lines if line.startswith("  gradient")]
    assert gradients == ["layer.7:", "layer.6:", "layer.5:", "layer.4:", "layer.3:"]
    assert "  buffer mean: 0.001" in lines and not any("replicas" in line for line in lines)
    assert str(Report(0.0, {}, 1e-4)).startswith("equal to the original model, in the model's own precision")


def test_accepted_own_statistics_are_told_apart_from_the_original() -> None:
    report = Report(0.5, {}, 1e-9, promoted=True, own_statistics_error=3e-14)
    lines = str(report).splitlines()
    assert not report and lines[0].startswith("NOT EQUAL to the original model")
    assert 'microbatch_statistics="own"' in lines[1] and lines[2] == "  against the program that does so: worst error 3e-14"


def test_the_verdict_knows_how_far_casts_lead() -> None:
    options: dict[str, Any] = {"tolerance": 0.0625, "narrowest": torch.bfloat16, "cast_tolerance": 0.35}
    report = Report(0.0, {"w": 0.1}, gradient_tolerance=0.2, cast_error=0.3, **options)
    assert report and "0.2 for gradients" in str(report) and "by 0.3, 38.4 eps of bfloat16, where 44.8 are allowed" in str(report)
    assert not Report(0.1, {"w": 0.1}, gradient_tolerance=0.2, **options)
    for far in ({"cast_error": 0.4}, {"cast_error": math.nan}, {"cast_error": 0.1, "cast_loss_error": 0.1}):
        report = Report(0.0, {}, **options, **far)
        assert not report and "44.8 are all that rounding explains" in str(report)
