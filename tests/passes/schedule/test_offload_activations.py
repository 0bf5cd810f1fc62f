"""Which saved values are moved: those away at the peak, until it falls no more; and that ranks read one decision."""

from __future__ import annotations

import itertools
import json
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import autopar
from autopar.checks.checker import Checker
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.memory import MemoryBudget
from autopar.cost.model import CostModel
from autopar.cost.rank_sizes import RankSizes
from autopar.cost.schedule_memory import schedule_memory
from autopar.driver.compiled import SchedulePassRun
from autopar.errors import PlanError, ScheduleError
from autopar.ir.instructions import Copy, Free, Run
from autopar.ir.lifetimes import reading, with_frees
from autopar.ir.offload import Offload
from autopar.passes.schedule.offload_activations import OffloadActivations
from autopar.pipeline.fragment_prices import fragment_seconds
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.pipeline.simulate import simulate
from autopar.pipeline.stays import Trips, waiting_seconds
from autopar.plans.plan import Offloaded
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
    assert 0 < bytes_of(chosen(replace(ASKED, smallest_bytes=20_000))) < bytes_of(chosen())
    slow = replace(Cluster.ideal(), copies=(("host", autopar.cost.hardware.cluster.Link(1.0, 1.0)),))
    assert chosen(cluster=slow).places == ((),)
    assert "nothing is saved long enough" in str(chosen(cluster=slow))


@pytest.mark.parametrize(("share", "least", "most"), [(10.0, 0.0, 0.0), (0.97, 0.01, 0.8), (0.1, 1.0, 4.0)])
def test_under_a_budget_as_much_as_it_takes(share: float, least: float, most: float) -> None:
    text = str(chosen())
    assert "MB" in text
    everything = bytes_of(chosen())
    peak = float(text.split("at most ")[1].split(" MB")[0]) * 1e6
    found = bytes_of(chosen(budget=MemoryBudget(share * peak + _state_bytes())))
    assert least * everything <= found <= most * everything


def test_no_more_than_the_budget_needs() -> None:
    """Without any one of what is moved the step would not fit; without a budget more is moved."""
    top, least = (schedule_memory_of(chosen(budget=each)) for each in (MemoryBudget(1e12), MemoryBudget()))
    limit = (top + 2 * least) / 3
    decision = chosen(budget=MemoryBudget(limit + _state_bytes()))
    assert decision.fits and schedule_memory_of(decision) <= limit and 0 < bytes_of(decision) < bytes_of(chosen())
    for each in decision.places[0]:
        others = tuple(one for one in decision.places[0] if one != each)
        assert schedule_memory_of(replace(decision, places=(others,))) > limit, each
    assert not chosen(budget=MemoryBudget(0.2 * least + _state_bytes())).fits


def test_a_plan_has_what_is_moved(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    case = gpt2(2)

    def compiled(**options: Any) -> autopar.ParallelModule:
        return autopar.compile(case.model, autopar.virtual_mesh(tp=2), example_inputs=case.batch, backend="eager", **options)

    first = compiled(offload=ASKED)
    plan = first.plan
    assert str(compiled(plan=plan).compiled.schedule) == str(first.compiled.schedule)
    assert plan.offloaded is not None and plan.offloaded.memory == "host" and len(plan.offloaded.buffers[0]) > 3
    assert autopar.Plan.from_json(plan.to_json()) == plan
    fewer = replace(plan, offloaded=replace_buffers(plan, plan.offloaded.buffers[0][:2]))
    parallel = compiled(plan=autopar.Plan.from_json(fewer.to_json()))
    assert parallel.plan.offloaded == fewer.offloaded and "by the plan: " in parallel.explain(detail="offload")
    assert str(plan.diff(fewer)).splitlines()[1:2] == ["offloaded"] and not fewer.diff(parallel.plan)
    assert compiled(plan=replace(plan, offloaded=None)).plan.offloaded is None
    with caplog.at_level("WARNING", "autopar"):
        anew = compiled(plan=replace(plan, offloaded=replace_buffers(plan, ("nothing",))), offload=ASKED)
    assert not plan.diff(anew.plan) and "nothing called nothing may be away; it is chosen anew" in caplog.text
    with pytest.raises(PlanError, match="the plan keeps activations in files, and says nothing of where"):
        compiled(plan=replace(plan, offloaded=plan.offloaded._replace(memory="file")))


def replace_buffers(plan: autopar.Plan, names: tuple[str, ...]) -> Offloaded:
    assert plan.offloaded is not None
    return plan.offloaded._replace(buffers=(names,))


def test_copies_that_are_waited_for_are_not_chosen_where_others_do() -> None:
    """On a slow link the copies of a budget that little meets are hidden; those of all together are not."""
    slow = replace(Cluster.named("cpu"), copies=(("host", autopar.cost.hardware.cluster.Link(0.0, 3e8)),))
    top = schedule_memory_of(chosen(budget=MemoryBudget(1e12)))
    texts = {share: chosen(cluster=slow, budget=MemoryBudget(share * top + _state_bytes())) for share in (0.999, 0.45)}
    cost, starts = CostModel(slow, before().mesh), clock(slow)
    waits = {share: waited(each, cost, starts) for share, each in texts.items()}
    assert texts[0.999].fits and texts[0.999].places[0] and waits[0.999] == 0.0
    assert not texts[0.45].fits and waits[0.45] > 0.0


def clock(cluster: Cluster) -> list[float]:
    program = before()
    seconds = fragment_seconds(program, CostModel(cluster, program.mesh))
    return [0.0, *simulate(program, seconds, has_memory=False).instruction_seconds[0]]


def waited(decision: Trips, cost: CostModel, starts: list[float]) -> float:
    schedule = before().places[0]
    sizes = {each.names: schedule.bytes_of(each.names[0]) for each in decision.places[0]}
    return waiting_seconds(decision.places[0], starts, lambda trip: cost.copy_seconds("host", sizes[trip.names]))


def schedule_memory_of(decision: Trips) -> float:
    """The peak with these trips, the optimizer's state aside."""
    after = OffloadActivations(ASKED, Cluster.ideal()).apply(before(), decision).places[0]
    groups = with_frees(after.instructions, {*after.inputs, *after.outputs})
    return schedule_memory(after, RankSizes(MemoryBudget()).of(after), groups).peak_bytes


def _state_bytes() -> float:
    schedule = before().places[0]
    named = zip(schedule.signature.inputs, schedule.inputs, strict=True)
    return sum(MemoryBudget().optimizer.state_bytes(item, schedule.bytes_of(name)) for item, name in named)
