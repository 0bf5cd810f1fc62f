"""What `explain` says of buckets: how many there are, how large, and why."""

from __future__ import annotations

import re

import pytest
import torch

import autopar
from autopar.reports.buckets import bucket_lines
from tests.support.models.zoo import ZOO


def lines(**options: object) -> list[str]:
    torch.manual_seed(0)
    case = ZOO["gpt2"](2 if "num_microbatches" in options else 1)
    parallel = autopar.compile(case.model, example_inputs=case.batch, backend="eager", **options)  # type: ignore[arg-type]
    found = list(bucket_lines(parallel.compiled))
    assert all(f"  {line}" in parallel.explain(detail="all").splitlines() for line in found)
    return found


def test_sizes_have_reasons_and_the_cost_of_the_next_best() -> None:
    joined, why = lines(mesh=autopar.virtual_mesh(dp=2), cluster="cpu")
    assert re.fullmatch(
        r"over dp, up to [\d.]+ kB: \d+ collectives in \d+, \d+ alone|over dp, up to [\d.]+ kB: \d+ collectives in \d+", joined
    )
    assert re.fullmatch(
        r"    starts of \d+ buckets take [\d.]+ ms, the last, which nothing hides, [\d.]+ ms, of which hiding it would save \d+%; "
        r"in \d+ of .* it would be [\d.]+ ms more",
        why,
    )


@pytest.mark.parametrize("axes", [{"pp": 2, "dp": 2}])
def test_each_stage_has_a_line(axes: dict[str, int]) -> None:
    found = lines(mesh=autopar.virtual_mesh(**axes), num_microbatches=2)
    assert [line[:8] for line in found[:2]] == ["stage 0,", "stage 1,"] and "DistributedDataParallel" in found[2]
    assert len(found) == 3


def test_gathers_are_told_of_too() -> None:
    found = lines(mesh=autopar.virtual_mesh(dp=4), cluster="cpu", zero=3)
    assert any(line.startswith(("all_gather over dp, up to", "all_gather dp: ")) for line in found), found
