"""offload="auto": under a budget the faster of moving what the backward reads and of what else fits, and nothing without need."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.hardware.links import Link
from autopar.cost.memory import MemoryBudget
from autopar.driver.compiled import Compiled
from autopar.driver.options import Options
from autopar.errors import MemoryBudgetError
from autopar.ir.instructions import Copy
from autopar.reports.weighed import weighed
from autopar.runtime.module.parallel_module import ParallelModule
from tests.support.models.zoo import Case, gpt2

AUTO = autopar.Offload(activations="auto", smallest_bytes=0)
FAST, SLOW = Link(0.0, 1e15), Link(1e-2, 1e6)


def cluster(host: Link) -> Cluster:
    return replace(Cluster.named("8xH100"), copies=(("host", host), ("file", host)))


@cache
def case() -> Case:
    torch.manual_seed(0)
    return gpt2(4)


def compiled(host: Link, **options: Any) -> ParallelModule:
    kept: dict[str, Any] = {"backend": "eager", "cluster": cluster(host), "offload": AUTO, **options}
    return autopar.compile(case().model, autopar.virtual_mesh(tp=1), example_inputs=case().batch, **kept)


@cache
def peak() -> float:
    return compiled(FAST, offload=None).memory().peak_bytes


@cache
def within(host: Link) -> ParallelModule:
    return compiled(host, memory_budget=0.8 * peak())


def copies(parallel: ParallelModule) -> int:
    return sum(isinstance(each, Copy) for schedule in parallel.compiled.schedules for each in schedule.instructions)


@pytest.mark.parametrize("host", [FAST, SLOW], ids=["fast", "slow"])
def test_what_is_cheaper_brings_the_step_within_the_budget(host: Link) -> None:
    parallel = within(host)
    assert (copies(parallel) > 0) == (host is FAST)
    assert parallel.memory().peak_bytes <= 0.8 * peak()
    assert parallel.verify(**case().batch)
    if host is FAST:
        assert "a step on paper with activations in host memory" in parallel.explain(detail="offload")
        assert parallel.compiled.offload == replace(AUTO, activations="host")


def test_without_need_nothing_is_moved() -> None:
    for budget in (None, 2 * peak()):
        parallel = compiled(FAST, memory_budget=budget)
        assert not copies(parallel) and parallel.compiled.offload is None


def test_what_alone_fits_is_taken_and_said() -> None:
    parallel = compiled(FAST, memory_budget=0.8 * peak(), recompute="none")
    assert copies(parallel) and "nothing else fits" in parallel.explain(detail="offload")


def test_where_neither_fits_the_refusal_is_of_what_is_moved() -> None:
    def refused(options: Options) -> Compiled:
        raise MemoryBudgetError(str(options.offload and options.offload.activations))

    with pytest.raises(MemoryBudgetError, match="host"):
        weighed(Options(cluster(FAST), offload=AUTO, budget=MemoryBudget.of("1kB")), refused, None)


def test_a_plan_says_where_they_lie() -> None:
    """With one nothing is weighed, and no budget is asked for."""
    first = within(FAST)
    assert copies(first) and copies(compiled(SLOW, plan=first.plan))
    assert not copies(compiled(FAST, plan=compiled(SLOW, offload=None).plan))


def test_other_places_are_kept() -> None:
    parallel = compiled(
        FAST, offload=replace(AUTO, optimizer="host"), optimizer=torch.optim.AdamW, memory_budget=0.9 * peak(), recompute="none"
    )
    assert parallel.compiled.offload is not None and parallel.compiled.offload.optimizer == "host"


def test_prices_of_rank_0_count() -> None:
    moved, kept = within(FAST).compiled, within(SLOW).compiled
    options = Options(cluster(FAST), offload=AUTO, budget=moved.budget)
    for theirs, taken in (("2.0 1.0", kept), ("1.0 2.0", moved)):
        found = weighed(options, lambda each: moved if each.offload else kept, lambda made, text=theirs: text)
        assert found.fingerprint == taken.fingerprint


def on_a_rank(budget: float) -> tuple[str, bool]:
    """All but rank 0 find moving dear: its prices count."""
    torch.manual_seed(0)
    found, mesh = gpt2(4), init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    here = cluster(FAST if dist.get_rank() == 0 else SLOW)
    parallel = autopar.compile(
        found.model, mesh, example_inputs=found.batch, backend="eager", cluster=here, offload=AUTO, memory_budget=budget
    )
    parallel(**found.batch).loss.backward()
    return parallel.compiled.fingerprint, copies(parallel) > 0


def test_ranks_take_one_decision(gloo_ranks: Any) -> None:
    plain = autopar.compile(case().model, autopar.virtual_mesh(tp=4), example_inputs=case().batch, backend="eager", cluster=cluster(FAST))
    answers = gloo_ranks.run(on_a_rank, 0.8 * plain.memory().peak_bytes)
    assert len(set(answers)) == 1 and answers[0][1]
