"""Which saved values are moved: those away at the peak, until it falls no more; and that ranks read one decision."""

from __future__ import annotations

import itertools
import json
from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import pytest
import torch

import autopar
from autopar.checks.checker import Checker
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.memory import MemoryBudget
from autopar.driver.compiled import SchedulePassRun
from autopar.errors import ScheduleError
from autopar.ir.instructions import Copy, Free, Run
from autopar.ir.lifetimes import reading
from autopar.ir.offload import Offload
from autopar.passes.schedule.offload_activations import OffloadActivations
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.pipeline.stays import Trips
from tests.support.models.zoo import gpt2

ASKED = Offload(activations="host", smallest_bytes=0)


@cache
def before() -> ScheduleProgram:
    torch.manual_seed(0)
    case = gpt2(4)
    parallel = autopar.compile(case.model, autopar.virtual_mesh(tp=2), example_inputs=case.batch, backend="eager")
    return next(step.program for step in parallel.compiled.schedule_steps if step.name == "overlap communication")


def chosen(offload: Offload | None = ASKED, cluster: Cluster | None = None, budget: MemoryBudget | None = None) -> Trips:
    return OffloadActivations(offload, cluster or Cluster.ideal(), budget or MemoryBudget()).decide(before())


def bytes_of(decision: Trips) -> int:
    schedule = before().places[0]
    return sum(schedule.bytes_of(name) for trip in decision.places[0] for name in trip.names)


def test_without_it_nothing_is_moved() -> None:
    decision = chosen(None)
    assert decision.places == ((),)
    assert OffloadActivations(None, Cluster.ideal()).apply(before(), decision) is before()


def test_each_is_away_once_and_the_decision_is_read_by_others() -> None:
    decision, one = chosen(), OffloadActivations(ASKED, Cluster.ideal())
    assert decision.places[0] and all(trip.out <= trip.gone <= trip.back <= trip.needed for trip in decision.places[0])
    written = json.loads(json.dumps(one.written(before(), decision)))
    after = one.apply(before(), decision)
    assert str(one.apply(before(), one.read(before(), written))) == str(after)
    copies = [each for each in after.places[0].instructions if isinstance(each, Copy)]
    assert [each.memory for each in copies].count("host") == [each.memory for each in copies].count("device") == len(decision.places[0])
    assert not any(isinstance(each, Free) for each in after.places[0].instructions)


def test_one_that_reads_another_value_is_refused() -> None:
    """Of two that were away and are of one type: every buffer is there, and of the right shape."""
    one = OffloadActivations(ASKED, Cluster.ideal())
    after = one.apply(before(), one.decide(before()))
    schedule = after.places[0]
    number, names = next(
        (number, pair)
        for number, each in enumerate(schedule.instructions)
        if isinstance(each, Run)
        for pair in itertools.combinations([name for name in each.inputs if name.endswith(".back")], 2)
        if schedule.type_of(pair[0]) == schedule.type_of(pair[1])
    )
    swapped = dict(zip(names, names[::-1], strict=True))
    instructions = list(schedule.instructions)
    instructions[number] = reading(instructions[number], swapped)
    faulty = after.with_places([replace(schedule, instructions=tuple(instructions))], buffers=schedule.buffers)
    for program, found in ((after, None), (faulty, "with its copies taken out, the schedule is not what it was")):
        checker = Checker()
        checker(SchedulePassRun(49, "overlap communication", 0.0, before()))
        with pytest.raises(ScheduleError, match=found) if found else nullcontext():
            checker(SchedulePassRun(50, one.name, 0.0, program))


def test_small_ones_and_slow_copies_stay() -> None:
    assert 0 < bytes_of(chosen(replace(ASKED, smallest_bytes=5000))) < bytes_of(chosen())
    slow = replace(Cluster.ideal(), copies=(("host", autopar.cost.hardware.cluster.Link(1.0, 1.0)),))
    assert chosen(cluster=slow).places == ((),)
    assert "nothing is saved long enough" in str(chosen(cluster=slow))


@pytest.mark.parametrize(("share", "least", "most"), [(10.0, 0.0, 0.0), (0.97, 0.01, 0.8), (0.1, 1.0, 2.0)])
def test_under_a_budget_as_much_as_it_takes(share: float, least: float, most: float) -> None:
    text = str(chosen())
    assert "MB" in text
    everything = bytes_of(chosen())
    peak = float(text.split("at most ")[1].split(" MB")[0]) * 1e6
    found = bytes_of(chosen(budget=MemoryBudget(share * peak + _state_bytes())))
    assert least * everything <= found <= most * everything


def _state_bytes() -> float:
    schedule = before().places[0]
    named = zip(schedule.signature.inputs, schedule.inputs, strict=True)
    return sum(MemoryBudget().optimizer.state_bytes(item, schedule.bytes_of(name)) for item, name in named)
