"""A plan goes to JSON and back, knows its graph, and says what of it applies to another one."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import PlanError
from autopar.ir.freedom import Freedom
from autopar.ir.keys import STRATEGY
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Sharding, Strategy
from autopar.pipeline.schedules import generate
from autopar.plans.keys import node_keys
from autopar.plans.pins import resolve
from autopar.plans.plan import Plan, PlannedInput
from tests.support.models.residual import batch, piped
from tests.support.planned import MESH, WEIGHT, program

aten = torch.ops.aten


@dataclass(frozen=True)
class Reasons:
    """A decision with nothing but its reasons."""

    reasons: dict[str, str]


def test_json_goes_there_and_back() -> None:
    plan = replace(
        Plan.of(program(), Reasons({"h.0.fc.weight": "split dim 0 over tp (row)"})),
        kernels={"h.0 attention": "aten"},
        schedule=generate("1f1b", 2, 4),
        cuts=("forward h.0.fc aten.relu 0",),
    )
    assert Plan.from_json(plan.to_json()) == plan


def test_a_plan_does_not_depend_on_reshards() -> None:
    assert Plan.of(program(with_reshard=True)) == Plan.of(program())


def test_json_reads_well() -> None:
    plan = Plan.of(program())
    content = json.loads(plan.to_json())
    assert content["mesh"] == {"dp": 2, "tp": 2}
    assert content["parameters"] == {"h.0.fc.weight": {"dims": [[16], [3, 2]], "splits": [["tp"], [], []]}}
    assert content["inputs"] == {"batch 0": {"dims": [[8], [16]], "splits": [["dp"], ["tp"]]}}
    assert content["strategies"]["forward h.0.fc aten.mm 0"]["factors"] == {"dp": "m", "tp": "k"}
    assert content["strategies"]["forward h.0.fc aten.mm 0"]["results"] == [{"splits": [["dp"], [], []], "unreduced": {"tp": "sum"}}]
    assert '    "h.0.fc.weight": {"dims"' in plan.to_json()


def test_save_and_load(tmp_path: Path) -> None:
    plan = Plan.of(program())
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


@given(
    st.lists(st.sampled_from(["dp", "tp.0", "tp.1"]), unique=True),
    st.lists(st.integers(0, 2), min_size=3, max_size=3),
    st.sampled_from(["sum", "max"]),
)
def test_any_sharding_survives_json(axes: list[str], places: list[int], kind: str) -> None:
    splits: list[tuple[str, ...]] = [(), ()]
    unreduced = []
    for axis, place in zip(axes, places, strict=False):
        if place < 2:
            splits[place] += (axis,)
        else:
            unreduced.append((axis, kind))
    sharding = Sharding(tuple(splits), tuple(unreduced))  # type: ignore[arg-type]
    plan = Plan(MESH, {"w": PlannedInput(((8,), (8,)), sharding)}, strategies={"op": Strategy((sharding,), (sharding, sharding))})
    assert Plan.from_json(plan.to_json()) == plan


def test_a_plan_gives_its_graph_every_strategy() -> None:
    given_program = program()
    plan = Plan.of(given_program)
    assert plan.fits(given_program)
    bare = program(prefix="other_")
    assert {node.target: strategy for node, strategy in plan.strategies_on(bare).items()}[aten.mm.default] == STRATEGY[
        given_program.node("mm_default")
    ]
    with pytest.raises(PlanError, match="no strategy for 1 of 3 nodes, the first is 'forward h.0.fc aten.mm 0'"):
        replace(plan, strategies={key: value for key, value in plan.strategies.items() if "mm" not in key}).strategies_on(bare)


def test_on_another_graph_only_pins_apply_and_it_says_so(caplog: pytest.LogCaptureFixture) -> None:
    plan = Plan.of(program())
    caplog.set_level(logging.WARNING, "autopar")
    other = program()
    other.node("relu_default").target = aten.neg.default
    assert not plan.fits(other)
    assert caplog.messages == ["the plan was made for another graph: only its 1 parameter pins apply"]
    assert not plan.fits(program(mesh=Mesh((("dp", 4), ("tp", 1)))))
    assert "another mesh (dp=2 × tp=2; here dp=4 × tp=1)" in caplog.messages[1]
    assert plan.placements_on(other) == {"h.0.fc.weight": WEIGHT}
    assert not plan.pins().fits(other) and len(caplog.messages) == 2


def test_pins_that_cannot_be_kept_are_refused_together() -> None:
    plan = Plan.of(program())
    with pytest.raises(PlanError, match=r"'h.0.fc.weight' is pinned by atoms \[16, \(3, 2\)\], here it has \[16, \(3, 4\)\]"):
        plan.placements_on(program(width=12))
    with pytest.raises(PlanError, match=r"\[16@tp, \(3, 2\)\]: an atom of 16 does not divide over tp = 3"):
        plan.placements_on(program(mesh=Mesh((("dp", 2), ("tp", 3)))))


def test_pins_of_unknown_parameters_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    plan = Plan(MESH, {"gone.weight": PlannedInput(((4,),), Sharding((("tp",),)))})
    assert plan.placements_on(program()) == {}
    assert "pins 1 parameters that the model does not have, the first is 'gone.weight'" in caplog.text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("not json", "the plan is no JSON"),
        ("[]", "the plan has version None, this release reads 1"),
        ('{"version": 7}', "the plan has version 7"),
        ('{"version": 1, "mesh": {"dp": 2}}', "the plan is malformed: KeyError: 'parameters'"),
        ('{"version": 1, "mesh": {"dp": 2}, "parameters": {"w": {"dims": [[2]]}}}', "malformed: KeyError: 'splits'"),
    ],
)
def test_refuses_text_that_is_no_plan(text: str, expected: str) -> None:
    with pytest.raises(PlanError, match=expected):
        Plan.from_json(text)


# --- pins by hand ---


def test_pins_by_pattern() -> None:
    assert str(resolve({"*.weight": ("tp", None)}, program()).plan.parameters["h.0.fc.weight"]) == "[16@tp, (3, 2)]"
    # The first atom that divides: 3 does not.
    assert str(resolve({"*": (None, "tp")}, program()).plan.parameters["h.0.fc.weight"]) == "[16, (3, 2@tp)]"
    assert str(resolve({"*": ("tp", None), "h.0.fc.weight": ()}, program()).plan.parameters["h.0.fc.weight"]) == "[16, (3, 2)]"
    assert str(resolve({"*": (("dp", "tp"), None)}, program()).plan.parameters["h.0.fc.weight"]) == "[16@dp·tp, (3, 2)]"


def test_pins_on_a_refined_axis_use_its_parts() -> None:
    mesh = Mesh((("dp", 2), ("tp.0", 2), ("tp.1", 3)))
    assert str(resolve({"*": (None, "tp")}, program(mesh=mesh)).plan.parameters["h.0.fc.weight"]) == "[16, (3@tp.1, 2@tp.0)]"


@pytest.mark.parametrize(
    ("pins", "expected"),
    [
        ({"nothing.*": ("tp", None)}, "'nothing.*' matches no parameter; there are h.0.fc.weight"),
        ({"*": ("ep", None)}, "axis 'ep' is not on the mesh"),
        ({"*": ("tp",)}, "1 entries for 2 dims"),
        ({"*": ("tp", "tp")}, "axis 'tp' is used twice"),
        ({"*": (None, ("dp", "tp"))}, r"a dim of 3 × 2 does not divide over dp·tp = 4"),
    ],
)
def test_refuses_pins(pins: dict[str, tuple[str | None, ...]], expected: str) -> None:
    with pytest.raises(PlanError, match=expected):
        resolve(pins, program())


def test_a_plan_serves_as_pins() -> None:
    plan = Plan.of(program(), Reasons({"h.0.fc.weight": "row", "other": "no parameter"}))
    assert resolve(plan, program()).plan == plan.pins()
    assert plan.pins().reasons == {"h.0.fc.weight": "row"}


def test_a_pipeline_is_in_the_plan_and_comes_back_from_it() -> None:
    first = piped(schedule="zb-h1")
    plan = first.plan
    assert plan.schedule == generate("zb-h1", 2, 2) and plan.schedule.num_microbatches == 2 and len(plan.cuts) == 1
    assert plan.cuts[0].startswith("forward ") and "stage 1" in plan.reasons
    text = plan.to_json()
    content = json.loads(text)["schedule"]
    assert content["num_microbatches"] == 2 and content["text"][0].startswith("pipeline zb-h1: 2 microbatches")
    assert Plan.from_json(text) == plan
    again = piped(plan=Plan.from_json(text), num_microbatches=None)
    assert again.compiled.order == first.compiled.order and again.compiled.stages.stages == first.compiled.stages.stages
    assert again.compiled.stages.reason == "by the plan" and again.plan.reasons["stage 1"].endswith(": by the plan")
    assert again.compiled.fingerprint == first.compiled.fingerprint
    assert "cut by the plan: the slowest stage" in again.explain(detail="all")
    for line in (*str(plan.schedule).splitlines(), f"stage 1 begins with {plan.cuts[0]}"):
        assert f"  {line}\n" in f"{plan}\n"


def test_an_edited_cut_is_kept() -> None:
    first = piped()
    program = first.compiled.program
    keys = node_keys(program, with_reshards=True)
    key = next(key for key in keys.values() if key.startswith("forward blocks.0.mlp.down aten.mm"))
    assert first.plan.cuts != (key,)
    moved = piped(plan=replace(first.plan, cuts=(key,)), num_microbatches=None)
    assert moved.plan.cuts == (key,) and moved.compiled.stages.placement.stages[1].first_name == "blocks.0.mlp.down aten.mm"
    assert moved.verify(*batch())


def test_what_is_asked_for_overrules_the_schedule_of_a_plan() -> None:
    plan = piped(schedule="zb-h1").plan
    again = piped(plan=plan, schedule="gpipe", num_microbatches=2)
    assert again.compiled.order == generate("gpipe", 2, 2) and again.plan.cuts == plan.cuts


def test_a_plan_with_a_broken_grid_is_refused() -> None:
    text = piped().plan.to_json().replace("rank 0 |", "rank zero |")
    with pytest.raises(PlanError, match="the plan is malformed: ScheduleError: line 2 should be"):
        Plan.from_json(text)


def test_kernels_are_printed_and_differ() -> None:
    plan = replace(Plan.of(program()), kernels={"forward h.0 autopar.attention 0": "aten"})
    other = replace(plan, kernels={"forward h.0 autopar.attention 0": "triton"})
    assert "forward h.0 autopar.attention 0  by aten" in str(plan)
    assert plan.diff(other) and "aten → triton" in str(plan.diff(other)) and not plan.diff(plan)
    content = json.loads(plan.to_json()) | {"kernels": ["aten"]}
    with pytest.raises(PlanError, match="the plan is malformed"):
        Plan.from_json(json.dumps(content))


def test_the_diff_of_two_plans_has_the_pipeline() -> None:
    one = piped().plan
    other = replace(one, schedule=generate("gpipe", 2, 2), cuts=("forward blocks.0 aten.add.Tensor 0",))
    found = one.diff(other)
    assert found and not found.parameters and not found.ops
    assert str(found).splitlines()[1:] == [
        "pipeline",
        "  schedule   1f1b, 2 microbatches → gpipe, 2 microbatches",
        f"  stage 1   {one.cuts[0]} → forward blocks.0 aten.add.Tensor 0",
    ]
    assert "  schedule   1f1b, 2 microbatches → none" in str(one.diff(replace(one, schedule=None, cuts=())))
    assert not one.diff(one)


def test_plans_of_earlier_releases_say_freedom_in_other_words() -> None:
    plan = Plan(Mesh((("dp", 2), ("tp", 2))), freedom=Freedom(("dp",), ("tp",), True))
    text = plan.to_json()
    assert json.loads(text)["freedom"] == {"batch": ["dp"], "flexible": ["tp"], "shards_parameters": True}
    assert Plan.from_json(text.replace('"flexible"', '"free"').replace('"shards_parameters"', '"stored"')) == plan == Plan.from_json(text)
