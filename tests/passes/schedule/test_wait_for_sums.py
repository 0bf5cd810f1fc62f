"""What is scattered is waited for while the backward goes on: no more under way than is said, less memory, the same gradients."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import autopar
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.schedule_memory import peak_bytes_on_processes
from autopar.ir.instructions import Copy, Launch, Run, Send, Wait
from autopar.ir.mesh import Mesh
from autopar.ir.schedule import Schedule
from autopar.passes.schedule import wait_for_sums
from autopar.passes.schedule.wait_for_sums import WaitForSums, with_most_under_way
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.runtime.module.parallel_module import ParallelModule
from tests.support.models.zoo import ZOO, Case
from tests.support.schedules import retyped, schedule_of, whole

STEP = """
LAUNCH reduce_scatter sum dp (a) -> p
LAUNCH reduce_scatter sum tp (a) -> other
RUN f (a) -> (b)
LAUNCH reduce_scatter sum dp (b) -> q
RUN f (b) -> (c)
LAUNCH reduce_scatter sum dp (c) -> r
RUN f (c) -> (d)
WAIT p
WAIT q
WAIT r
WAIT other
"""


def program(text: str = STEP) -> ScheduleProgram:
    schedule = schedule_of(text, "a", "p q r other d")
    types = dict.fromkeys(schedule.buffers, ((8,), torch.float32)) | dict.fromkeys(("p", "q", "r", "other"), ((4,), torch.float32))
    return whole(Mesh((("dp", 2), ("tp", 2))), retyped(schedule, types))


def lines(given: ScheduleProgram) -> list[str]:
    return [str(each) for each in given.places[0].instructions]


def test_one_is_waited_for_once_so_many_more_are_launched_over_its_axes() -> None:
    before = STEP.split("\n")[1:-1]
    found = lines(with_most_under_way(program(), 1))
    assert found == [*before[:4], "WAIT p", *before[4:6], "WAIT q", before[6], "WAIT r", "WAIT other"]
    given = program()
    assert with_most_under_way(given, 3) is given


def test_what_is_waited_for_sooner_stays_there() -> None:
    text = "LAUNCH reduce_scatter sum dp (a) -> p\nWAIT p\nLAUNCH reduce_scatter sum dp (a) -> q\nRUN f (p) -> (d)\nWAIT q"
    given = program(text)
    assert with_most_under_way(given, 1) is given


@cache
def compiled(cluster: str, pp: int = 1) -> tuple[Case, ParallelModule]:
    torch.manual_seed(0)
    case = ZOO["llama"](8)
    mesh = autopar.virtual_mesh(dp=2) if pp == 1 else autopar.virtual_mesh(pp=pp, dp=2)
    options = {"backend": "eager", "cluster": cluster, "zero": 3}
    return case, autopar.compile(case.model, mesh, example_inputs=case.batch, **options)


def step(parallel: ParallelModule, name: str) -> ScheduleProgram:
    return next(each.program for each in parallel.compiled.schedule_steps if each.name == name)


def most_under_way(schedule: Schedule) -> int:
    now, most = set[str](), 0
    for each in schedule.instructions:
        if isinstance(each, Launch) and each.collective == "reduce_scatter":
            now.add(each.name)
        elif isinstance(each, Wait):
            now.discard(each.target)
        most = max(most, len(now))
    return most


@pytest.mark.parametrize("pp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_step_takes_less_memory_and_gives_the_same_gradients(pp: int) -> None:
    case, parallel = compiled("cpu", pp)
    before, after = step(parallel, "overlap communication"), step(parallel, "wait for sums")
    for old, new in zip(before.places, after.places, strict=True):
        assert most_under_way(new) < most_under_way(old) or pp > 1, "a stage that another one waits for may not wait"
        assert peak_bytes_on_processes(new, over_gloo=True) <= peak_bytes_on_processes(old, over_gloo=True)
        assert sorted(map(str, new.instructions)) == sorted(map(str, old.instructions))
    assert parallel.verify(**case.batch)


@pytest.mark.parametrize(("last", "is_moved"), [(1.0, True), (100.0, False)])
def test_compute_is_not_kept_waiting_where_a_step_would_be_longer_for_it(
    last: float, is_moved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum takes ten seconds, a fragment one, the last one `last`: a long one would hide all sums, if it could begin at once."""
    given = program(STEP.replace("RUN f (c) -> (d)", "RUN last (c) -> (d)"))

    def seconds(each: Run | Send | Launch | Copy) -> float:
        return (last if each.fragment == "last" else 1.0) if isinstance(each, Run) else 10.0

    monkeypatch.setattr(wait_for_sums, "fragment_seconds", lambda program, cost: seconds)
    chosen = WaitForSums(Cluster.named("cpu"))
    decision = chosen.decide(given)
    assert decision.number == (2 if is_moved else None)
    assert lines(chosen.apply(given, decision)) == lines(with_most_under_way(given, 2) if is_moved else given)
