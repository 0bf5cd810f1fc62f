"""Microbatches meet before the first or after the last of them, and nowhere else."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import MicrobatchError
from autopar.graph.microbatches import is_summed_later, known_ahead, mixing_launches
from autopar.ir.collectives import is_launch
from autopar.ir.mesh import MICROBATCHES
from autopar.ir.program import Program
from autopar.passes.local.lower import Lower
from autopar.passes.local.separate_microbatches import SeparateMicrobatches
from tests.support.programs import passed

NUMBER = 4
X = torch.randn(8, 4)


class Centred(nn.Module):
    """Less the mean of the batch: a sum over all samples in the middle of the network."""

    def __init__(self, kind: str = "mean") -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        if self.kind == "mean":
            return (h - h.mean(0)).square().sum()
        if self.kind == "max":
            return (h / h.detach().amax(0)).square().sum()
        if self.kind == "sort":
            return (h.sort(0).values * x).sum()
        return h.square().sum()


def local(kind: str, number: int = NUMBER) -> Program:
    return passed(Centred(kind), (X,), Lower, number=number)


def over_microbatches(program: Program) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if is_launch(node) and MICROBATCHES in node.args[1]]


@pytest.mark.parametrize("kind", ["mean", "max"])
def test_each_microbatch_takes_its_own_estimate_and_that_is_said(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    before = local(kind)
    assert mixing_launches(before)
    with caplog.at_level(logging.WARNING, "autopar"):
        after = SeparateMicrobatches("own").apply(before)
    assert not mixing_launches(after) and not over_microbatches(after)
    assert len(caplog.records) == 1
    assert "each of the 4 microbatches takes its own" in caplog.text and "test_separate_microbatches.py:" in caplog.text


def test_what_is_a_sum_anyway_is_left_as_it_is_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    before = local("plain")
    with caplog.at_level(logging.WARNING, "autopar"):
        after = SeparateMicrobatches("own").apply(before)
    assert not caplog.records and not over_microbatches(after)


def test_counts_that_are_known_ahead_stay_sums_over_all() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.linear(x), y)

    after = SeparateMicrobatches("own").apply(passed(Weighted(), (X, torch.randint(0, 3, (8,))), Lower, number=NUMBER))
    counts = [node for node in after.graph.nodes if is_launch(node) and MICROBATCHES in node.args[1]]
    assert counts and set(counts) <= known_ahead(after)


@pytest.mark.parametrize("kind", ["mean", "max", "plain"])
def test_every_loss_and_gradient_is_a_sum_over_the_microbatches_afterwards(kind: str) -> None:
    after = SeparateMicrobatches("own").apply(local(kind))
    for item in after.signature.outputs:
        assert item.sharding is not None and is_summed_later(item.sharding), item


def test_an_op_that_needs_all_samples_at_once_is_refused_with_its_line() -> None:
    with pytest.raises(MicrobatchError, match=r"test_separate_microbatches.py:\d+.*needs all samples of the batch at once .* over 4 micro"):
        SeparateMicrobatches("own").apply(local("sort"))


def test_one_microbatch_is_the_whole_batch() -> None:
    before = local("mean", number=1)
    assert SeparateMicrobatches("own").apply(before) is before


class Penalised(nn.Module):
    """The sum over the samples is finished in the middle of the loss, and of each gradient, where the weights' own joins it."""

    def __init__(self, squared: bool) -> None:
        super().__init__()
        self.linear, self.squared = nn.Linear(4, 4), squared

    def forward(self, x: Tensor) -> Tensor:
        loss = self.linear(x).square().mean() + self.linear.weight.square().sum()
        return loss.square() if self.squared else loss


@pytest.mark.parametrize("squared", [False, True])
def test_what_is_exact_as_a_mean_is_no_warning(squared: bool, caplog: pytest.LogCaptureFixture) -> None:
    program = passed(Penalised(squared), (X,), Lower, number=NUMBER)
    assert mixing_launches(program)
    with caplog.at_level(logging.WARNING, "autopar"):
        SeparateMicrobatches("own").apply(program)
    assert ("mix microbatches" in caplog.text) == squared, caplog.text
