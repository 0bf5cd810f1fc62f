"""Prices of actions and transfers."""

from __future__ import annotations

from autopar.pipeline.actions import Action, Edge
from autopar.pipeline.cost import EdgeCost, PipelineCost, StageCost
from autopar.pipeline.program import Transfer


def test_a_whole_backward_is_its_halves_unless_it_says_otherwise() -> None:
    stage = StageCost(1.0, 2.0, 3.0)
    assert [stage.seconds(kind) for kind in "FIWB"] == [1.0, 2.0, 3.0, 5.0]
    assert StageCost(1.0, 2.0, 3.0, backward_seconds=4.0).seconds("B") == 4.0


def test_halves_free_all_that_the_forward_saved() -> None:
    stage = StageCost(1.0, 1.0, 1.0, saved_bytes=10.0, weight_saved_bytes=4.0)
    assert (stage.freed_bytes("F"), stage.freed_bytes("I"), stage.freed_bytes("W"), stage.freed_bytes("B")) == (0.0, 6.0, 4.0, 10.0)


def test_a_gradient_costs_what_its_activation_does() -> None:
    cost = PipelineCost((StageCost(1, 1, 1),) * 3, {Edge(0, 1): EdgeCost(0.5, 8.0), Edge(0, 2, has_gradient=False): EdgeCost(0.1, 2.0)})
    assert cost.transfer(Transfer(0, 1, "F", 0)) == cost.transfer(Transfer(1, 0, "B", 0)) == EdgeCost(0.5, 8.0)
    assert cost.transfer(Transfer(0, 2, "F", 0)) == EdgeCost(0.1, 2.0)
    assert cost.action_seconds(Action(2, "B", 0)) == 2
