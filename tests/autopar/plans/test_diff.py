from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from autopar.ir.freedom import Freedom
from autopar.ir.mesh import Mesh
from autopar.ir.precision import MixedPrecision
from autopar.ir.sharding import Sharding, Strategy
from autopar.ir.zero import ZeRO
from autopar.pipeline.schedules import generate
from autopar.plans.diff import changes
from autopar.plans.plan import Offloaded, Plan, PlannedInput

MESH = Mesh((("dp", 2), ("tp", 2)))
COLUMN, ROW = (Sharding(splits) for splits in (((), ("tp",)), (("tp",), ())))


def plan(sharding: Sharding, factor: str, *more: str) -> Plan:
    parameters = {f"h.{i}.fc.weight": PlannedInput(((4,), (8,)), sharding) for i in range(3)} | {
        "norm": PlannedInput(((4,),), Sharding(((),)))
    }
    ops = {f"forward h.{i}.fc aten.mm 0": Strategy((), (sharding,), (("tp", factor),)) for i in range(3)}
    return Plan(MESH, parameters, strategies=ops | {key: Strategy((), ()) for key in more})


def test_repeated_layers_are_one_line() -> None:
    found = plan(COLUMN, "n").diff(plan(ROW, "k"))
    assert found and len(found.parameters) == 3 and len(found.ops) == 3
    assert str(found).splitlines() == [
        "3 of 4 parameters and 3 of 3 ops differ",
        "parameters",
        "  h.*.fc.weight   [4, 8@tp] → [4@tp, 8]   × 3",
        "ops",
        "  forward h.*.fc aten.mm 0   tp:n → tp:k   × 3",
    ]


def test_sizes_of_buckets_are_shown() -> None:
    before, after = (replace(plan(COLUMN, "n"), buckets=sizes) for sizes in ({"dp": 4_000_000, "tp": 10}, {"dp": 2_000_000, "tp": 10}))
    found = before.diff(after)
    assert found and str(found).splitlines()[1:] == ["buckets", "  dp   4.0 MB → 2.0 MB"]
    assert str(before.diff(replace(before, buckets={"tp": 10}))).endswith("dp   4.0 MB → none")


# Of each field of a plan another value.
OTHERWISE: dict[str, Any] = {
    "mesh": Mesh((("dp", 4),)),
    "parameters": {},
    "inputs": {"batch 0": PlannedInput(((4,),), Sharding((("dp",),)))},
    "strategies": {},
    "kernels": {"forward h.0 autopar.attention 0": "triton"},
    "schedule": generate("1f1b", 2, 4),
    "cuts": ("forward h.1.fc aten.mm 0",),
    "freedom": Freedom(shards_parameters=True, zero=ZeRO(3)),
    "pinned": ("h.0",),
    "buckets": {"dp": 1},
    "precision": MixedPrecision(param=torch.bfloat16),
    "recomputed": ("forward h.0.act aten.gelu.default 0", "forward h.1.act aten.gelu.default 0"),
    "offloaded": Offloaded("host", (("gelu@0",),)),
    "chunks": {"forward h.0 all_gather 0": 2},
    "stored": "file",
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERWISE)
def test_each_decision_is_compared(name: str) -> None:
    one = plan(COLUMN, "n")
    other = replace(one, **{name: OTHERWISE[name]})
    for found in (one.diff(other), other.diff(one)):
        assert found and len(str(found).splitlines()) > 1
    assert str(one.diff(other)) != str(other.diff(one)) and not other.diff(other)


def test_no_field_is_left_out() -> None:
    assert {each.name for each in fields(Plan)} == {*OTHERWISE, "reasons", "fingerprint"}


def test_what_is_computed_again_is_one_line() -> None:
    one = plan(COLUMN, "n")
    found = str(one.diff(replace(one, recomputed=OTHERWISE["recomputed"])))
    assert found.splitlines()[1:] == ["recomputed", "  forward h.*.act aten.gelu.default 0   kept → computed again   × 2"]


def test_equal_plans_do_not_differ() -> None:
    found = plan(COLUMN, "n").diff(plan(COLUMN, "n"))
    assert not found and str(found) == "the plans are the same"


def test_what_one_plan_lacks_is_absent() -> None:
    found = plan(COLUMN, "n").diff(plan(COLUMN, "n", "forward h.0 pinned 0"))
    assert str(found).splitlines()[-1] == "  forward h.0 pinned 0   absent → replicated"
    assert [change.after for change in plan(COLUMN, "n", "forward x 0").diff(plan(COLUMN, "n")).ops] == [""]


def test_what_reads_the_same_but_differs_is_spelt_out() -> None:
    (change,) = changes({"op": Strategy((), (COLUMN,))}, {"op": Strategy((), (ROW,))})
    assert change.before != change.after and "tp" in change.before
