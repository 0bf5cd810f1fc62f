"""As many microbatches as were wanted, as far as they compute what the model does."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import MicrobatchError
from autopar.ir.padding import Padding
from autopar.ir.program import Program
from autopar.partition.whole_batch import Mixing
from autopar.passes.global_.choose_microbatches import ChooseMicrobatches
from autopar.passes.global_.find_atoms import FindAtoms
from autopar.pipeline.schedules import generate
from tests.support.programs import passed


class Root(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 4), kind

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        if self.kind == "pairs":
            return h.view(2, 4, 4).sum(1).square().sum()
        return h.sort(0).values[0].sum() if self.kind == "sort" else h.mean().sqrt() if self.kind == "root" else h.mean()


def program(kind: str, number: int = 8) -> Program:
    found = passed(Root(kind), (torch.randn(8, 4),), FindAtoms, number=1)
    return replace(found, order=generate("1f1b", 2, number))


@pytest.mark.parametrize(("kind", "number"), [("plain", 8), ("root", 1), ("sort", 1), ("pairs", 2)])
def test_the_largest_number_that_changes_nothing(kind: str, number: int, caplog: pytest.LogCaptureFixture) -> None:
    pass_, before = ChooseMicrobatches(), program(kind)
    with caplog.at_level(logging.WARNING, "autopar"):
        decision = pass_.decide(before)
    assert decision.number == number and bool(decision.found) == (number < 8) == ("instead of 8" in caplog.text)
    after = pass_.apply(before, decision)
    assert after.mesh.num_microbatches == number and after.mesh.ranks == before.mesh.ranks and after.graph is before.graph


@pytest.mark.parametrize(("kind", "number"), [("root", 8), ("sort", 8), ("pairs", 4)])
def test_a_number_that_was_asked_for_is_refused(kind: str, number: int) -> None:
    with pytest.raises(MicrobatchError, match=rf"(?s)num_microbatches={number} would change.*test_choose_microbatches\.py:\d+") as caught:
        ChooseMicrobatches(is_asked=True).decide(program(kind, number))
    assert not caught.value.found, "nothing to fall back on"
    assert ChooseMicrobatches(is_asked=True).decide(program("plain", 4)).number == 4


def test_a_number_of_which_each_would_compute_the_whole_batch_is_refused_too() -> None:
    """Exact, and for nothing: samples in groups of 2 × 4, which 8 microbatches cannot share."""
    with pytest.raises(MicrobatchError, match=r"(?s)=8 would compute the whole batch in each of them.*groups.*2 × 4.*num_microbatches=2"):
        ChooseMicrobatches(is_asked=True).decide(program("pairs", 8))


def test_a_number_that_the_batch_is_padded_for_names_the_samples_there_are() -> None:
    before = program("sort", 4)
    (item,) = before.signature.inputs_of("batch")
    padded = replace(item, shape=(6, 4), padding=Padding(((6,), (4,)), ((8,), (4,))))
    inputs = tuple(padded if each is item else each for each in before.signature.inputs)
    program_of_six = replace(before, signature=replace(before.signature, inputs=inputs))
    with pytest.raises(MicrobatchError, match="use a number that divides the 6 samples of a rank: for 4 the batch is padded"):
        ChooseMicrobatches(is_asked=True).decide(program_of_six)


def test_own_statistics_are_taken_where_there_are_any() -> None:
    decision = ChooseMicrobatches(is_asked=True, statistics="own").decide(program("root"))
    assert decision.number == 8 and decision.found
    for is_asked in (True, False):
        with pytest.raises(MicrobatchError, match="needs all samples of the batch at once") as caught:
            ChooseMicrobatches(is_asked, "own").decide(program("sort"))
        assert bool(caught.value.found) != is_asked, "one microbatch is what nobody asked against"


def test_what_turned_out_to_mix_runs_in_one() -> None:
    seen = (Mixing("sqrt", "aten.sqrt", "a sum over the batch"),)
    decision = ChooseMicrobatches(seen=seen).decide(program("plain"))
    assert (decision.number, decision.wanted, decision.found) == (1, 8, seen)
