"""Orders, picks and rarer distributions: as likely as torch's, and the same on any mesh."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import CaptureError
from tests.passes.forward.test_key_random import NUM, keyed, run


def test_distributions() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return (
            torch.randint_like(x, 10),
            torch.randint_like(x, -4, 4),
            torch.normal(1.0, 3.0, (NUM,)),
            torch.normal(x + 1, 3.0),
            torch.normal(1.0, x + 3),
            torch.normal(x + 1, x + 3),
            torch.empty_like(x).log_normal_(0.0, 0.5),
            torch.empty_like(x).geometric_(0.25),
            torch.empty_like(x).cauchy_(2.0, 0.5).sub(2.0).div(0.5).atan(),  # an angle, evenly spread
        )

    x = torch.zeros(NUM)
    eighth = math.exp(0.125)
    moments = [(4.5, 8.25**0.5), (-0.5, 5.25**0.5)] + [(1, 3)] * 4
    moments += [(eighth, eighth * (math.exp(0.25) - 1) ** 0.5), (4, 12**0.5), (0, math.pi * 12**-0.5)]
    results = run(keyed(function, x), x)
    assert not any(results[len(moments) :]), "no deviation is negative"
    for position, (result, (mean, deviation)) in enumerate(zip(results, moments, strict=False)):
        result = result.double()
        assert abs(float(result.mean()) - mean) < 5 * deviation / NUM**0.5, f"mean of draw {position}"
        assert abs(float(result.std()) / deviation - 1) < 0.02, f"deviation of draw {position}"
    assert set(results[0].unique().tolist()) == set(range(10)) and set(results[1].unique().tolist()) == set(range(-4, 4))
    shares = [float((results[7] == trials).double().mean()) for trials in (1, 2, 3)]
    torch.testing.assert_close(shares, [0.25, 0.1875, 0.140625], rtol=0, atol=2e-3)


def test_orders_are_permutations_and_each_is_as_likely() -> None:
    program = keyed(lambda x: (torch.randperm(4), torch.randperm(1000, dtype=torch.int32)), torch.ones(1))
    runs = [run(program, torch.ones(1), step=step) for step in range(2400)]
    assert torch.equal(runs[0][1].sort()[0], torch.arange(1000, dtype=torch.int32)) and not torch.equal(runs[0][1], runs[1][1])
    counts = Counter(tuple(order.tolist()) for order, _ in runs)
    assert len(counts) == 24 and sum((count - 100) ** 2 / 100 for count in counts.values()) < 60  # χ² of 23 degrees, 1 in 30,000


def test_picks_are_as_likely_as_their_weights() -> None:
    weights = torch.tensor([0.0, 1.0, 2.0, 5.0, 0.0]).expand(30_000, 5)
    program = keyed(
        lambda x: (torch.multinomial(x, 1), torch.multinomial(x, 3), torch.multinomial(x, 4, replacement=True), torch.multinomial(x[0], 2)),
        weights,
    )
    one, several, again, row, *violations = run(program, weights)
    assert violations and not any(violations)
    wanted = torch.tensor([0.0, 0.125, 0.25, 0.625, 0.0], dtype=torch.float64)
    for picked in (one, several[:, 0], *again.unbind(1)):
        torch.testing.assert_close(torch.bincount(picked.flatten(), minlength=5) / 30_000, wanted, rtol=0, atol=0.015, check_dtype=False)
    assert torch.equal(several.sort(1)[0], torch.tensor([1, 2, 3]).expand(30_000, 3)) and row.shape == (2,)
    # Once 3 is out, 1 and 2 are left.
    second = torch.bincount(several[several[:, 0] == 3][:, 1], minlength=5).double()
    torch.testing.assert_close(second / second.sum(), torch.tensor([0, 1 / 3, 2 / 3, 0, 0], dtype=torch.float64), rtol=0, atol=0.02)


class Mixed(nn.Module):
    """Mixup in forward, and negative samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(12, 32), nn.Linear(32, 6)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        order, share = torch.randperm(len(x)), torch.rand(len(x), 1)
        logits = self.outer(F.gelu(self.inner(share * x + (1 - share) * x[order])))
        negatives = torch.multinomial(logits.detach().softmax(-1), 2)
        columns = torch.multinomial(torch.ones(6), 4, replacement=True)
        loss = (share[:, 0] * F.cross_entropy(logits, labels, reduction="none")).mean()
        return loss + F.cross_entropy(logits, labels[order]) + logits.gather(1, negatives).mean() + logits[:, columns].square().mean()


@pytest.mark.parametrize("axes", [{"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_orders_and_picks_are_the_same_on_any_mesh(axes: dict[str, int]) -> None:
    batch = {"x": torch.randn(8, 12, dtype=torch.float64), "labels": torch.randint(0, 6, (8,))}
    parallel = autopar.compile(Mixed().double(), autopar.virtual_mesh(**axes), example_inputs=batch, backend="eager")
    parallel(**batch).backward()
    assert parallel.verify(**batch) and "all matmuls, convolutions and attention are split" in str(parallel.explain())


@pytest.mark.parametrize(
    "weights", [[0.0, 0.0, 0.0], [1.0, -0.5, 1.0], [1.0, math.nan, 1.0], [1.0, math.inf, 1.0]], ids=["none", "negative", "nan", "inf"]
)
def test_weights_that_torch_refuses_are_refused(weights: list[float]) -> None:
    given = torch.tensor([[1.0, 2.0, 3.0], weights])
    *_, violated = run(keyed(lambda x: torch.multinomial(x, 1), given), given)
    assert violated > 0


def test_dtypes_are_torchs_and_fine_draws_are_rounded_once() -> None:
    x = torch.zeros(2**14, dtype=torch.bfloat16)
    wide, narrow = run(keyed(lambda x: (torch.empty_like(x).cauchy_(), torch.empty_like(x).log_normal_()), x), x)
    assert wide.dtype == narrow.dtype == torch.bfloat16
    assert len(wide.unique()) > 1000 and float(wide.float().abs().max()) > 3000


@pytest.mark.parametrize(
    ("draw", "why"),
    [
        (lambda x: torch.randint_like(x, 5, 5), "from 5 to below 5, which is no integer"),
        (lambda x: torch.randint_like(x, 300, dtype=torch.uint8), "up to 299, which torch.uint8 does not hold"),
    ],
    ids=["empty", "too large"],
)
def test_ranges_that_torch_refuses_are_refused(draw: Callable[[Tensor], Tensor], why: str) -> None:
    with pytest.raises(CaptureError, match=why):
        keyed(draw, torch.ones(4))
