"""The clock of a pipeline gives what the simulation of instructions gives."""

from __future__ import annotations

import pytest

from autopar.errors import ScheduleError
from autopar.foresight.clock import times
from autopar.ir.actions import Action, PipelineSchedule
from autopar.pipeline.cost import PipelineCost
from autopar.pipeline.schedules import generate
from autopar.pipeline.simulate import simulate


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"])
def test_times_are_those_of_the_simulation(name: str) -> None:
    schedule = generate(name, 4, 8, 2)
    cost = PipelineCost.uniform(len(schedule.stages), 1.0, 1.25, 0.75, 0.1)
    found = times(schedule, [{kind: cost.stages[0].seconds(kind) for kind in "FBIW"}] * len(schedule.stages), [0.1] * len(schedule.stages))
    wanted = simulate(schedule, cost)
    assert found.busy_seconds == pytest.approx(wanted.busy_seconds)
    assert found.span_seconds == pytest.approx(wanted.span_seconds, rel=0.02)  # there a transfer waits for the one before it
    assert found.step_seconds == pytest.approx(wanted.step_seconds, rel=0.02)


def test_an_order_in_which_ranks_wait_for_each_other_is_refused() -> None:
    orders = ((Action(0, "F", 0), Action(0, "B", 0)), (Action(1, "B", 0), Action(1, "F", 0)))
    with pytest.raises(ScheduleError, match="nobody can advance"):
        times(PipelineSchedule("own", (0, 1), 1, orders), [dict.fromkeys("FBIW", 1.0)] * 2, [0.0])
