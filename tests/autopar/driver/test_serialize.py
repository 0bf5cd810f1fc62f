"""A compiled call as bytes, and back: the same schedule, the same facts, fragments that compute the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from autopar.driver.compiled import Compiled, Forms
from autopar.driver.serialize import CannotTravel, dumped, loaded
from autopar.runtime.module.parallel_module import ParallelModule
from tests.support.models.residual import batch, parallel_residual, piped
from tests.support.schedules import mlp_compiled


def no_forms() -> Forms:
    raise AssertionError("nobody asked for them")


def read(compiled: Compiled, content: bytes | None = None) -> Compiled:
    return loaded(content or dumped(compiled), compiled.signature.structure, compiled.signature.leaves, no_forms)


@pytest.fixture(params=["one stage", "two stages", "microbatches"])
def parallel(request: pytest.FixtureRequest) -> ParallelModule:
    return {"one stage": parallel_residual, "two stages": piped, "microbatches": lambda: parallel_residual(num_microbatches=2)}[
        request.param
    ]()


def test_what_ranks_run_is_the_same(parallel: ParallelModule) -> None:
    compiled = parallel.compiled
    found = read(compiled)
    assert str(found.schedule) == str(compiled.schedule) and found.fingerprint == compiled.fingerprint
    assert found.facts == compiled.facts and found.plan == compiled.plan and found.budget == compiled.budget
    assert found.schedule.buffers == compiled.schedule.buffers and found.order == compiled.order and found.schedules[0].fed
    for name, fragment in compiled.schedule.fragments.items():
        nodes = zip(fragment.module.graph.nodes, found.schedule.fragments[name].module.graph.nodes, strict=True)
        for node, other in nodes:
            assert (node.name, node.op, node.target, str(node.args), str(node.kwargs)) == (
                *(other.name, other.op, other.target),
                *(str(other.args), str(other.kwargs)),
            )
            assert forms(node.meta.get("val")) == forms(other.meta.get("val"))


def forms(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [forms(each) for each in value]
    return (value.shape, value.stride(), value.dtype, value.device) if isinstance(value, torch.Tensor) else value


def test_it_runs_to_the_same_bits(parallel: ParallelModule) -> None:
    wanted = step(parallel)
    (captured,) = parallel._captures.values()
    captured.compiled = read(captured.compiled)
    captured.fragments = type(captured.fragments)(captured.compiled.schedule.fragments, "eager")
    captured.places = type(captured.places)(captured.compiled, parallel._world.ranks)
    assert all(torch.equal(one, other) for one, other in zip(wanted, step(parallel), strict=True))


def step(parallel: ParallelModule) -> list[torch.Tensor]:
    parallel.zero_grad()
    loss = parallel(*batch())
    loss.backward()
    return [loss.detach(), *(each.grad.clone() for each in parallel.parameters() if each.grad is not None)]


def test_both_schedules_share_their_fragments() -> None:
    compiled = parallel_residual(optimizer=torch.optim.SGD).compiled
    found = read(compiled)
    assert found.updating is not None and found.updating.fragments is found.schedule.fragments
    assert str(found.updating) == str(compiled.updating)


def test_another_program_than_was_written_is_refused() -> None:
    compiled = mlp_compiled(parallel_residual().mesh)
    changed = replace(compiled, schedule=compiled.schedule.rewritten(lambda place, each: []))
    object.__setattr__(changed, "__class__", _Lying)
    with pytest.raises(CannotTravel, match="another program"):
        read(compiled, dumped(changed))


class _Lying(Compiled):
    fingerprint = "of another one"  # type: ignore[assignment]


def test_what_means_nothing_elsewhere_cannot_travel() -> None:
    compiled = parallel_residual().compiled
    with pytest.raises(CannotTravel):
        dumped(
            replace(compiled, budget=replace(compiled.budget, optimizer=replace(compiled.budget.optimizer, make=lambda parameters: None)))
        )
    with pytest.raises(CannotTravel):
        dumped(replace(compiled, plan=compiled.local.graph))  # type: ignore[arg-type]
