"""A buffer that is zero by cancellation is measured by a share of all changed buffers; a really wrong one is still found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.runtime.verify.errors import errors_between
from autopar.runtime.verify.reference_run import Case, Results


class Centred(nn.Module):
    """The second norm sees values that the first has centred, so its running mean is zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.first = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.middle, self.second = nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centred = self.middle(self.first(self.inner(x)))
        return self.head(torch.relu(self.second(centred))).square().mean()


def test_a_running_mean_of_centred_values_is_rounding_alone() -> None:
    torch.manual_seed(0)
    model, x = Centred(), torch.randn(64, 8) + 1
    parallel = autopar.compile(model, autopar.virtual_mesh(dp=2, tp=2), example_inputs=(x,), backend="eager")
    assert isinstance(parallel, autopar.ParallelModule)
    report = parallel.verify(x, promote=True)
    assert report and report.buffer_errors["second.running_mean"] < 1e-9, str(report)
    assert parallel.verify(x), "nor in the model's own precision"
    assert parallel.summary()["flops_split"] == 1.0


def errors(found: dict[str, Any], wanted: dict[str, Any], before: dict[str, Any] | None = None) -> dict[str, float]:
    def results(values: dict[str, Any]) -> Results:
        return Results({}, {}, {name: torch.as_tensor(value) for name, value in values.items()})

    state = {name: torch.zeros_like(torch.as_tensor(value)) for name, value in (before or wanted).items()}
    return errors_between(results(found), results(wanted), Case(state, [], {}, 0, {})).buffers


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_the_floor_is_a_share_of_the_other_buffers(dtype: torch.dtype, tolerance: float) -> None:
    variance, rounding = torch.ones(4, dtype=dtype), torch.finfo(dtype).eps  # of which a running mean takes a tenth
    mean = torch.tensor([1e-2, -1e-2, 0, 0], dtype=dtype)
    noise = 0.1 * rounding * torch.tensor([1, -1, 0.5, 0.25], dtype=dtype)
    assert errors({"mean": noise, "var": variance}, {"mean": -noise, "var": variance})["mean"] < tolerance
    assert errors({"mean": noise}, {"mean": -noise})["mean"] == pytest.approx(2.0), "alone it has nothing to be measured by"
    for wrong in (torch.zeros_like(mean), mean * (1 + 2 * tolerance), mean + 1e-2):
        assert errors({"mean": wrong, "var": variance}, {"mean": mean, "var": variance})["mean"] > tolerance


def test_counts_are_compared_entry_by_entry_and_lend_no_floor() -> None:
    wanted = {"count": torch.tensor([10**12]), "mean": torch.tensor([1e-8], dtype=torch.float64)}
    assert errors({"count": torch.tensor([10**12 - 1]), "mean": torch.zeros(1, dtype=torch.float64)}, wanted) == {"count": 1.0, "mean": 1.0}


def test_a_buffer_that_one_side_leaves_unchanged_is_compared_with_what_it_was() -> None:
    assert errors({}, {"mean": torch.ones(2)}) == {"mean": 1.0}
    assert errors({"mean": torch.ones(2)}, {}, {"mean": torch.ones(2)})["mean"] > 1.0
