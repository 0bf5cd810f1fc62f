"""Where microbatches would come to something else than the whole batch: found on the program, each place with what it needs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.ir.keys import Source
from autopar.ir.program import Program
from autopar.partition.whole_batch import MicrobatchDecision, Mixing, mixing, refusal, undivided
from autopar.passes.global_.find_atoms import FindAtoms
from tests.support.programs import passed

X, Y = torch.randn(8, 4), torch.randint(0, 4, (8,))
SUM, MAXIMUM, SAMPLES = "a sum over the batch", "a maximum over the batch", "all samples of the batch at once"


class Ends(nn.Module):
    """A layer, a count in a buffer, and what `end` makes of its output."""

    def __init__(self, end: Callable[[Ends, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.end = nn.Linear(4, 4), end
        self.register_buffer("count", torch.zeros(4))
        self.count: Tensor

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.end(self, self.linear(x), y)


def program(end: Callable[[Ends, Tensor, Tensor], Tensor]) -> Program:
    return passed(Ends(end), (X, Y), FindAtoms, number=4)


def cross_entropy(module: Ends, h: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(h, y)


def test_a_loss_over_tokens_a_penalty_and_their_sum_need_no_whole_batch() -> None:
    def end(module: Ends, h: Tensor, y: Tensor) -> Tensor:
        return 2 * (cross_entropy(module, h, y) + module.linear.weight.square().sum()) + 1

    assert not mixing(program(end), 4)


@pytest.mark.parametrize(
    ("end", "needs"),
    [
        (lambda m, h, y: h.mean().sqrt(), SUM),
        (lambda m, h, y: (h.mean() + m.linear.weight.sum()) ** 2, SUM),
        (lambda m, h, y: (h - h.sum(0)).abs().sum(), SUM),
        (lambda m, h, y: (h / h.detach().amax(0)).sum(), MAXIMUM),
        (lambda m, h, y: (h @ h.t()).exp().sum(), SAMPLES),
        (lambda m, h, y: (h.sort(0).values * m.linear.weight[0]).sum(), SAMPLES),
    ],
)
def test_the_first_place_is_the_forwards_and_says_what_it_needs(end: Callable[[Ends, Tensor, Tensor], Tensor], needs: str) -> None:
    found = mixing(program(end), 4)[0]
    assert found.needs == needs and found.has_estimate == (needs != SAMPLES)
    assert found.source is not None and found.source.file == __file__ and f"test_whole_batch.py:{found.source.line}" in str(found)


def test_one_microbatch_is_the_whole_batch() -> None:
    assert not mixing(program(lambda m, h, y: h.mean().sqrt()), 1)


def test_groups_of_samples_that_a_number_does_not_divide() -> None:
    pairs = program(lambda m, h, y: h.view(2, 4, 4).sum(1).square().sum())
    (found,) = undivided(pairs, 8)
    assert "input '0' lie in groups" in str(found) and str(found).endswith("2 × 4") and not found.has_estimate
    assert list(MicrobatchDecision(2, 8, (found,)).lines())[0] == "2 instead of 8, which would compute the whole batch in each of them:"
    assert not undivided(pairs, 4) and mixing(pairs, 4) and not undivided(pairs, 2) and not mixing(pairs, 2)
    assert undivided(pairs, 4, num_shares=2) and not undivided(pairs, 2, num_shares=2), "shares take groups of the same kind"


def test_sums_added_to_a_buffer_are_exact_and_what_else_becomes_of_it_is_not() -> None:
    def counted(module: Ends, h: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            module.count += (h > 0).to(torch.float32).sum(0)
        return h.sum()

    def moved(module: Ends, h: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            module.count.mul_(0.9).add_(h.sum(0))
        return h.sum()

    assert not mixing(program(counted), 4)
    assert [(each.node, each.needs) for each in mixing(program(moved), 4)] == [("count", "a buffer")]


def test_counts_of_what_is_known_ahead_may_be_used_at_will() -> None:
    assert not mixing(program(lambda m, h, y: h.sum() / (y > 1).sum().to(h.dtype).sqrt()), 4)


@pytest.mark.parametrize(
    "end",
    [
        lambda m, h, y: ((h.sum(1) - y) ** 2).sum() / ((y - y.to(h.dtype).mean()) ** 2).sum(),
        lambda m, h, y: ((h.sum(1) - y) / ((y - y.to(h.dtype).mean()).square().mean() + 1e-5).sqrt()).sum(),
        lambda m, h, y: nn.functional.cross_entropy(h, y, weight=1 / nn.functional.one_hot(y, h.shape[1]).sum(0).clamp(min=1).to(h.dtype)),
    ],
)
def test_a_count_of_what_a_count_is_part_of_is_not_known_ahead(end: Callable[[Ends, Tensor, Tensor], Tensor]) -> None:
    found = mixing(program(end), 4)
    assert [each.needs for each in found] == ["a sum over the batch of what another is part of"] and not found[0].has_estimate


def test_a_decision_and_a_refusal_name_places_and_ways_out() -> None:
    root, sort = Mixing("sqrt", "aten.sqrt", SUM, Source("a.py", 3, "x.sqrt()")), Mixing("sort", "aten.sort", SAMPLES)
    assert list(MicrobatchDecision(8, 8).lines()) == []
    lines = list(MicrobatchDecision(1, 8, (root,)).lines())
    assert lines[0] == "1 instead of 8, which would change what the model computes:"
    assert lines[1] == "  a.py:3 (`x.sqrt()`): aten.sqrt needs a sum over the batch" and "another computation" in lines[2]
    assert 'microbatch_statistics="own"' not in "".join(MicrobatchDecision(1, 8, (root, sort)).lines())
    assert 'accepted by microbatch_statistics="own"' in MicrobatchDecision(8, 8, (root,)).lines()
    assert "use num_microbatches=2" in refusal(8, 2, (root,)) and 'microbatch_statistics="own"' in refusal(8, 2, (root,))
    assert "and 2 more" in refusal(8, 2, (root,) * 6) and "own" not in refusal(8, 2, (sort,))
