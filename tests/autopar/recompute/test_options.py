"""The options of a segment against all sets of its values."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from autopar.recompute import options as module
from autopar.recompute.min_cut import KeptValue
from autopar.recompute.options import options_of
from autopar.recompute.timeline import BackwardCall, ForwardCall, Timeline
from autopar.recompute.walk import LayerMemory


def random_timeline(seed: int, number: int = 8) -> Timeline:
    draw = random.Random(seed)
    values = [KeptValue(math.inf, 0.0, (), False)]
    for place in range(1, number + 1):
        reads = tuple(draw.sample(range(place), min(place, draw.choice([1, 1, 2]))))
        values.append(KeptValue(draw.uniform(1, 10), float(draw.randint(1, 10)), reads, draw.random() < 0.8))
    wanted = [place for place, each in enumerate(values) if each.is_wanted]
    backward = [BackwardCall((place,), made, made) for place in reversed(wanted) for made in [float(draw.randint(0, 8))]]
    return Timeline(values, [each.bytes for each in values], frozenset(range(1, number + 1)), backward, [ForwardCall(0.0, ())])


def is_no_worse(one: LayerMemory, other: LayerMemory) -> bool:
    return one.seconds <= other.seconds + 1e-9 and one.kept_bytes <= other.kept_bytes and one.own_bytes <= other.own_bytes


def all_sets(timeline: Timeline) -> list[LayerMemory]:
    sets = (each for size in range(len(timeline.decisions) + 1) for each in itertools.combinations(timeline.decisions, size))
    closed = (timeline.closed(itertools.chain.from_iterable(each)) for each in sets)
    return [timeline.memory(each) for each in closed if each is not None]


@pytest.mark.parametrize("seed", range(6))
def test_of_few_values_no_set_is_better_in_all(seed: int) -> None:
    timeline = random_timeline(seed)
    found = [memory for _, memory in options_of(timeline, most=1000)]
    assert found[0] == timeline.memory(frozenset())
    assert all(any(is_no_worse(option, each) for option in found) for each in all_sets(timeline))


@pytest.mark.parametrize("seed", range(6))
def test_of_many_values_the_search_finds_nearly_as_good_ones(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A set of all is beaten, or missed by a few percent, by an option that keeps and needs no more."""
    timeline = random_timeline(seed, number=9)
    monkeypatch.setattr(module, "_MOST_PRICED", 120)
    found = [memory for _, memory in options_of(timeline, most=1000)]
    missed = [
        each
        for each in all_sets(timeline)
        if not any(o.kept_bytes <= each.kept_bytes and o.own_bytes <= each.own_bytes and o.seconds <= 1.1 * each.seconds for o in found)
    ]
    assert len(missed) <= 0.1 * len(all_sets(timeline))


def test_of_many_options_the_extremes_remain() -> None:
    timeline = random_timeline(2, number=10)
    everything = [memory for _, memory in options_of(timeline, most=1000)]
    few = [memory for _, memory in options_of(timeline, most=6)]
    assert len(few) <= 7 < len(everything)
    assert min(each.kept_bytes for each in few) == min(each.kept_bytes for each in everything)
    assert min(each.own_bytes for each in few) == min(each.own_bytes for each in everything)
    assert few[0].seconds == 0
