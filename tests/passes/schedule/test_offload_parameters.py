"""Parameters on the host: copies ahead of readers, dropped between phases, as few as the clock and the budget say; one decision for all."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest
import torch

import autopar
from autopar.checks.checker import Checker
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.memory import MemoryBudget
from autopar.cost.rank_sizes import RankSizes
from autopar.cost.schedule_memory import schedule_memory
from autopar.driver.compiled import SchedulePassRun
from autopar.errors import PlanError, ScheduleError
from autopar.ir.instructions import Copy, Launch, Pause, Run, Update
from autopar.ir.lifetimes import with_frees
from autopar.ir.offload import Offload
from autopar.passes.schedule.offload_activations import OffloadActivations
from autopar.passes.schedule.offload_parameters import OffloadParameters
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.pipeline.visits import Visits, parameters_of
from tests.support.models.zoo import Case, gpt2

ASKED = Offload(parameters="host", smallest_bytes=0)


@cache
def before() -> ScheduleProgram:
    torch.manual_seed(0)
    case = gpt2(4)
    parallel = autopar.compile(case.model, autopar.virtual_mesh(dp=2), example_inputs=case.batch, backend="eager")
    return next(step.program for step in parallel.compiled.schedule_steps if step.name == "overlap communication")


def chosen(offload: Offload | None = ASKED, cluster: Cluster | None = None, budget: MemoryBudget | None = None) -> Visits:
    return OffloadParameters(offload, cluster or Cluster.ideal(), budget or MemoryBudget()).decide(before())


def peak_of(decision: Visits) -> float:
    after = OffloadParameters(ASKED, Cluster.ideal()).apply(before(), decision).places[0]
    groups = with_frees(after.instructions, {*after.inputs, *after.outputs})
    return schedule_memory(after, RankSizes(MemoryBudget()).of(after), groups).peak_bytes


def test_nothing_where_nobody_asked() -> None:
    one = OffloadParameters(Offload(activations="host"), Cluster.ideal())
    assert one.apply(before(), one.decide(before())) is before()


def test_each_is_copied_ahead_of_each_phase_and_read_there() -> None:
    decision = chosen()
    after = OffloadParameters(ASKED, Cluster.ideal()).apply(before(), decision).places[0]
    parameters = parameters_of(before().places[0])
    pause = next(number for number, each in enumerate(before().places[0].instructions) if isinstance(each, Pause))
    assert len(parameters) > 40 and {each.name for each in decision.places[0]} == set(parameters)
    for each in decision.places[0]:
        assert each.copied <= each.needed <= each.last and (each.last < pause or each.copied > pause)
    weights = [each for each in decision.places[0] if "c_fc_weight" in each.name]
    assert len(weights) == 8  # once in the forward, once in the backward
    assert all(after.memory_of(name) == "host" for name in parameters)
    computing = [each for each in after.instructions if isinstance(each, (Run, Launch))]
    assert not {name for each in computing for name in each.reads}.intersection(parameters)


def test_what_comes_soon_stays_and_so_does_what_is_small() -> None:
    slow = replace(Cluster.named("cpu"), copies=(("host", autopar.cost.hardware.cluster.Link(10.0, 1e9)),))
    for fewer in (chosen(cluster=slow), chosen(replace(ASKED, smallest_bytes=1 << 20))):
        names = [each.name for each in fewer.places[0]]
        assert all(names.count(name) <= 2 for name in names)  # before the PAUSE, and behind it
        assert len(names) < len(chosen().places[0]) or len(names) == len(set(names)) * 2 or max(map(names.count, names)) == 2


def test_a_budget_that_is_short_has_less_copied_ahead() -> None:
    free = peak_of(chosen())
    short = chosen(budget=MemoryBudget(free - 1))
    assert peak_of(short) < free and len(short.places[0]) == len(chosen().places[0])
    assert chosen(budget=MemoryBudget(free)).places == chosen().places


def test_ranks_read_one_decision() -> None:
    decision, one = chosen(), OffloadParameters(ASKED, Cluster.ideal())
    assert one.read(before(), json.loads(json.dumps(one.written(before(), decision)))) == decision


def test_a_copy_of_another_parameter_is_no_copy() -> None:
    program = OffloadParameters(ASKED, Cluster.ideal()).apply(before(), chosen())
    checker = Checker()
    checker(SchedulePassRun(1, "before", 0.0, before()))
    checker(SchedulePassRun(2, "offload parameters", 0.0, program))
    (schedule,) = program.places
    instructions = list(schedule.instructions)
    number = next(number for number, each in enumerate(instructions) if isinstance(each, Run))
    run = instructions[number]
    assert isinstance(run, Run)
    swapped = [name for name in run.inputs if "ln_1_weight" in name or "ln_2_weight" in name]
    names = dict(zip(swapped, reversed(swapped), strict=True))
    instructions[number] = replace(run, inputs=tuple(names.get(name, name) for name in run.inputs))
    wrong = program.with_places([replace(schedule, instructions=tuple(instructions))])
    checker.proved = before()
    with pytest.raises(ScheduleError, match="with its copies taken out, the schedule is not what it was"):
        checker(SchedulePassRun(2, "offload parameters", 0.0, wrong))


def test_activations_join_them() -> None:
    """What is saved goes on a schedule that has copies of parameters, and these are proved to be all that is new."""
    program = OffloadParameters(ASKED, Cluster.ideal()).apply(before(), chosen())
    other = OffloadActivations(Offload(activations="host", smallest_bytes=0), Cluster.ideal(), MemoryBudget(1.0))
    after = other.apply(program, other.decide(program))
    checker = Checker()
    checker(SchedulePassRun(1, "offload parameters", 0.0, program))
    checker(SchedulePassRun(2, "offload activations", 0.0, after))
    memories = {each.memory for each in after.places[0].instructions if isinstance(each, Copy)}
    assert memories == {"host", "device"}
    moved = {name for each in after.places[0].instructions if isinstance(each, Copy) and each.memory == "host" for name in each.sources}
    assert moved and not any(".here" in name for name in moved)


def compiled(case: Case, **options: object) -> autopar.ParallelModule:
    return autopar.compile(case.model, autopar.virtual_mesh(tp=2), example_inputs=case.batch, backend="eager", **options)  # pyright: ignore[reportArgumentType]


def test_a_plan_has_where_they_lie() -> None:
    torch.manual_seed(0)
    case = gpt2(1)
    first = compiled(case, offload=Offload(parameters="host"))
    plan = autopar.Plan.from_json(first.plan.to_json())
    assert plan == first.plan and plan.stored == "host"
    again = compiled(case, plan=plan)
    assert again.plan.stored == "host" and str(again.compiled.schedule) == str(first.compiled.schedule)
    plain = compiled(case, plan=replace(plan, stored=None))
    assert plain.plan.stored is None and "parameters   host → none" in str(plan.diff(plain.plan))
    with pytest.raises(PlanError, match="the plan keeps parameters in files, and says nothing of where"):
        compiled(case, plan=replace(plan, stored="file"))
    with pytest.raises(PlanError, match="parameters are stored in 'disk'"):
        autopar.Plan.of_content(plan.content() | {"stored": "disk"})  # pyright: ignore[reportArgumentType]


def test_updates_stand_behind_the_last_copy() -> None:
    case = gpt2(2)
    parallel = compiled(case, offload=ASKED, optimizer=torch.optim.SGD)
    assert parallel.compiled.updating is not None
    instructions = parallel.compiled.updating.places[0].instructions
    for number, each in enumerate(instructions):
        if isinstance(each, Update):
            later = {name for one in instructions[number:] if isinstance(one, Copy) for name in one.sources}
            assert later.isdisjoint(each.parameters)
    assert sum(isinstance(each, Update) for each in instructions) > 1
