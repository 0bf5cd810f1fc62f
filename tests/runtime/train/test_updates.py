"""Gradients of parameters that several stages hold, or that share memory, become one gradient each, once all ranks have theirs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import autopar
from autopar.ir.instructions import Update
from autopar.runtime.train.updates import Updates
from tests.support.models.trained import SmallGpt, batch, small_gpt


def test_each_parameter_is_applied_once_when_its_last_rank_has_come() -> None:
    model, reference = small_gpt(), small_gpt()
    parallel = autopar.compile(model, autopar.virtual_mesh(pp=2), example_inputs=batch(0), backend="eager", optimizer=torch.optim.SGD)
    call, *_ = parallel.start((), batch(0), updates=True)
    applied, taken = list[str](), list[tuple[int, str]]()

    def apply(names: Sequence[str]) -> None:
        applied.extend(names)

    updates = Updates(call, dict(model.named_parameters()), apply)

    def take(rank: int, instruction: Update, gradients: list[torch.Tensor]) -> None:
        before = len(applied)
        updates.take(rank, instruction, gradients)
        taken.extend((rank, name) for name in applied[before:])

    with torch.no_grad():
        call.whole_step(take)
    assert sorted(applied) == sorted(name for name, _ in model.named_parameters())
    # The tied embedding is with both stages.
    assert {rank for rank, _ in taken} == {0, 1}
    _check(model, reference)


def test_what_is_kept_is_added_to_what_is_there() -> None:
    model, reference = small_gpt(), small_gpt()
    parallel = autopar.compile(model, autopar.virtual_mesh(dp=2), example_inputs=batch(0), backend="eager", optimizer=torch.optim.SGD)
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    call, *_ = parallel.start((), batch(0), updates=True)
    updates = Updates(call, dict(model.named_parameters()), None)
    with torch.no_grad():
        call.whole_step(updates.take)
        assert all(torch.equal(each.grad, torch.ones_like(each)) for each in model.parameters() if each.grad is not None)
        updates.commit()
    for each in model.parameters():
        assert each.grad is not None
        each.grad -= 1
    _check(model, reference)


def _check(model: SmallGpt, reference: SmallGpt) -> None:
    reference(**batch(0)).backward()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-12)
