"""Ops of our own in the models that people have, attention written out: all that can be is one, exact, and split as without them.

`docs/kernels.md` is the same as a table (`python -m benchmarks.zoo_kernels`).
"""

from __future__ import annotations

from itertools import product

import pytest

from benchmarks.zoo import ZOO
from benchmarks.zoo_kernels import MESHES, outcome

# A gate that is broadcast over the hidden dim, tables of angles that are trained: what the ops do not take.
LEFT = {"qwen2_moe": ("gate",)}
QUICK = {("llama", "tp2")}
CASES = [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow, id=", ".join(case)) for case in product(ZOO, MESHES)]


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_what_can_be_is_an_op_of_ours_exact_and_split(name: str, mesh: str) -> None:
    found = outcome(name, mesh)
    assert found.is_sound, str(found)
    missed = [text for text in found.left if not text.startswith(LEFT.get(name, ()))]
    assert not missed, missed
    assert found.fused
