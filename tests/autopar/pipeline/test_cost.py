"""Prices of actions and transfers, and the bytes that a rank holds at these prices, instruction by instruction."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.ir.actions import Action, Edge, Transfer, chain
from autopar.pipeline.cost import EdgeCost, PipelineCost, StageCost, grid_memory
from autopar.pipeline.expand import expand
from autopar.pipeline.schedules import GENERATORS, one_forward_one_backward, zb_h1, zb_v
from autopar.pipeline.simulate import simulate

STAGE = StageCost(1, 1, 1, saved_bytes=100.0, weight_saved_bytes=40.0)


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


def cost(num_stages: int, stage: StageCost = STAGE, edge_bytes: float = 0.0) -> PipelineCost:
    return PipelineCost((stage,) * num_stages, {edge: EdgeCost(0.0, edge_bytes) for edge in chain(num_stages)})


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_all_is_free_at_the_end(name: str) -> None:
    schedule = GENERATORS[name](3, 5)
    held = replace(STAGE, held_bytes=7.0)
    for rank in range(3):
        memory = grid_memory(expand(schedule), cost(schedule.num_stages, held, 3.0))[rank]
        assert memory.steps[-1].after_bytes == pytest.approx(memory.held_bytes) == pytest.approx(7.0 * schedule.stages.count(rank))
        assert memory.steps[-1].live_microbatches <= 1


def test_a_forward_saves_and_each_half_frees_its_part() -> None:
    memory = grid_memory(expand(zb_h1(1, 2)), cost(1))[0]
    # 0F0 0I0 0W0 0F1 0I1 0W1
    assert [step.during_bytes for step in memory.steps] == [100.0, 100.0, 40.0] * 2
    assert [step.after_bytes for step in memory.steps] == [100.0, 40.0, 0.0] * 2
    assert memory.peak_live_microbatches == 1


def test_late_weight_gradients_hold_their_part() -> None:
    """Rank 1 of ZB-H1 holds one microbatch and what one W still needs."""
    assert simulate(zb_h1(2, 6), cost(2)).peak_bytes == (200.0, 140.0)


def test_working_bytes_count_while_an_action_runs() -> None:
    assert grid_memory(expand(zb_h1(1, 2)), cost(1, replace(STAGE, working_bytes=5.0)))[0].peak_bytes == 105.0


def test_a_received_value_is_held_until_it_is_read_and_a_sent_one_until_its_wait() -> None:
    program = expand(one_forward_one_backward(2, 2))
    steps = {
        str(program.places[1].instructions[step.position]).split(" (")[0]: step
        for step in grid_memory(program, cost(2, edge_bytes=10.0))[1].steps
    }
    assert steps["RECV 0F0>1 pp=0"].after_bytes == 10.0
    assert steps["RUN 1F0"].after_bytes == 100.0
    # Saved values, the next input, and the gradient that it makes.
    assert steps["RUN 1B0"].during_bytes == 120.0 and steps["RUN 1B0"].after_bytes == 20.0
    assert steps["WAIT 1B1>0"].after_bytes == 0.0


def test_a_value_between_two_stages_of_a_rank_has_a_buffer() -> None:
    program = expand(zb_v(1, 1))
    memory = grid_memory(program, cost(2, edge_bytes=10.0))[0]
    # 0F0 1F0: the second starts while the first's output is there.
    assert [step.during_bytes for step in memory.steps][:2] == [110.0, 210.0]
    assert memory.steps[1].after_bytes == 200.0
