"""Values in words: equal for equal ones, and none for what only its author knows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from autopar.cache.describe import NotKnown, described
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.memory import MemoryBudget
from autopar.driver.options import Options
from autopar.ir.mesh import virtual_mesh
from autopar.ir.offload import Offload
from autopar.ir.precision import MixedPrecision
from autopar.pipeline.order import pipeline_order

DIFFERENT = [
    1,
    1.0,
    True,
    "1",
    None,
    (1,),
    (1, 1),
    ((1,), 1),
    {"a": 1},
    {"a": 1.0},
    {1},
    -0.0,
    0.0,
    torch.float16,
    torch.bfloat16,
    b"1",
    ...,
]


def test_different_values_have_different_words() -> None:
    assert len({described(each) for each in DIFFERENT}) == len(DIFFERENT)


def test_equal_values_have_equal_words() -> None:
    assert described({3, 1, 2}) == described({2, 3, 1})
    assert described(Cluster.named("8xH100")) == described(Cluster.named("8xH100"))


def options(**changes: Any) -> Options:
    mesh = virtual_mesh(pp=2)
    given = Options(
        Cluster.named("8xH100"),
        schedule=pipeline_order("1f1b", mesh.with_microbatches(2)),
        precision=MixedPrecision(),
        offload=Offload(activations="host"),
        budget=MemoryBudget.of("1GB", "adamw"),
        pins={"*.weight": (None, ..., "tp")},
        batch_dims={"x": 1},
    )
    return replace(given, **changes)


def test_all_options_have_words() -> None:
    assert described(options()) == described(options())
    for change in (
        {"recompute": "full"},
        {"pins": {"*.weight": (None, "tp")}},
        {"budget": MemoryBudget.of("2GB", "adamw")},
        {"device": "cuda"},
    ):
        assert described(options(**change)) != described(options())


@dataclass(frozen=True)
class Theirs:
    number: int = 1


@pytest.mark.parametrize("value", [lambda: 1, Theirs(), object(), [Theirs()], {"a": print}, torch.Generator(), torch.ones(1), Theirs])
def test_what_only_its_author_knows_is_refused(value: Any) -> None:
    with pytest.raises(NotKnown):
        described(value)
