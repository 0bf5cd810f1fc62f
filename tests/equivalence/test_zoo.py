"""The models that people have: every one exact on every mesh, with its work split.

Tiny, with random weights, planned on the ideal cluster, where links are free, so that all that can be split is. `docs/zoo.md`
is the same as a table (`python -m benchmarks.zoo`).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from benchmarks.zoo import MESHES, TOLERANCE, ZOO, Outcome, document, outcome
from benchmarks.zoo_timm import HEAD, row, with_rows

CONVNETS = ("convnext", "resnet")
# Tokens of the whole batch are sorted by expert: dp does not split what follows.
SORTED = ("mixtral",)
# What the others do not show: experts, a scan, a learned bias, gathers, a backward of the model's own.
QUICK = {(name, "dp2×tp2") for name in ("mixtral", "mamba")}
CASES = [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow, id=", ".join(case)) for case in product(ZOO, MESHES)]


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_loss_and_gradients_are_the_originals_and_work_is_split(name: str, mesh: str) -> None:
    found = outcome(name, mesh)
    assert not found.failure, found.failure
    assert found.error is not None and found.error <= TOLERANCE, str(found)
    least = 0.90 if name in CONVNETS else 0.60 if name in SORTED and mesh != "tp4" else 0.98
    assert found.flops_split is not None and found.flops_split >= least, str(found)


def test_the_pages_keep_what_others_wrote() -> None:
    found = Outcome("vgg", "tp2", 1.0, 1e-15, 1.0)
    page = with_rows("A note.\n", [row(replace(found, flops_split=0.5)), row(replace(found, name="resnet"))]) + "\nAnother.\n"
    first, second = row(found), row(replace(found, mesh="dp2×tp2"))
    lines = with_rows(page, [second, first]).splitlines()
    assert lines == ["A note.", *HEAD, first, row(replace(found, name="resnet")), second, "", "Another."]
    assert "(zoo-timm.md)" in document([replace(found, mesh=mesh) for mesh in MESHES])
