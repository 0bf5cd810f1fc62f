"""Each rule on a few nodes, of a GLOBAL program and of the LOCAL one that says the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Graph, Node

from autopar.ir.collectives import all_reduce, reshard, wait
from autopar.ir.keys import PHASE, SHARDING, STAGE, Phase
from autopar.ir.markers import save
from autopar.ir.mesh import Mesh
from autopar.ir.program import Form, Input, Program, Signature
from autopar.ir.sharding import Sharding
from autopar.pipeline.stage_rules import addends, ancestors, counts, direction_of, follows_counts, stages_of_calls, way_to

aten = torch.ops.aten
MESH = Mesh((("pp", 2), ("dp", 2), ("mb", 4)))
WHOLE = Sharding(((),))
SPLIT = Sharding((("mb",),))


def part(*axes: str, kind: str = "sum") -> Sharding:
    return Sharding(((),), tuple((axis, kind) for axis in axes))


class Small:
    """A graph by hand; `program` has all that nothing reads as results."""

    def __init__(self) -> None:
        self.graph = Graph()

    def value(self, name: str) -> Node:
        return self.graph.placeholder(name)

    def call(
        self,
        target: Any,
        *args: Any,
        stage: int | None = None,
        phase: Phase | None = None,
        sharding: Sharding | None = None,
        name: str = "",
    ) -> Node:
        node = self.graph.call_function(target, args)
        if stage is not None:
            STAGE[node] = stage
        if phase is not None:
            PHASE[node] = phase
        if sharding is not None:
            SHARDING[node] = (sharding,)
        node.name = name or node.name
        return node

    def program(self, *inputs: Input) -> Program:
        self.graph.output(tuple(node for node in self.graph.nodes if node.op == "call_function" and not node.users))
        return Program(self.graph, MESH, Signature(inputs, ()), Form.GLOBAL)


def names(nodes: Any) -> list[str]:
    return [node.name for node in nodes]


def placed(small: Small) -> dict[str, dict[int, Phase]]:
    return {node.name: stages for node, stages in stages_of_calls(small.program()).items()}


def test_what_has_no_stage_is_computed_where_it_is_read() -> None:
    small = Small()
    mask = small.call(aten.gt.Scalar, small.value("ids"), 2, name="mask")
    small.call(aten.relu.default, mask, stage=0, phase="forward", name="first")
    small.call(aten.neg.default, mask, stage=1, phase="backward", name="last")
    small.call(aten.relu.default, mask, stage=2, phase="forward", name="late")
    small.call(aten.neg.default, mask, stage=2, phase="backward", name="later")
    assert placed(small)["mask"] == {0: "forward", 1: "backward", 2: "forward"}


def test_a_view_and_a_marker_go_with_their_readers() -> None:
    small = Small()
    made = small.call(aten.relu.default, small.value("x"), stage=0, phase="forward", name="made")
    kept = small.call(save, small.call(aten.t.default, made, stage=0, phase="forward", name="shown"), stage=0, phase="forward", name="kept")
    small.call(aten.neg.default, kept, stage=1, phase="backward", name="reader")
    assert placed(small) == {
        "made": {0: "forward"},
        "shown": {1: "backward"},
        "kept": {1: "backward"},
        "reader": {1: "backward"},
    }


def test_a_view_of_a_gradient_stays_where_it_is_made() -> None:
    small = Small()
    made = small.call(aten.mm.default, small.value("x"), stage=1, phase="backward")
    shown = small.call(aten.t.default, made, stage=1, phase="backward", sharding=part("mb"), name="shown")
    small.call(aten.neg.default, shown, stage=0, phase="backward")
    assert placed(small)["shown"] == {1: "backward"}


def test_what_only_the_caller_reads_is_the_first_stages() -> None:
    small = Small()
    small.call(aten.gt.Scalar, small.value("ids"), 2, name="mask")
    small.call(aten.relu.default, small.value("x"), stage=1, phase="forward", name="made")
    assert placed(small) == {"mask": {0: "forward"}, "made": {1: "forward"}}


def test_without_stages_there_is_one() -> None:
    small = Small()
    made = small.call(aten.relu.default, small.value("x"), phase="forward", name="made")
    small.call(aten.neg.default, small.call(aten.t.default, made, name="shown"), phase="backward", name="gradient")
    assert placed(small) == {"made": {0: "forward"}, "shown": {0: "forward"}, "gradient": {0: "backward"}}


def test_values_go_forward_and_gradients_back() -> None:
    small = Small()
    made = small.call(aten.relu.default, small.value("x"), stage=0, phase="forward", name="made")
    later = small.call(aten.neg.default, made, stage=1, phase="backward", name="later")
    gradient = small.call(aten.neg.default, later, stage=0, phase="backward", name="gradient")
    program = small.program()
    stages = stages_of_calls(program)
    assert direction_of(made, later, 1, stages) == "F" and direction_of(later, gradient, 0, stages) == "B"
    STAGE[gradient] = 2
    with pytest.raises(AssertionError, match="gradient reads later against the pipeline"):
        direction_of(later, gradient, 2, stages_of_calls(program))


def test_the_way_to_a_result_is_what_only_moves_elements() -> None:
    small = Small()
    made = small.call(aten.mm.default, small.value("x"), sharding=part("dp", "mb"))
    moved = small.call(aten.t.default, small.call(reshard, made, part("mb"), sharding=part("mb"), name="summed"), name="moved")
    other = small.call(aten.mm.default, small.value("y"), name="other")
    chosen = small.call(aten.index_select.default, other, 0, small.value("rank"), name="chosen")
    launched = small.call(wait, small.call(all_reduce, chosen, ("dp",), "sum", name="launched"), name="completed")
    small.program()
    assert names(way_to(moved)) == ["moved", "summed"], "of a GLOBAL program"
    assert names(way_to(launched)) == ["completed", "launched", "chosen"], "of a LOCAL one"
    assert way_to(other) == []


def test_casts_of_a_gradient_that_is_held_low_only_move() -> None:
    small = Small()
    made = small.call(aten._to_copy.default, small.call(aten.mm.default, small.value("x")), name="made")
    wide = small.call(aten._to_copy.default, made, name="wide")
    summed = small.call(wait, small.call(all_reduce, wide, ("dp",), "sum", name="launched"), name="summed")
    held = small.call(aten._to_copy.default, summed, name="held")
    small.program()
    for dtype, nodes in {torch.float16: (made, held), torch.float32: (wide, summed, made.args[0])}.items():
        for node in nodes:
            node.meta["val"] = torch.empty(2, dtype=dtype)
    assert names(way_to(held, low=torch.float16)) == ["held", "summed", "launched", "wide", "made"]
    assert way_to(held) == []


def test_what_something_else_reads_is_no_step_on_the_way() -> None:
    small = Small()
    moved = small.call(aten.t.default, small.call(aten.mm.default, small.value("x")))
    result = small.call(aten.unsqueeze.default, moved, 0, name="result")
    small.call(aten.neg.default, moved)
    small.program()
    assert names(way_to(result)) == ["result"]


def test_a_maximum_of_sums_is_no_sum_of_maxima() -> None:
    small = Small()
    made = small.call(aten.mm.default, small.value("x"), sharding=part("dp", kind="max"))
    joined = small.call(reshard, made, WHOLE, sharding=WHOLE)
    launched = small.call(wait, small.call(all_reduce, small.call(aten.mm.default, small.value("y")), ("dp",), "max"))
    small.program()
    assert way_to(joined) == way_to(launched) == []


def test_addends_are_gradients_of_different_stages() -> None:
    def gradient(stage: int | None) -> Node:
        return small.call(aten.mm.default, small.value("x"), stage=stage, phase="backward")

    small = Small()
    first, second, third, fourth = (gradient(stage) for stage in (0, 1, 2, 2))
    tie = small.call(
        aten.add.Tensor, small.call(aten.add.Tensor, first, second, stage=0, phase="backward"), third, stage=0, phase="backward"
    )
    alike = small.call(aten.add.Tensor, fourth, gradient(2), stage=2, phase="backward")
    copied = small.call(aten.add.Tensor, gradient(0), gradient(None), stage=0, phase="backward")
    stages = stages_of_calls(small.program())
    # The inner addition is of stage 0, as the first addend is; the outer one joins it with stage 2.
    assert list(addends(tie, stages)) == [first, second, third]
    assert list(addends(alike, stages)) == [alike] and list(addends(copied, stages)) == [copied]


def test_what_follows_counts_runs_once_until_a_microbatch_comes_in() -> None:
    small = Small()
    ids = small.value("ids")
    number = small.call(aten.sum.default, ids, sharding=part("mb"))
    total = small.call(reshard, number, WHOLE, sharding=WHOLE)
    doubled = small.call(aten.mul.Scalar, total, 2)
    launched = small.call(all_reduce, number, ("mb",), "sum")
    share = small.call(aten.div.Tensor, ids, doubled)
    found = follows_counts(small.program(Input("batch", "0", (8,), torch.int64, sharding=SPLIT)))
    assert found == {total, doubled, launched} and share not in found
    assert counts(total) and counts(launched) and not counts(doubled)
    assert not counts(small.call(all_reduce, number, ("dp",), "sum"))


def test_ancestors_go_no_further_than_told() -> None:
    small = Small()
    first = small.call(aten.relu.default, small.value("x"))
    second = small.call(aten.relu.default, first)
    third = small.call(aten.relu.default, second)
    assert ancestors([third]) == {first, second, third}
    assert ancestors([third], stop=frozenset([second])) == {second, third}
    assert ancestors([third], within=frozenset([first, third])) == {third}
