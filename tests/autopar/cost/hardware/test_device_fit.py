"""From timed ops to rates: what was put in comes out, and real ops give usable numbers."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from autopar.cost.hardware.device_fit import Rates, Trial, fit_rates, run_trials


def test_rates_that_made_the_times_are_found_again() -> None:
    rates = Rates(2e11, 1e10, 8e-6)
    trials = [Trial(flops, size, rates.seconds(Trial(flops, size, 0.0))) for flops, size in product((0.0, 1e7, 1e9), (1e3, 1e5, 1e7))]
    found = fit_rates(trials)
    assert found is not None
    assert (found.flops, found.memory_bandwidth, found.launch_seconds) == pytest.approx((2e11, 1e10, 8e-6), rel=1e-6)


def test_a_few_slow_runs_do_not_decide() -> None:
    """An op that took ten times as long counts as one, whatever its size."""
    rates = Rates(2e11, 1e10, 8e-6)
    trials = [Trial(flops, size, rates.seconds(Trial(flops, size, 0.0))) for flops, size in product((0.0, 1e7, 1e9), (1e3, 1e5, 1e6, 1e7))]
    slow = [Trial(each.flops, each.num_bytes, (10 if number == 5 else 1) * each.seconds) for number, each in enumerate(trials)]
    found = fit_rates(slow)
    assert found is not None
    assert found.flops == pytest.approx(2e11, rel=0.5) and found.memory_bandwidth == pytest.approx(1e10, rel=0.5)


def test_times_that_say_nothing_of_bytes_are_refused() -> None:
    assert fit_rates([Trial(1e9, 0.0, 1e-3), Trial(1e8, 0.0, 1e-4)]) is None


def test_ops_of_this_machine_take_more_the_more_they_do() -> None:
    trials = run_trials(torch.float32, torch.device("cpu"))
    products = sorted((each for each in trials if each.flops), key=lambda each: each.flops)
    assert products[-1].seconds > products[0].seconds > 0
    rates = fit_rates(trials)
    assert rates is not None and 1e8 < rates.flops < 1e14 and 1e8 < rates.memory_bandwidth < 1e13 and 0 <= rates.launch_seconds < 1e-2
