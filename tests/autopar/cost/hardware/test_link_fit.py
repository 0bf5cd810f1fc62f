"""Fits: links come back from what they say, noise and published series are met on sizes that were not fitted."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import groupby
from statistics import median

import pytest

from autopar.cost.hardware.cluster import Cluster
from autopar.cost.hardware.link_fit import Sample, fit_link
from autopar.cost.hardware.links import CommunicationKind, Link, Protocol, Route, transfer_seconds
from benchmarks.collectives import held_out, measured

ALL: tuple[CommunicationKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
SIZES = tuple(4096.0 * 8**power for power in range(6))


def samples(
    link: Link, ranks: tuple[int, ...] = (2, 4, 8), noise: float = 0.0, transfers: tuple[CommunicationKind, ...] = ALL
) -> list[Sample]:
    """What would be measured if `link` were the truth, up to `noise`."""
    rng, found = random.Random(0), list[Sample]()
    for n in ranks:
        for transfer in transfers:
            for size in SIZES:
                local = (size / n, size) if transfer == "all_gather" else (size, size / n)
                seconds = transfer_seconds(transfer, Route((n,), 1, n, link, link), *local)
                found.append(Sample(transfer, n, *local, seconds * rng.uniform(1 - noise, 1 + noise)))
    return found


def test_latency_bandwidth_and_call_come_back() -> None:
    truth = Link(2e-6, 100e9, call_seconds=2e-5)
    fitted = fit_link(samples(truth), "a test")
    assert fitted.latency_seconds == pytest.approx(truth.latency_seconds, rel=1e-6)
    assert fitted.bytes_per_second == pytest.approx(truth.bytes_per_second, rel=1e-6)
    assert fitted.call_seconds == pytest.approx(truth.call_seconds, rel=1e-6)
    assert (fitted.small, fitted.in_switch, fitted.factors, fitted.source) == (None, None, (), "a test")


def test_a_protocol_for_small_messages_is_found_where_there_may_be_one() -> None:
    truth = samples(Link(40e-6, 100e9, small=Protocol(2e-6, 10e9)))
    assert fit_link(truth).small is None
    fitted = fit_link(truth, is_nccl=True)
    assert fitted.small is not None
    assert fitted.small.latency_seconds < fitted.latency_seconds / 5
    assert fitted.small.bytes_per_second < fitted.bytes_per_second / 5


def test_additions_in_the_switch_are_found_where_there_may_be_a_switch() -> None:
    truth = samples(Cluster.named("h200").inner)
    fitted = fit_link(truth, is_nccl=True)
    assert fitted.in_switch is not None
    assert fitted.in_switch.bytes_per_second == pytest.approx(270e9, rel=0.05)
    assert max(abs(sample.error(fitted)) for sample in truth) < 0.1
    assert fit_link(truth).in_switch is None


def test_a_collective_that_a_library_does_badly_gets_a_factor() -> None:
    truth = Link(50e-6, 1e9, factors=(("reduce_scatter", 3.0),))
    fitted = fit_link(samples(truth, ranks=(2,)))
    assert dict(fitted.factors) == {"reduce_scatter": pytest.approx(3.0, rel=0.05)}
    assert fitted.bytes_per_second == pytest.approx(1e9, rel=0.05)


def test_noise_does_not_bias_the_fit() -> None:
    truth = Link(50e-6, 1e9)
    fitted = fit_link(samples(truth, noise=0.4))
    assert fitted.bytes_per_second == pytest.approx(1e9, rel=0.25)
    errors = [sample.error(fitted) for sample in samples(truth)]
    assert abs(median(errors)) < 0.15


def test_noise_around_nothing_but_bandwidth_still_gives_a_link() -> None:
    falling = [replace(sample, seconds=1 / sample.sent) for sample in samples(Link(1e-6, 1e9), transfers=("all_gather",))]
    fitted = fit_link(falling)
    assert fitted.bytes_per_second > 0 and fitted.latency_seconds >= 0


def test_every_other_size_of_a_published_series_predicts_those_between() -> None:
    rows = sorted((row for row in measured() if row.num_nodes == 1), key=lambda row: row.system)
    series = [each for _, group in groupby(rows, key=lambda row: row.system) if len(each := list(group)) == 20]
    assert len(series) == 3
    for each in series:
        assert median(held_out(each)) < 0.15, each[0].system
