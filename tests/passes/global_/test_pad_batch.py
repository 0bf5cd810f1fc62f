"""Which batches are padded, and that nothing of the padding reaches a result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.ir.keys import BATCH
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ir.shares import UnequalShares
from autopar.passes.global_.pad_batch import PadBatch
from autopar.pipeline.schedules import generate
from tests.support.graphs import assert_unchanged, traced

aten = torch.ops.aten


def function(x: Tensor, w: Tensor) -> list[Tensor]:
    """A value of each sample, sums and maxima over samples, and ops that must have them all."""
    y = aten.add.Tensor(aten.mm.default(x, w), 1.0)
    return [y, aten.sum.dim_IntList(y, [0]), aten.amax.default(y, [0]), aten.cumsum.default(y, 0), aten.mm.default(aten.t.default(x), y)]


def program(samples: int, microbatches: int = 1, **axes: int) -> Program:
    made = traced(function, torch.randn(samples, 3), torch.randn(3, 4), mesh=Mesh(tuple(axes.items())), parameters=(1,))
    return replace(made, order=generate("1f1b", axes.get("pp", 1), microbatches)) if microbatches > 1 else made


@pytest.mark.parametrize(
    ("samples", "microbatches", "axes", "after"),
    [
        (7, 1, {"dp": 2}, 8),
        (5, 1, {"dp": 4, "tp": 2}, 8),
        (7, 4, {"pp": 2}, 8),
        (5, 2, {"pp": 2, "dp": 2}, 8),
        (9, 4, {"pp": 2}, 12),
        (8, 1, {"dp": 2}, None),
        (7, 1, {"tp": 2}, None),
        (1, 1, {"dp": 2}, None),  # nothing of one sample can be split
    ],
)
def test_to_a_multiple_of_ranks_and_microbatches(samples: int, microbatches: int, axes: dict[str, int], after: int | None) -> None:
    decision = PadBatch().decide(program(samples, microbatches, **axes))
    assert {name: each.after for name, each in decision.paddings.items()} == ({"0": ((after,), (3,))} if after else {})


@pytest.mark.parametrize("samples", [5, 7])
def test_results_are_of_the_samples_alone(samples: int) -> None:
    before = program(samples, dp=4)
    after = PadBatch().apply(before, PadBatch().decide(before))
    assert_unchanged(before, after, torch.randn(samples, 3), torch.randn(3, 4))
    (x, w), outputs = after.signature.inputs, after.signature.outputs
    assert x.padding is not None and w.padding is None
    assert [item.padding is not None for item in outputs] == [True, False, False, False, False]
    assert BATCH[after.placeholders[0]] == ((0,),)


def test_a_count_of_elements_is_one_of_samples() -> None:
    """Zeros in the padding would be counted."""
    before = traced(lambda x: aten.histc.default(x, 4, -1.0, 1.0), torch.zeros(5), mesh=Mesh((("dp", 2),)))
    after = PadBatch().apply(before, PadBatch().decide(before))
    assert after.signature.inputs[0].padding is not None
    assert_unchanged(before, after, torch.linspace(-0.9, 0.9, 5))


def test_real_ranks_with_unequal_shares_are_told_of_them() -> None:
    before = program(6, dp=2)
    shares = UnequalShares(((0, 0, (1, 5)),))
    chosen = PadBatch(shares)
    after = chosen.apply(before, chosen.decide(before))
    assert [item.shares for item in after.signature.inputs] == [(1, 5), ()]
    assert [(item.shares, item.batch_dim) for item in after.signature.outputs][:2] == [((1, 5), 0), ((), None)]
    assert not chosen.decide(before).paddings


def test_an_even_batch_is_left_as_it_is() -> None:
    before = program(8, dp=2)
    assert PadBatch().apply(before, PadBatch().decide(before)) is before


class TwoViews(nn.Module):
    """Each of 2 · B rows is told from all the others: its label is a row, so that classes are padded where samples are, in their middle."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(10, 8)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        rows = torch.cat((self.inner(one), self.inner(other)))
        labels = torch.arange(len(rows)).roll(len(one))
        return F.cross_entropy(rows @ rows.T, labels)


@pytest.mark.parametrize("samples", [4, 5, 7])
@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_labels_that_are_samples(samples: int, kernels: str) -> None:
    batch = {"one": torch.randn(samples, 10), "other": torch.randn(samples, 10)}
    parallel = autopar.compile(TwoViews(), autopar.virtual_mesh(dp=2), example_inputs=batch, backend="eager", kernels=kernels)
    assert parallel.verify(promote=True, **batch).worst < 1e-9


class Numbered(nn.Module):
    """Reads, or writes, rows by ids that it makes of how many samples there are: in the padding they name no row."""

    def __init__(self, end: Callable[[Numbered, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.table, self.end = nn.Linear(10, 8), nn.Embedding(7, 8), end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self, self.inner(x), torch.arange(len(x)))


NUMBERED: dict[str, Callable[[Numbered, Tensor, Tensor], Tensor]] = {
    "embedding": lambda m, h, ids: (m.table(ids) * h).mean(),
    "from the end": lambda m, h, ids: (m.table(6 - ids) * h).mean(),
    "counted": lambda m, h, ids: (m.table(torch.ones_like(ids).cumsum(0) - 1) * h).mean(),
    "selected": lambda m, h, ids: (m.table.weight.index_select(0, ids) * h).mean(),
    "gathered": lambda m, h, ids: h.gather(1, (ids + 1)[:, None]).tanh().sum(),
    "added": lambda m, h, ids: h.new_zeros(1, 8).index_add(0, ids // 7, h).tanh().sum(),
    "scattered": lambda m, h, ids: h.new_zeros(1, 8).scatter_add(0, (ids // 7)[:, None].expand(-1, 8), h).tanh().sum(),
    "put": lambda m, h, ids: h.new_zeros(1, 8).index_put((ids // 7,), h, accumulate=True).tanh().sum(),
}


@pytest.mark.parametrize("name", NUMBERED)
def test_ids_in_the_padding_name_a_row(name: str) -> None:
    model, x = Numbered(NUMBERED[name]), torch.randn(7, 10)
    parallel = autopar.compile(model, autopar.virtual_mesh(dp=2), example_inputs=(x,), backend="eager")
    assert parallel.verify(x, promote=True).worst < 1e-9
    assert parallel.compiled.signature.inputs_of("batch")[0].padding is not None
