"""How many microbatches, in which order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.errors import ScheduleError
from autopar.ir.mesh import Mesh, virtual_mesh
from autopar.pipeline.cost import PipelineCost, grid_memory
from autopar.pipeline.expand import expand
from autopar.pipeline.order import chosen_schedule, default_number, live_microbatches, ordered_for, pipeline_order
from autopar.pipeline.schedules import GENERATORS, generate

PP2, PP2_DP2 = virtual_mesh(pp=2), virtual_mesh(pp=2, dp=2)


@pytest.mark.parametrize(
    ("mesh", "sizes", "number"),
    [
        (virtual_mesh(dp=2), [8], 1),  # nothing to fill
        (PP2, [64], 8),  # four a stage
        (PP2_DP2, [64], 8),
        (PP2, [12], 6),  # the largest divisor up to eight
        (PP2, [7], 7),
        (PP2, [11], 1),  # a prime above
        (PP2, [8, 12], 4),  # what divides every input's batch
        (PP2_DP2, [], 1),  # no input has a batch
    ],
)
def test_the_default_number_divides_every_share(mesh: Mesh, sizes: list[int], number: int) -> None:
    assert default_number(mesh, sizes) == number


@pytest.mark.parametrize(("name", "num_chunks"), [("1f1b", 1), ("interleaved", 3), ("zb-v", 2)])
def test_an_order_has_its_like_for_fewer_microbatches(name: str, num_chunks: int) -> None:
    order = generate(name, 2, 8, num_chunks)
    assert ordered_for(order, 8) is order
    assert ordered_for(order, 1) == generate(name, 2, 1, num_chunks)
    mine = ordered_for(replace(order, name="mine"), 4)
    assert (mine.num_microbatches, mine.num_stages) == (4, order.num_stages)


def test_a_named_schedule_is_drawn_for_the_mesh() -> None:
    found = pipeline_order("zb-v", PP2_DP2.with_microbatches(4))
    assert (found.name, found.num_ranks, found.num_stages, found.num_microbatches) == ("zb-v", 2, 4, 4)
    assert pipeline_order("1f1b", PP2).num_microbatches == 1


def test_a_schedule_of_ones_own_must_fit() -> None:
    mesh, own = PP2.with_microbatches(4), generate("gpipe", 2, 4)
    assert pipeline_order(own, mesh) is own
    with pytest.raises(ScheduleError, match=r"for 2 ranks and 8 microbatches; this call runs on pp = 2 with 4: pass num_microbatches=8"):
        pipeline_order(generate("gpipe", 2, 8), mesh)
    with pytest.raises(ScheduleError, match="for 4 ranks and 4 microbatches"):
        pipeline_order(generate("gpipe", 4, 4), mesh)


def test_what_the_user_says_comes_before_the_plan_and_the_plan_before_the_defaults() -> None:
    planned = generate("zb-h1", 2, 4)
    assert chosen_schedule(None, None, None, PP2, [16]) == ("1f1b", 8)
    assert chosen_schedule(None, None, planned, PP2, [16]) == (planned, 4)
    assert chosen_schedule(None, 4, planned, PP2, [16]) == (planned, 4)
    assert chosen_schedule("gpipe", 2, planned, PP2, [16]) == ("gpipe", 2)
    assert chosen_schedule(None, 8, planned, PP2, [16]) == ("1f1b", 8)
    assert chosen_schedule(None, None, planned, PP2, [18]) == ("1f1b", 6), "a share that the plan's microbatches do not divide"
    assert chosen_schedule(None, None, planned, virtual_mesh(pp=4), [16]) == ("1f1b", 16)


@pytest.mark.parametrize("name", GENERATORS)
def test_live_microbatches_are_those_of_the_simulator(name: str) -> None:
    """By stage there, by rank here."""
    order = generate(name, 4, 6)
    found = live_microbatches(order)
    cost = PipelineCost.uniform(order.num_stages)
    for rank in range(4):
        stages = [stage for stage, holder in enumerate(order.stages) if holder == rank]
        together = grid_memory(expand(order), cost)[rank].peak_live_microbatches
        assert max(found[stage] for stage in stages) <= together <= sum(found[stage] for stage in stages)
        if len(stages) == 1:
            assert found[stages[0]] == together


def test_one_forward_one_backward_holds_as_many_as_there_are_stages_to_come() -> None:
    assert live_microbatches(generate("1f1b", 4, 8)) == (4, 3, 2, 1)
    assert live_microbatches(generate("1f1b", 4, 2)) == (2, 2, 2, 1)
    assert live_microbatches(generate("gpipe", 4, 8)) == (8, 8, 8, 8)
