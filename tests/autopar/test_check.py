"""The check passes sound programs and names what is wrong with broken ones: one refusal test for each message."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.fx import Graph, GraphModule

from autopar._torch import fake_mode
from autopar.check import Checker, check, check_schedules, violations
from autopar.check_program import Values
from autopar.collectives import all_gather, all_reduce, all_to_all, reduce_scatter, reshard, wait
from autopar.compiled import Step
from autopar.emit import Emitter
from autopar.errors import CheckError, ScheduleError
from autopar.keys import BATCH, DIMS, ORIGIN, PHASE, SHARDING, SOURCE, STRATEGY, Source
from autopar.mesh import Mesh
from autopar.program import Form, Input, Output, Program, Signature
from autopar.schedule import Fragment, Schedule, parse
from autopar.sharding import Sharding, Strategy

aten = torch.ops.aten
MESH = Mesh((("dp", 2), ("tp", 2)))
X = Sharding((("dp",), ("tp",)))
WEIGHT = Sharding((("tp",), ()))
PRODUCT = Sharding((("dp",), ()), (("tp", "sum"),))
WHOLE = Sharding((("dp",), ()))
SUMMED = Sharding((), (("dp", "sum"),))
LOSS = Sharding(())


def sharded() -> Program:
    """A row-split layer.

    x [8@dp, 16@tp] @ weight [16@tp, 4] is unreduced over tp; it is reduced, passed through relu, summed, reduced over dp."""
    graph = Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("w")
    with fake_mode():
        x.meta["val"], weight.meta["val"] = torch.empty(8, 16), torch.empty(16, 4)
    output = graph.output(())
    emit = Emitter(graph, output)
    product = emit.call(aten.mm.default, x, weight)
    whole = emit.call(reshard, product, WHOLE)
    relu = emit.call(aten.relu.default, whole)
    total = emit.call(aten.sum.default, relu)
    loss = emit.call(reshard, total, LOSS)
    output.args = ((loss,),)
    nodes = (x, weight, product, whole, relu, total, loss)
    for node, name in zip(nodes, ("x", "w", "product", "whole", "relu", "total", "loss"), strict=True):
        node.name = name
    for node, sharding in zip(nodes, (X, WEIGHT, PRODUCT, WHOLE, WHOLE, SUMMED, LOSS), strict=True):
        DIMS[node] = (tuple((int(size),) for size in node.meta["val"].shape),)
        SHARDING[node] = (sharding,)
        SOURCE[node] = Source("model.py", 7, "y = relu(x @ w)", "layer")
        PHASE[node] = "forward"
    for node in nodes:
        BATCH[node] = ((0,),) if node in (x, product, whole, relu) else ((),)
    STRATEGY[product] = Strategy((X, WEIGHT), (PRODUCT,), (("dp", "m"), ("tp", "k")), 4)
    STRATEGY[relu] = Strategy((WHOLE,), (WHOLE,), (("dp", "d0"),), 2)
    STRATEGY[total] = Strategy((WHOLE,), (SUMMED,), (("dp", "d0"),), 2)
    signature = Signature(
        (
            Input("batch", "0", (8, 16), torch.float32, dims=((8,), (16,)), sharding=X),
            Input("parameter", "layer.weight", (16, 4), torch.float32, True, ((16,), (4,)), WEIGHT),
        ),
        (Output("loss", "0", (), torch.float32, True, (), LOSS),),
    )
    return Program(graph, MESH, signature, Form.GLOBAL)


def local() -> Program:
    """What `sharded` becomes on one rank."""
    origin = sharded()
    graph = Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("w")
    with fake_mode():
        x.meta["val"], weight.meta["val"] = torch.empty(4, 8), torch.empty(8, 4)
    output = graph.output(())
    emit = Emitter(graph, output)
    product = emit.call(aten.mm.default, x, weight)
    launch = emit.call(all_reduce, product, ("tp",), "sum")
    whole = emit.call(wait, launch)
    relu = emit.call(aten.relu.default, whole)
    total = emit.call(aten.sum.default, relu)
    launch_loss = emit.call(all_reduce, total, ("dp",), "sum")
    loss = emit.call(wait, launch_loss)
    output.args = ((loss,),)
    launch.name, launch_loss.name = "launch", "launch_loss"
    for node, name in zip(
        (x, weight, product, whole, relu, total, loss), ("x", "w", "product", "whole", "relu", "total", "loss"), strict=True
    ):
        node.name = name
        ORIGIN[node], DIMS[node], SHARDING[node] = name, DIMS[origin.node(name)], SHARDING[origin.node(name)]
    return replace(origin, graph=graph, form=Form.LOCAL)


def messages(program: Program, origin: Program | None = None) -> str:
    """Violations as text; a program that `check` accepts gives an empty one."""
    return "\n".join(str(violation) for violation in violations(program, origin=origin))


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
    values = Values()
    assert violations(sharded(), values) == []
    count = len(values.known)
    assert violations(sharded(), values) == []
    assert len(values.known) == count == 5


def test_one_and_true_are_different_arguments() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    with fake_mode():
        x.meta["val"] = torch.empty(2)
    output = graph.output(())
    emit = Emitter(graph, output)
    nodes = [emit.call(aten.full_like.default, x, fill) for fill in (1, True, 1.0)]
    values = Values()
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


# --- LOCAL ---


def _local_shape_off_by_one(program: Program) -> None:
    with fake_mode():
        program.node("relu").meta["val"] = torch.empty(4, 5)


def _unknown_axis(program: Program) -> None:
    node = program.node("launch")
    node.args = (node.args[0], ("ep",), "sum")


def _wrong_axis(program: Program) -> None:
    node = program.node("launch")
    node.args = (node.args[0], ("dp",), "sum")


def _wrong_kind(program: Program) -> None:
    node = program.node("launch")
    node.args = (node.args[0], ("tp",), "max")


def _doubled(program: Program) -> None:
    emit = Emitter(program.graph, program.node("relu"))
    again = emit.call(wait, emit.call(all_reduce, program.node("whole"), ("tp",), "sum"))
    whole = program.node("whole")
    for key in (ORIGIN, DIMS, SHARDING):
        again.meta[key] = whole.meta.pop(key)
    program.node("relu").args = (again,)


def _dropped(program: Program) -> None:
    program.node("relu").args = (program.node("product"),)
    program.graph.erase_node(program.node("whole"))
    program.graph.erase_node(program.node("launch"))


def _replaced_by_a_copy(program: Program) -> None:
    whole = program.node("whole")
    emit = Emitter(program.graph, program.node("relu"))
    copy = emit.call(aten.clone.default, program.node("product"))
    for key in (ORIGIN, DIMS, SHARDING):
        copy.meta[key] = whole.meta.pop(key)
    whole.replace_all_uses_with(copy)
    program.graph.erase_node(whole)
    program.graph.erase_node(program.node("launch"))


def _bypassed(program: Program) -> None:
    program.node("relu").args = (program.node("product"),)


def _no_wait(program: Program) -> None:
    program.node("relu").args = (program.node("launch"),)


def _two_waits(program: Program) -> None:
    Emitter(program.graph, program.node("relu")).call(wait, program.node("launch"))


def _wait_for_nothing(program: Program) -> None:
    program.node("whole").args = (program.node("product"),)


def _stray_launch(program: Program) -> None:
    emit = Emitter(program.graph, program.node("relu"))
    program.node("relu").args = (emit.call(wait, emit.call(all_reduce, program.node("whole"), ("tp",), "sum")),)


def _strange_origin(program: Program) -> None:
    ORIGIN[program.node("relu")] = "gelu"


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (_local_shape_off_by_one, "the local shape is not this rank's part of [8@dp, 4]"),
        (_unknown_axis, "all_reduce over the unknown axis 'ep'"),
        (_wrong_axis, "all_reduce over dp, over which its operand is not unreduced: a doubled reduction, or the wrong axis"),
        (_wrong_axis, "a reduction was dropped: the value is still unreduced over tp"),
        (_wrong_kind, "all_reduce over tp reduces by the wrong kind"),
        (_doubled, "all_reduce over tp, over which its operand is not unreduced: a doubled reduction"),
        (_dropped, "a reshard has no part in the LOCAL program: its collective was dropped"),
        (_replaced_by_a_copy, "a reduction was dropped: the value is still unreduced over tp"),
        (_bypassed, "what %relu became reads a value that %relu does not read"),
        (_no_wait, "the result of a launch is used before its wait"),
        (_two_waits, "a launch needs exactly one wait"),
        (_wait_for_nothing, "wait for what was never launched"),
        (_stray_launch, "all_reduce where the origin %relu changes no sharding"),
        (_strange_origin, "the node's origin 'gelu' is not in the GLOBAL program"),
    ],
)
def test_refuses_a_local_program(damage: Callable[[Program], None], expected: str) -> None:
    program = local()
    damage(program)
    assert expected in messages(program, sharded())


def test_refuses_collectives_on_values_that_are_not_laid_out_for_them() -> None:
    for launch, arguments, expected in (
        (reduce_scatter, (("tp",), "sum"), "reduce_scatter wants one entry per rank first"),
        (all_to_all, (("tp",),), "all_to_all wants one entry per rank first"),
        (all_gather, (("tp",), 4), "all_gather over tp gathers from the wrong number of ranks"),
    ):
        program = local()
        emit = Emitter(program.graph, program.graph.output_node())
        emit.call(wait, emit.call(launch, program.node("relu"), *arguments))
        assert expected in messages(program)


def test_refuses_moving_partial_sums() -> None:
    program = local()
    node = program.node("launch")
    with program.graph.inserting_before(node):
        gather = program.graph.call_function(all_gather, (node.args[0], ("tp",), 2))
    with fake_mode():
        gather.meta["val"] = torch.empty(2, 4, 4)
    emit = Emitter(program.graph, program.node("relu"))
    first = emit.call(aten.select.int, emit.call(wait, gather), 0, 0)
    whole = program.node("whole")
    for key in (ORIGIN, DIMS, SHARDING):
        first.meta[key] = whole.meta.pop(key)
    program.node("relu").args = (first,)
    assert "all_gather over tp, over which its operand is unreduced" in messages(program, sharded())


# --- as an observer ---


def test_check_collects_all_and_attaches_the_program() -> None:
    program = sharded()
    _unreduced_into_relu(program)
    _loss_not_replicated(program)
    with pytest.raises(CheckError, match="after pass 3: 2 violations") as caught:
        check(program, "after pass 3")
    assert "GLOBAL program on dp=2 × tp=2" in caught.value.__notes__[0]


def test_checker_compares_local_with_the_last_global_program() -> None:
    checker = Checker()
    checker(Step(1, "insert reshards", 0.0, sharded()))
    broken = local()
    _bypassed(broken)
    with pytest.raises(CheckError, match="after pass 2, lower"):
        checker(Step(2, "lower", 0.0, broken))


# --- schedules ---

SOUND = """
RUN f0 (x, w) -> (h)
LAUNCH all_reduce sum tp (h) -> r
WAIT r
FREE h
RUN f1 (r) -> (total)
LAUNCH all_reduce sum dp (total) -> loss
FREE r
WAIT loss
FREE total
PAUSE
RUN f1 (tangent) -> (gradient)
"""


def schedule(text: str) -> Schedule:
    two, one = _fragment_module(2), _fragment_module(1)
    shapes = {name: ((4, 4), torch.float32) for name in ("x", "w", "h", "r", "total", "loss", "gradient", "tangent", "s", "t")}
    signature = Signature(
        (
            Input("batch", "0", (4, 4), torch.float32),
            Input("parameter", "w", (4, 4), torch.float32, True),
            Input("tangent", "0", (4, 4), torch.float32),
        ),
        (Output("loss", "0", (4, 4), torch.float32), Output("gradient", "w", (4, 4), torch.float32)),
    )
    fragments = {"f0": Fragment("f0", two), "f1": Fragment("f1", one)}
    return Schedule(parse(text), fragments, ("x", "w", "tangent"), ("loss", "gradient"), signature, shapes)


def _fragment_module(count: int) -> GraphModule:
    graph = Graph()
    nodes = [graph.placeholder(f"a{i}") for i in range(count)]
    with fake_mode():
        for node in nodes:
            node.meta["val"] = torch.empty(4, 4)
    graph.output((nodes[0],))
    return GraphModule(torch.nn.Module(), graph)


def test_a_sound_schedule_passes_alone_and_on_separate_ranks() -> None:
    check_schedules([schedule(SOUND)] * 4, MESH)
    check_schedules([schedule(SOUND) for _ in range(4)], MESH)


def _edit(old: str, new: str) -> str:
    assert old in SOUND
    return SOUND.replace(old, new)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (_edit("RUN f0 (x, w) -> (h)\n", ""), "buffer h is read before anything wrote it"),
        (_edit("WAIT r\nFREE h\n", "WAIT r\nFREE h r\n"), "buffer r is read after it was freed"),
        (_edit("RUN f1 (r) -> (total)", "RUN f1 (r) -> (r)"), "buffer r is written twice"),
        (_edit("FREE total\n", "FREE total\nFREE total\n"), "buffer total is freed twice"),
        (_edit("FREE total\n", "FREE total s\n"), "buffer s is freed before anything wrote it"),
        (_edit("FREE total\n", ""), "buffers are never freed"),
        (_edit("WAIT r\nFREE h\n", "FREE h\n"), "buffer h is freed while a collective uses it"),
        (_edit("WAIT r\nFREE h\n", "FREE h\n"), "buffer r is read before its collective is complete"),
        (_edit("WAIT r\n", "WAIT r\nWAIT r\n"), "WAIT without a LAUNCH for r"),
        (_edit("WAIT loss\nFREE total\n", ""), "the collective into loss is never waited for"),
        (_edit("WAIT loss\nFREE total\n", ""), "loss '0' (buffer loss) is not there"),
        (_edit("RUN f1 (tangent) -> (gradient)\n", ""), "gradient 'w' (buffer gradient) is not there"),
        (_edit("PAUSE\n", "PAUSE\nPAUSE\n"), "PAUSE comes twice"),
        (_edit("PAUSE\nRUN f1 (tangent)", "RUN f1 (tangent)"), "buffer tangent is read before anything wrote it"),
        (_edit("RUN f1 (r)", "RUN f9 (r)"), "there is no fragment f9"),
        (_edit("RUN f1 (r)", "RUN f0 (r)"), "the fragment takes another number of inputs"),
        (_edit("sum tp", "sum ep"), "unknown axis 'ep'"),
        (_edit("all_reduce sum tp", "all_gather copy tp"), "the target does not have the collective's shape"),
        (_edit("all_reduce sum tp", "reduce_scatter sum tp"), "reduce_scatter wants one entry per rank first"),
    ],
)
def test_refuses_a_schedule(text: str, expected: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        check_schedules([schedule(text)] * 4, MESH)
    assert expected in str(caught.value)


def test_names_rank_and_instruction() -> None:
    with pytest.raises(ScheduleError, match=r"rank 0, instruction 3: WAIT r: WAIT without a LAUNCH") as caught:
        check_schedules([schedule(_edit("WAIT r\n", "WAIT r\nWAIT r\n"))] * 4, MESH)
    assert "    3  WAIT r" in caught.value.__notes__[0]


def test_refuses_a_fragment_fed_with_another_shape() -> None:
    wrong = schedule(SOUND)
    shapes = {**wrong.shapes, "x": ((4, 5), torch.float32)}
    with pytest.raises(ScheduleError, match="buffer x does not fit the fragment's input"):
        check_schedules([replace(wrong, shapes=shapes)] * 4, MESH)


def test_refuses_ranks_without_a_schedule() -> None:
    with pytest.raises(ScheduleError, match=r"ranks without a schedule"):
        check_schedules([schedule(SOUND)] * 3, MESH)


TWO = """
RUN f0 (x, w) -> (h)
LAUNCH all_reduce sum tp (h) -> r
LAUNCH all_reduce sum dp (h) -> loss
WAIT r
WAIT loss
FREE h r
PAUSE
RUN f1 (tangent) -> (gradient)
"""
_FIRST, _SECOND = "LAUNCH all_reduce sum tp (h) -> r\n", "LAUNCH all_reduce sum dp (h) -> loss\n"


def _ranks(other: str) -> list[Schedule]:
    """Rank 0 runs `other`, ranks 1 to 3 run TWO."""
    return [schedule(other), *(schedule(TWO) for _ in range(3))]


def test_swapped_order_across_groups_is_a_deadlock_and_names_ranks_and_instructions() -> None:
    swapped = TWO.replace(_FIRST + _SECOND, _SECOND + _FIRST)
    with pytest.raises(ScheduleError) as caught:
        check_schedules([schedule(text) for text in (swapped, TWO, TWO, swapped)], MESH)
    text = str(caught.value)
    assert "deadlock: nobody can advance" in text
    assert "rank 0, instruction 1: LAUNCH all_reduce sum dp (h) -> loss waits for rank 2" in text
    assert "rank 1, instruction 1: LAUNCH all_reduce sum tp (h) -> r waits for rank 0" in text


def test_orders_that_fit_one_global_order_pass() -> None:
    """Rank 0 alone swapped: tp of (2, 3), dp of (0, 2), tp of (0, 1), dp of (1, 3) is an order for all."""
    check_schedules(_ranks(TWO.replace(_FIRST + _SECOND, _SECOND + _FIRST)), MESH)


def test_a_missing_launch_on_one_rank_is_a_deadlock() -> None:
    text = TWO.replace(_FIRST, "RUN f1 (h) -> (r)\n").replace("WAIT r\n", "")
    with pytest.raises(ScheduleError, match="nobody can advance"):
        check_schedules(_ranks(text), MESH)


def test_a_missing_pause_on_one_rank_is_a_deadlock() -> None:
    alone = schedule(TWO)
    without = replace(
        alone, instructions=tuple(each for each in alone.instructions if str(each) not in ("PAUSE", "RUN f1 (tangent) -> (gradient)"))
    )
    forward = replace(without, signature=replace(alone.signature, outputs=alone.signature.outputs[:1]), outputs=("loss",))
    with pytest.raises(ScheduleError, match="PAUSE waits for ranks 0, 2, 3"):
        check_schedules([forward, *(schedule(TWO) for _ in range(3))], MESH)


@pytest.mark.parametrize(
    ("other", "shapes"),
    [
        (TWO.replace("sum tp", "max tp"), {}),
        (TWO, {"h": ((4, 4), torch.float16), "r": ((4, 4), torch.float16), "loss": ((4, 4), torch.float16)}),
        (TWO, {"h": ((2, 8), torch.float32), "r": ((2, 8), torch.float32), "loss": ((2, 8), torch.float32)}),
    ],
)
def test_refuses_different_collectives_within_a_group(other: str, shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
    first = schedule(other)
    first = replace(
        first, shapes={**first.shapes, **shapes}, fragments={name: Fragment(name, _untyped(each)) for name, each in first.fragments.items()}
    )
    with pytest.raises(ScheduleError, match="two ranks of a group launch different collectives"):
        check_schedules([first, *(schedule(TWO) for _ in range(3))], MESH)


def _untyped(fragment: Fragment) -> GraphModule:
    """The fragment's module without values, so that other shapes fit it."""
    for node in fragment.module.graph.nodes:
        node.meta.pop("val", None)
    return fragment.module
