"""Collectives in pieces beside their products: the same loss and gradients, in as many launches as were asked for, one ahead of another."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.driver.compiled import Compiled
from autopar.ir.instructions import Free, Launch, Run, Wait
from autopar.plans.decisions import Chunks
from autopar.runtime.module.parallel_module import ParallelModule
from tests.support.models import zoo

CASES = [("gpt2", 1, {"tp": 2}), ("gpt2", 1, {"dp": 2, "tp": 2}), ("llama", 1, {"dp": 2, "tp": 2}), ("gpt2", 2, {"pp": 2, "tp": 2})]


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Blocks(nn.Module):
    """Split as Megatron would: what `up` makes over tp, partial sums of `down` added up."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        return x.square().mean()


PINS = {"h.*.up.weight": ("tp", None), "h.*.down.weight": (None, "tp")}


def blocks(chunks: str | int, backend: str = "eager", **axes: int) -> tuple[ParallelModule, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(4, 6, 8)
    options = {"pins": PINS, "backend": backend, "collective_chunks": chunks}
    return autopar.compile(Blocks(), autopar.virtual_mesh(**axes), example_inputs=(x,), **options), x


def chunks_of(compiled: Compiled) -> Chunks:
    return next(step.decision for step in compiled.steps if isinstance(step.decision, Chunks))


def launches(compiled: Compiled) -> list[Launch]:
    return [each for each in compiled.schedules[0].instructions if isinstance(each, Launch)]


@pytest.mark.parametrize(("name", "num_layers", "axes"), CASES)
def test_models_are_exact_in_random_numbers_of_pieces(name: str, num_layers: int, axes: dict[str, int]) -> None:
    number = random.Random(f"{name}{axes}").choice((2, 4))
    case = getattr(zoo, name)(num_layers)
    options = {"backend": "eager", "collective_chunks": number}
    parallel = autopar.compile(case.model, autopar.virtual_mesh(**axes), example_inputs=dict(case.batch), **options)
    assert set(chunks_of(parallel.compiled).numbers.values()) == {number}
    assert parallel.verify(**case.batch, promote=True, tolerance=1e-9)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_there_are_so_many_launches_and_each_starts_before_the_next_piece(backend: str) -> None:
    (whole, _), (parallel, x) = blocks("off", tp=2), blocks(3, backend, tp=2)
    assert parallel.verify(x, tolerance=1e-5)
    number = len(chunks_of(parallel.compiled).numbers)
    assert number and len(launches(parallel.compiled)) == len(launches(whole.compiled)) + 2 * number
    instructions = [each for each in parallel.compiled.schedules[0].instructions if not isinstance(each, Free)]
    at = next(place for place, each in enumerate(instructions) if isinstance(each, Launch))
    kinds = [type(each) for each in instructions[at - 1 : at + 8]]
    assert kinds == [Run, Launch, Run, Launch, Run, Launch, Wait, Wait, Wait]
    runs = [each.fragment for each in instructions[at - 1 : at + 4] if isinstance(each, Run)]
    assert len(set(runs)) == 1, "equal pieces are one fragment"


def test_equal_layers_share_their_fragments() -> None:
    counts: list[int] = []
    for num_layers in (3, 5):
        x = torch.randn(4, 6, 8)
        mesh, options = autopar.virtual_mesh(tp=2), {"pins": PINS, "backend": "eager", "collective_chunks": 2}
        counts.append(len(autopar.compile(Blocks(num_layers), mesh, example_inputs=(x,), **options).compiled.schedule.fragments))
    assert counts[0] == counts[1]


def test_rows_that_do_not_divide_stay_whole_and_that_is_said() -> None:
    parallel, x = blocks(5, tp=2)
    decision = chunks_of(parallel.compiled)
    assert not decision.numbers and set(decision.reasons.values()) == {"whole: no dim of its rows can be cut into 5 equal parts"}
    assert "cut into 5 equal parts" in str(parallel.explain(detail="chunks"))
    assert parallel.verify(x, promote=True)


def test_with_microbatches_recomputation_and_a_plan_read_back() -> None:
    case = zoo.gpt2(2)
    mesh = autopar.virtual_mesh(dp=2, tp=2)
    options = {"backend": "eager", "num_microbatches": 2, "recompute": "full"}
    parallel = autopar.compile(case.model, mesh, example_inputs=dict(case.batch), collective_chunks=2, **options)
    assert chunks_of(parallel.compiled).numbers
    assert parallel.verify(**case.batch, promote=True)
    plan = autopar.Plan.from_json(parallel.plan.to_json())
    assert plan == parallel.plan and plan.chunks == chunks_of(parallel.compiled).numbers
    again = autopar.compile(case.model, mesh, example_inputs=dict(case.batch), plan=plan, **options)
    assert chunks_of(again.compiled).numbers == plan.chunks
    assert str(again.compiled.schedule) == str(parallel.compiled.schedule)
