"""What ranks must ask for alike, as text that is equal where the options are."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.cost.hardware.cluster import Cluster
from autopar.cost.memory import MemoryBudget
from autopar.driver.options import Options
from autopar.ir.offload import Offload


def asked(**options: Any) -> dict[str, str]:
    return Options(Cluster.ideal(), **options).asked()


def test_a_folder_a_budget_and_an_order_may_be_a_ranks_own() -> None:
    away = Offload(activations="file", optimizer="host", folder="/")
    assert asked(offload=away) == asked(offload=Offload(activations="file", optimizer="host", folder="/tmp"))
    assert asked(budget=MemoryBudget(1e9)) == asked()
    assert asked(batch_dims={"x": 0, "y": 1}) == asked(batch_dims={"y": 1, "x": 0})


@pytest.mark.parametrize(
    ("options", "differing"),
    [
        ({"offload": Offload(activations="host")}, "offload"),
        ({"num_microbatches": 2}, "num_microbatches"),
        ({"batch_dims": {"x": 1}}, "batch_dims"),
        ({"recompute": "full"}, "recompute"),
        ({"schedule": "gpipe"}, "schedule"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_is_named_where_it_differs(options: dict[str, Any], differing: str) -> None:
    first, other = asked(), asked(**options)
    assert [name for name in first if first[name] != other[name]] == [differing]
