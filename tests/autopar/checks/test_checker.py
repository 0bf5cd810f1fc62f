"""The check passes sound programs and names what is wrong with broken ones: one refusal test for each message."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch.fx import Graph

import autopar.checks.checker
from autopar._torch import fake_mode
from autopar.checks.checker import Checker, check, violations
from autopar.checks.program import Values
from autopar.compiler import default_passes
from autopar.cost.hardware.cluster import Cluster
from autopar.driver.manager import run_passes
from autopar.driver.options import Options
from autopar.errors import CheckError, ScheduleError
from autopar.graph.emit import Emitter
from autopar.ir.instructions import Instruction, Launch, Receive, Run, Wait
from autopar.ir.keys import DIMS, SHARDING, STRATEGY
from autopar.ir.mesh import Mesh
from autopar.ir.program import Form, Output, Program
from autopar.ir.schedule import Schedule
from autopar.ir.sharding import Sharding, Strategy
from autopar.pipeline.schedule_program import ScheduleProgram
from tests.support.faults.programs import PRODUCT, WHOLE, local, messages, sharded
from tests.support.models.chain import Chain
from tests.support.programs import passed

aten = torch.ops.aten


def test_sound_programs_pass() -> None:
    assert messages(sharded()) == ""
    assert messages(local(), sharded()) == ""
    assert messages(replace(sharded(), form=Form.FORWARD)) == ""


# --- any program ---


def _wrong_shape(program: Program) -> None:
    with fake_mode():
        program.node("relu").meta["val"] = torch.empty(8, 5)
    DIMS[program.node("relu")] = (((8,), (5,)),)


def _wrong_dtype(program: Program) -> None:
    with fake_mode():
        program.node("relu").meta["val"] = torch.empty(8, 4, dtype=torch.float16)


def _wrong_strides(program: Program) -> None:
    with fake_mode():
        program.node("relu").meta["val"] = torch.empty(4, 8).t()


def _cannot_run(program: Program) -> None:
    node = program.node("product")
    node.args = (node.args[1], node.args[0])
    del node.meta[STRATEGY]


def _no_value(program: Program) -> None:
    del program.node("relu").meta["val"]


def _used_before_made(program: Program) -> None:
    program.node("product").append(program.node("whole"))
    program.node("whole").prepend(program.node("total"))


def _atoms(program: Program) -> None:
    DIMS[program.node("relu")] = (((8,), (5,)),)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (_wrong_shape, "the node's value is not what its op computes"),
        (_wrong_dtype, "expected: f32[8, 4]"),
        (_wrong_strides, "got:      f32[8, 4] strides [1, 8]"),
        (_cannot_run, "the op does not run on its operands"),
        (_no_value, "the node has no value"),
        (_used_before_made, "the graph is malformed"),
        (_atoms, "the atoms do not multiply to the value's shape"),
    ],
)
def test_refuses_a_program(damage: Callable[[Program], None], expected: str) -> None:
    program = sharded()
    damage(program)
    text = messages(program)
    assert expected in text
    assert "fix:" in text or "expected:" in text or "got:" in text


def test_a_pass_that_returns_what_it_got_is_not_checked_again_unless_it_changed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Same:
        damage: Callable[[Program], None] = lambda program: None
        name: str = "same"

        def apply(self, program: Program) -> Program:
            self.damage(program)
            return program

    looked, real = list[object](), autopar.checks.checker.violations
    monkeypatch.setattr(autopar.checks.checker, "violations", lambda program, *rest: looked.append(program) or real(program, *rest))
    run_passes(sharded(), (Same(), Same()), (Checker(),))
    assert len(looked) == 1
    with pytest.raises(CheckError, match="after pass 2, same"):
        run_passes(sharded(), (Same(), Same(_missing_sharding)), (Checker(),))


def test_refuses_a_signature_that_does_not_fit() -> None:
    program = sharded()
    wrong = replace(program.signature.inputs[0], shape=(8, 15))
    signature = replace(program.signature, inputs=(wrong, program.signature.inputs[1]))
    text = messages(replace(program, signature=signature))
    assert "batch '0' is not what the signature says" in text and "expected: f32[8, 15]" in text and "got:      f32[8, 16]" in text
    fewer = messages(replace(program, signature=replace(program.signature, inputs=(wrong,))))
    assert "the signature does not fit the graph's inputs" in fewer and "1 inputs: batch 0" in fewer
    program.graph.output_node().args = ((None,),)
    assert "result 0 is no node" in messages(program)


def test_names_the_users_source_line() -> None:
    program = sharded()
    _wrong_dtype(program)
    assert "%relu = aten.relu, model.py:7 in layer" in messages(program)


def test_stride_of_a_dim_of_size_one_does_not_matter() -> None:
    program = sharded()
    graph = program.graph
    node = program.node("relu")
    with graph.inserting_after(node):
        extra = graph.call_function(aten.unsqueeze.default, (node, 0))
    with fake_mode():
        extra.meta["val"] = torch.empty_strided((1, 8, 4), (99, 4, 1))
    DIMS[extra], SHARDING[extra] = (((), (8,), (4,)),), (WHOLE,)
    assert messages(program) == ""


def test_equal_calls_are_run_once() -> None:
    values = Values({})
    assert violations(sharded(), values) == []
    counts = len(values.known), len(values.own)
    assert violations(sharded(), values) == []
    assert (len(values.known), len(values.own)) == counts == (3, 2), "ops, which all checkers share, and functions of this program"


def test_one_and_true_are_different_arguments() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    with fake_mode():
        x.meta["val"] = torch.empty(2)
    output = graph.output(())
    emit = Emitter(graph, output)
    nodes = [emit.call(aten.full_like.default, x, fill) for fill in (1, True, 1.0)]
    values = Values({})
    for node in nodes:
        values.of(node)
    assert len(values.known) == 3


# --- shardings ---


def _illegal_axis(program: Program) -> None:
    SHARDING[program.node("relu")] = (Sharding((("pp",), ())),)


def _indivisible(program: Program) -> None:
    SHARDING[program.node("relu")] = (Sharding((("dp", "tp"), ())),)
    object.__setattr__(program, "mesh", Mesh((("dp", 3), ("tp", 2))))


def _results_differ(program: Program) -> None:
    SHARDING[program.node("relu")] = (Sharding((("tp",), ())),)


def _unreduced_into_relu(program: Program) -> None:
    program.node("relu").args = (program.node("product"),)


def _arrives_otherwise(program: Program) -> None:
    other = Sharding((("tp",), ()))
    STRATEGY[program.node("relu")] = Strategy((other,), (WHOLE,))


def _wrong_number_of_operands(program: Program) -> None:
    STRATEGY[program.node("relu")] = Strategy((WHOLE, WHOLE), (WHOLE,))


def _missing_sharding(program: Program) -> None:
    del program.node("relu").meta[SHARDING]


def _two_shardings(program: Program) -> None:
    SHARDING[program.node("whole")] = (WHOLE, WHOLE)


def _loss_not_replicated(program: Program) -> None:
    program.graph.output_node().args = ((program.node("total"),),)


def _becomes_unreduced(program: Program) -> None:
    SHARDING[program.node("whole")] = (Sharding((("dp",), ()), (("tp", "max"),)),)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (_illegal_axis, "illegal sharding: axis 'pp' is not on the mesh"),
        (_indivisible, "illegal sharding: an atom of 8 does not divide over dp = 3"),
        (_results_differ, "the results are not sharded as the strategy says"),
        (_unreduced_into_relu, "operand 0 arrives unreduced (sum over tp), and aten.relu under this strategy is not linear in it"),
        (_arrives_otherwise, "operand 0 does not arrive sharded as the strategy wants"),
        (_wrong_number_of_operands, "the strategy is not for this op"),
        (_missing_sharding, "the node has no sharding, others have"),
        (_two_shardings, "not one sharding for each result"),
        (_loss_not_replicated, "the loss is not replicated"),
        (_becomes_unreduced, "the reshard makes a value unreduced"),
    ],
)
def test_refuses_shardings(damage: Callable[[Program], None], expected: str) -> None:
    program = sharded()
    damage(program)
    assert expected in messages(program)


def test_refuses_a_strategy_that_no_rule_allows() -> None:
    """Partial sums through relu: every edge fits, and the result is wrong."""
    program = sharded()
    relu = program.node("relu")
    relu.args = (program.node("product"),)
    STRATEGY[relu], SHARDING[relu] = Strategy((PRODUCT,), (PRODUCT,), (("tp", "sum"),)), (PRODUCT,)
    total = program.node("total")
    after = Sharding((), (("dp", "sum"), ("tp", "sum")))
    STRATEGY[total], SHARDING[total] = Strategy((PRODUCT,), (after,)), (after,)
    found = violations(program)
    assert [(violation.what, violation.got) for violation in found] == [("the op's rule does not allow its strategy", "tp:sum")]
    assert "%relu" in found[0].where


def test_refuses_a_getitem_that_is_not_sharded_as_its_result() -> None:
    program = sharded()
    graph, relu = program.graph, program.node("relu")
    emit = Emitter(graph, graph.output_node())
    pair = emit.call(aten.max.dim, relu, 1)

    picked = emit.call(operator.getitem, pair, 1)
    DIMS[pair], SHARDING[pair] = (((8,),), ((8,),)), (Sharding((("dp",),)), Sharding((("dp",),)))
    DIMS[picked], SHARDING[picked] = (((8,),),), (Sharding((("tp",),)),)
    assert "not sharded as result 1 of its op" in messages(program)


def test_refuses_a_gradient_that_is_not_sharded_as_its_parameter() -> None:
    program = sharded()
    graph = program.graph
    weight = program.node("w")
    emit = Emitter(graph, graph.output_node())
    gradient = emit.call(aten.neg.default, weight)
    DIMS[gradient], SHARDING[gradient] = DIMS[weight], (Sharding(((), ("tp",))),)
    graph.output_node().args = ((program.node("loss"), gradient),)
    output = Output("gradient", "layer.weight", (16, 4), torch.float32)
    signature = replace(program.signature, outputs=(*program.signature.outputs, output))
    text = messages(replace(program, signature=signature))
    assert "the gradient of 'layer.weight' is not sharded as 'layer.weight' is" in text
    assert "expected: [16@tp, 4]" in text and "got:      [16, 4@tp]" in text


def test_before_reshards_are_in_operands_may_differ() -> None:
    program = sharded()
    _unreduced_into_relu(program)
    inputs = tuple(replace(item, sharding=None) for item in program.signature.inputs)
    assert messages(replace(program, signature=replace(program.signature, inputs=inputs))) == ""


# --- as an observer ---


def test_check_collects_all_and_attaches_the_program() -> None:
    program = sharded()
    _unreduced_into_relu(program)
    _loss_not_replicated(program)
    with pytest.raises(CheckError, match="after pass 3: 2 violations") as caught:
        check(program, "after pass 3")
    assert "GLOBAL program on dp=2 × tp=2" in caught.value.__notes__[0]


# --- schedules, after every pass that writes one ---


@dataclass(frozen=True)
class Edit:
    change: Callable[[int, Schedule], Schedule]
    name: str = "edit"

    def apply(self, program: ScheduleProgram) -> ScheduleProgram:
        return program.with_places(self.change(place, each) for place, each in enumerate(program.places))


@cache
def _lowered() -> Program:
    return passed(Chain(), (torch.randn(16, 4),), None, Mesh((("pp", 2), ("dp", 2))), 4)


def _edited_after(name: str, change: Callable[[int, Schedule], Schedule]) -> None:
    passes = default_passes(Options(Cluster.ideal()), training=True)
    names = [each.name for each in passes]
    first, chosen = names.index("order actions"), names.index(name) + 1
    run_passes(_lowered(), (*passes[first:chosen], Edit(change), *passes[chosen:]), (Checker(),))


def _without(schedule: Schedule, dropped: Instruction) -> Schedule:
    return schedule.regrouped([[] if each is dropped else [each] for each in schedule.instructions])


def _drop_a_receive(place: int, schedule: Schedule) -> Schedule:
    receives = [each for each in schedule.instructions if isinstance(each, Receive)]
    return _without(schedule, receives[-1]) if place else schedule


def _reduce_over_stages(place: int, schedule: Schedule, kinds: Sequence[str] = ("sum", "max")) -> Schedule:
    launches = [Launch("all_reduce", kind, ("pp",), (schedule.inputs[0],), (f"{kind}_over_stages",)) for kind in kinds]
    return schedule.appended([*launches, *(Wait(each.name) for each in launches)])


def _swap_two_collectives(place: int, schedule: Schedule) -> Schedule:
    return _reduce_over_stages(place, schedule, ("max", "sum") if place else ("sum", "max"))


def _read_too_early(place: int, schedule: Schedule) -> Schedule:
    runs = [each for each in schedule.instructions if isinstance(each, Run)]
    made = {name for each in runs for name in each.outputs}
    late = next(each for each in runs if made.intersection(each.inputs))
    return _without(schedule, late).prepended([late]) if place else schedule


def _skip_a_backward(place: int, schedule: Schedule) -> Schedule:
    backward = next(each for each in schedule.instructions if isinstance(each, Run) and each.fragment == "0B2") if not place else None
    return _without(schedule, backward) if backward else schedule


@pytest.mark.parametrize("name", ["write actions", "reduce gradients", "exchange ties", "hand out"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop_a_receive, "nobody receives this"),
        (_swap_two_collectives, "two ranks of a group launch different collectives"),
        (_read_too_early, "is read before anything wrote it"),
    ],
)
def test_a_faulty_schedule_is_refused_right_after_the_pass_that_wrote_it(
    name: str, change: Callable[[int, Schedule], Schedule], message: str
) -> None:
    with pytest.raises(ScheduleError, match=rf"after pass \d+, edit: (.|\n)*{message}") as caught:
        _edited_after(name, change)
    assert any(note.endswith("edit (Edit)") for note in caught.value.__notes__)


def test_the_schedule_of_the_rank_that_is_at_fault_is_attached() -> None:
    with pytest.raises(ScheduleError) as caught:
        _edited_after("write actions", _read_too_early)
    found = re.search(r"rank 2, instruction (\d+): (RUN f\d+ )", str(caught.value))
    assert found is not None, "the first of the two ranks at pp = 1"
    heading, *lines = caught.value.__notes__[0].splitlines()
    assert heading == "rank 2" and lines[int(found[1])].startswith(f"{found[1]:>5}  {found[2]}")


@pytest.mark.parametrize(("change", "message"), [(_drop_a_receive, "nobody receives this"), (_skip_a_backward, "0B2 never runs")])
def test_so_is_one_of_whole_actions(change: Callable[[int, Schedule], Schedule], message: str) -> None:
    with pytest.raises(ScheduleError, match=rf"after pass \d+, edit: (.|\n)*{message}"):
        _edited_after("order actions", change)


def test_a_sound_edit_of_a_schedule_passes() -> None:
    for name in ("write actions", "reduce gradients"):
        _edited_after(name, _reduce_over_stages)


def test_a_schedule_that_a_pass_leaves_as_it_is_is_proved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    proved: list[str] = []
    monkeypatch.setattr(autopar.checks.checker, "check_schedule_program", lambda program, title: proved.append(title))
    _edited_after("write actions", lambda place, schedule: schedule)
    assert [title.partition(", ")[2] for title in proved] == [
        "order actions", "write actions", "edit", "reduce gradients", "hand out", "bucket collectives", "free buffers",
    ]  # fmt: skip
