"""Gathers of parameters: which go together, when they start, what memory allows; and that results stay the same."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import pytest
import torch

import autopar
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.memory import MemoryBudget
from autopar.cost.schedule_memory import peak_bytes_on_processes
from autopar.ir.instructions import Free, Launch, Run
from autopar.ir.mesh import Mesh
from autopar.ir.program import Input, Signature
from autopar.ir.schedule import Schedule, TensorType
from autopar.passes.schedule.gather_ahead import GatherAhead
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.plans.decisions import USUAL_BUCKET_BYTES, BucketSizes
from autopar.runtime.module.parallel_module import ParallelModule
from tests.support.models.zoo import ZOO, Case
from tests.support.schedules import retyped, schedule_of, whole

DP2 = Mesh((("dp", 2),))
F32 = torch.float32
NAMES = "w v u t"
SIZE = 2 * 4 * 4  # of a gathered parameter in bytes
STEP = """
LAUNCH all_gather copy dp (w) -> w_1
WAIT w_1
RUN f (x, w_1) -> (a)
RUN lay (v) -> (v_0)
LAUNCH all_gather copy dp (v_0) -> v_1
WAIT v_1
RUN f (a, v_1) -> (b)
LAUNCH all_gather copy dp (u) -> u_1
WAIT u_1
RUN f (b, u_1) -> (c)
PAUSE
LAUNCH all_gather copy dp (t) -> t_1
WAIT t_1
RUN f (c, t_1) -> (d)
"""


def program(text: str = STEP, inputs: str = f"{NAMES} x", others: Mapping[str, TensorType] | None = None) -> ScheduleProgram:
    schedule = schedule_of(text, inputs, "c d")
    types = {name: ((4,), F32) for name in schedule.buffers} | {f"{name}_1": ((2, 4), F32) for name in NAMES.split()} | dict(others or {})
    return replace(whole(DP2, retyped(schedule, types)), is_executable=False)


def ahead(size: int, text: str = STEP, inputs: str = f"{NAMES} x") -> list[str]:
    found = GatherAhead(Cluster.ideal()).apply(program(text, inputs), BucketSizes({"all_gather dp": size}))
    return [str(each) for each in found.places[0].instructions]


def test_each_bucket_starts_when_the_one_before_has_arrived() -> None:
    assert ahead(SIZE) == [
        "LAUNCH all_gather copy dp (w) -> w_1",
        "WAIT w_1",
        "RUN lay (v) -> (v_0)",
        "LAUNCH all_gather copy dp (v_0) -> v_1",
        "RUN f (x, w_1) -> (a)",
        "WAIT v_1",
        "LAUNCH all_gather copy dp (u) -> u_1",
        "RUN f (a, v_1) -> (b)",
        "WAIT u_1",
        "RUN f (b, u_1) -> (c)",
        "PAUSE",
        "LAUNCH all_gather copy dp (t) -> t_1",
        "WAIT t_1",
        "RUN f (c, t_1) -> (d)",
    ]


def test_neighbours_go_together_up_to_the_limit_but_not_over_a_pause() -> None:
    found = ahead(2 * SIZE)
    assert found[:2] == ["RUN lay (v) -> (v_0)", "LAUNCH all_gather copy dp (w, v_0) -> (w_1, v_1)"]
    assert found[2:4] == ["WAIT w_1", "LAUNCH all_gather copy dp (u) -> u_1"]
    assert ahead(2**30)[:2] == ["RUN lay (v) -> (v_0)", "LAUNCH all_gather copy dp (w, v_0, u) -> (w_1, v_1, u_1)"]
    assert found[found.index("PAUSE") + 1] == "LAUNCH all_gather copy dp (t) -> t_1"


def test_with_a_size_of_zero_all_stays() -> None:
    before = program()
    assert GatherAhead(Cluster.ideal()).apply(before, BucketSizes({"all_gather dp": 0})) is before


LAID_OTHERWISE = ("RUN lay (a) -> (v_0)", "RUN lay (v) -> (v_0, y)", "RUN lay (v) -> (v_0)\nRUN f (x, v_0) -> (y)")


@pytest.mark.parametrize("instead", LAID_OTHERWISE, ids=["later", "more", "read"])
def test_what_is_computed_on_the_way_stays(instead: str) -> None:
    """The operand is made of another value, or with another, or somebody else reads it."""
    found = ahead(2**30, STEP.replace("RUN lay (v) -> (v_0)", instead))
    assert "LAUNCH all_gather copy dp (w, u) -> (w_1, u_1)" in found and "LAUNCH all_gather copy dp (v_0) -> v_1" in found


def test_dtypes_do_not_mix() -> None:
    doubles = {"v": ((4,), torch.float64), "v_0": ((4,), torch.float64), "v_1": ((2, 4), torch.float64)}
    found = GatherAhead(Cluster.ideal()).apply(program(others=doubles), BucketSizes({"all_gather dp": 2**30})).places[0]
    assert sorted(len(each.sources) for each in found.instructions if isinstance(each, Launch)) == [1, 1, 2]


def test_sizes_are_those_of_the_cost_model_or_of_the_plan() -> None:
    assert GatherAhead(Cluster.ideal()).decide(program()).bytes == {"all_gather dp": USUAL_BUCKET_BYTES}
    found = GatherAhead(Cluster.asked_for("cpu", DP2)).decide(program())
    assert 1e4 < found.bytes["all_gather dp"] < 1e7 and "a start" in found.reasons["all_gather dp"]
    assert GatherAhead(Cluster.ideal(), {"all_gather dp": 7}).decide(program()).bytes == {"all_gather dp": 7}
    assert not GatherAhead(Cluster.ideal()).decide(program("RUN f (x, w) -> (c)\nPAUSE\nRUN f (c, w) -> (d)")).bytes


# ---- a model of which parameters are split over dp


@cache
def compiled(budget: float) -> tuple[Case, ParallelModule]:
    """With `budget` times the bytes of all parameters."""
    torch.manual_seed(0)
    case = ZOO["llama"](2)
    capacity = budget * sum(parameter.nbytes for parameter in case.model.parameters())
    options = {"backend": "eager", "cluster": "cpu", "memory_budget": capacity}
    return case, autopar.compile(case.model, autopar.virtual_mesh(dp=4), example_inputs=case.batch, **options)


def before_and_after(parallel: ParallelModule) -> tuple[Schedule, Schedule]:
    """Without FREEs."""
    steps = {step.name: step.program for step in parallel.compiled.schedule_steps}
    return steps["hand out"].places[0], steps["gather ahead"].places[0]


@pytest.mark.parametrize("budget", [3.5, pytest.param(4.0, marks=pytest.mark.slow)])
def test_gradients_are_exact_and_memory_stays_within_the_budget(budget: float) -> None:
    case, parallel = compiled(budget)
    before, after = before_and_after(parallel)
    assert any(isinstance(each, Launch) and each.collective == "all_gather" for each in before.instructions)
    capacity = budget * sum(parameter.nbytes for parameter in case.model.parameters())
    last = parallel.compiled.schedule_steps[-2].program.places[0]
    without_frees = replace(last, instructions=tuple(each for each in last.instructions if not isinstance(each, Free)))
    state = parallel.summary()["memory"]["optimizer_state"]
    assert peak_bytes_on_processes(without_frees) <= max(capacity - state, peak_bytes_on_processes(before))
    assert parallel.verify(**case.batch)
    assert sum(isinstance(each, Run) for each in after.instructions) == sum(isinstance(each, Run) for each in before.instructions)


def test_with_more_memory_more_goes_together() -> None:
    given = program()
    (schedule,) = given.places
    signature = Signature(tuple(Input("constant", name, (4,), F32) for name in schedule.inputs), ())
    given = given.with_places([replace(schedule, signature=signature)])
    budgets = (MemoryBudget(1.0), MemoryBudget(peak_bytes_on_processes(schedule) + 2.0 * SIZE), MemoryBudget(math.inf))
    sizes = [GatherAhead(Cluster.ideal(), budget=budget).decide(given).bytes["all_gather dp"] for budget in budgets]
    assert sizes[0] < sizes[1] < sizes[2] == USUAL_BUCKET_BYTES
