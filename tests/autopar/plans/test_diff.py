from __future__ import annotations

from dataclasses import replace

from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Sharding, Strategy
from autopar.plans.diff import changes
from autopar.plans.plan import Plan, PlannedInput

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
