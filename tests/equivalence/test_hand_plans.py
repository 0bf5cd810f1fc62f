"""What the search finds is never dearer than what people write by hand, priced by the same model."""

from __future__ import annotations

import pytest

from benchmarks.hand_plans import CLUSTERS, FREE, SHAPES, hand_plans, measure, priced, traced

NUM_LAYERS = 2
QUICK = {("gpt2-medium", "8xH100")}
CASES = [pytest.param(name, cluster, marks=() if (name, cluster) in QUICK else pytest.mark.slow) for name in SHAPES for cluster in CLUSTERS]


@pytest.mark.parametrize(("name", "cluster"), CASES)
def test_never_dearer_than_by_hand(name: str, cluster: str) -> None:
    row = measure(SHAPES[name], NUM_LAYERS, cluster)
    by_hand = {plan: seconds for plan, seconds in row.items() if plan.endswith(" ms") and plan != "found ms"}
    assert len(by_hand) == 4
    assert row["found ms"] <= min(by_hand.values()) * (1 + 1e-6), row


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SHAPES))
def test_pins_split_what_they_say(name: str) -> None:
    """A plan whose pins were dropped would be as cheap as the found one, and the comparison empty."""
    free = priced(SHAPES[name], NUM_LAYERS, FREE, CLUSTERS[0])
    for plan in hand_plans(SHAPES[name], traced(name, NUM_LAYERS)):
        assert priced(SHAPES[name], NUM_LAYERS, plan, CLUSTERS[0]).fixed - free.fixed
