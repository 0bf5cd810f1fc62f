"""What is known of one pair of shardings holds for every pair that changes the same."""

from __future__ import annotations

import itertools

import pytest

from autopar.cost.hardware.cluster import Cluster
from autopar.cost.model import CostModel
from autopar.cost.reshard_prices import ReshardPrices
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Sharding

MESH = Mesh((("dp", 2), ("cp", 4), ("tp", 8)))
CLUSTER = Cluster.named("8xH100")


def shardings() -> list[Sharding]:
    """Every sharding of three atoms on two of the axes, with dp on the first atom or on none, sums included."""
    places = [None, 0, 1, 2, "sum"]
    found: list[Sharding] = []
    for dp, cp, tp in itertools.product((None, 0), places, places):
        used = [("dp", dp), ("cp", cp), ("tp", tp)]
        splits = tuple(tuple(axis for axis, place in used if place == atom) for atom in range(3))
        found.append(Sharding(splits, tuple((axis, "sum") for axis, place in used if place == "sum")))
    return found


def test_prices_are_those_of_the_cost_model_for_every_pair() -> None:
    cost = CostModel(CLUSTER, MESH)
    prices = ReshardPrices(cost)
    pairs = list(itertools.product(shardings(), repeat=2))
    assert len(pairs) == 2500
    for source, target in pairs:
        assert prices.seconds(1e9, source, target) == pytest.approx(cost.reshard(1e9, source, target)), (source, target)


def test_each_change_is_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = CostModel(CLUSTER, MESH)
    prices = ReshardPrices(cost)
    gathered = prices.seconds(8e6, Sharding((("dp",), ("tp",))), Sharding((("dp",), ())))
    monkeypatch.setattr(cost, "reshard", lambda *arguments: pytest.fail(f"priced again: {arguments}"))
    # The same gather of another atom, beside another split of the same size.
    assert prices.seconds(8e6, Sharding((("tp",), (), ("dp",))), Sharding(((), (), ("dp",)))) == gathered
