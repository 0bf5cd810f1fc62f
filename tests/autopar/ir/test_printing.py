"""What a program looks like as text."""

from __future__ import annotations

import torch
from torch.fx import Graph

from autopar._torch import fake_mode
from autopar.graph.emit import Emitter
from autopar.ir.collectives import all_reduce, wait
from autopar.ir.keys import DIMS, ORIGIN, PHASE, SHARDING, SOURCE, Source
from autopar.ir.mesh import Mesh
from autopar.ir.printing import describe_value, diff, op_name, print_program, short_dtype
from autopar.ir.program import Form, Input, Output, Program, Signature
from autopar.ir.sharding import Sharding

aten = torch.ops.aten
MESH = Mesh((("dp", 2), ("tp", 2)))


def program(form: Form = Form.GLOBAL, reduce: bool = False) -> Program:
    """loss = sum(x @ weight), one line of a model of one layer."""
    graph = Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("w")
    with fake_mode():
        x.meta["val"], weight.meta["val"] = torch.empty(8, 16), torch.empty(16, 4)
    output = graph.output(())
    emit = Emitter(graph, output)
    product = emit.call(aten.mm.default, x, weight)
    loss = emit.call(aten.sum.default, product)
    if reduce:
        loss = emit.call(wait, emit.call(all_reduce, loss, ("dp",), "sum"))
    output.args = ((loss,),)
    for node in graph.nodes:
        if node.op == "call_function":
            PHASE[node] = "forward"
            SOURCE[node] = Source("/home/me/model.py", 41, "x = self.fc(x)", "h.0.fc")
    signature = Signature(
        (Input("batch", "0", (8, 16), torch.float32), Input("parameter", "h.0.fc.weight", (16, 4), torch.float32, True)),
        (Output("loss", "0", (), torch.float32, True),),
    )
    return Program(graph, MESH, signature, form)


def test_prints_one_line_a_node_in_the_users_words() -> None:
    text = """\
GLOBAL program on dp=2 × tp=2: 2 nodes

inputs
    batch 0                 : f32[8, 16]
    parameter h.0.fc.weight : f32[16, 4]

forward
  h.0.fc
    %mm_default  : f32[8, 4] = aten.mm(batch.0, h.0.fc.weight)                                    # model.py:41  x = self.fc(x)
    %sum_default : f32[]     = aten.sum(%mm_default)

outputs
    loss 0 : f32[] = %sum_default"""
    assert print_program(program()) == text


def test_shows_shardings_and_what_is_unreduced() -> None:
    one = program()
    for node in one.graph.nodes:
        if node.op != "output":
            DIMS[node] = (tuple((int(size),) for size in node.meta["val"].shape),)
    x, weight, product, total = (node for node in one.graph.nodes if node.op != "output")
    SHARDING[x] = (Sharding((("dp",), ("tp",))),)
    SHARDING[weight] = (Sharding((("tp",), ())),)
    SHARDING[product] = (Sharding((("dp",), ()), (("tp", "sum"),)),)
    SHARDING[total] = (Sharding((), (("dp", "sum"), ("tp", "sum"))),)
    text = print_program(one)
    assert "f32[8@dp, 16@tp]" in text
    assert "%mm_default  : f32[8@dp, 4] sum@tp = aten.mm" in text
    assert "f32[] sum@dp sum@tp" in text


def test_local_form_shows_local_shapes_and_marks_collectives() -> None:
    lines = print_program(program(Form.LOCAL, reduce=True)).splitlines()
    moving = [line for line in lines if line.startswith("  ⇄")]
    assert len(moving) == 2
    assert moving[0].split("=", 1)[1].strip() == "all_reduce(%sum_default, ('dp',), 'sum')"


def test_frozen_parameters_and_constants_are_told_apart() -> None:
    one = program()
    inputs = (one.signature.inputs[0], Input("parameter", "h.0.fc.weight", (16, 4), torch.float32, False))
    frozen = Program(one.graph, MESH, Signature(inputs, one.signature.outputs), Form.GLOBAL)
    assert "h.0.fc.weight : f32[16, 4] frozen" in print_program(frozen)


def test_diff_shows_just_what_a_pass_changed() -> None:
    before, after = program(), program()
    node = after.node("mm_default")
    with after.graph.inserting_after(node):
        relu = after.graph.call_function(aten.relu.default, (node,))
    relu.meta["val"] = node.meta["val"]
    after.node("sum_default").args = (relu,)
    changed = [line for line in diff(before, after).splitlines()[2:] if line[0] in "+-"]
    assert [line.split("=", 1)[-1].strip() for line in changed if "aten" in line] == [
        "aten.sum(%mm_default)",
        "aten.relu(%mm_default)",
        "aten.sum(%relu_default)",
    ]
    assert diff(before, before.copy()) == "no difference"


def test_diff_knows_local_nodes_by_their_origin() -> None:
    before, after = program(), program().copy(form=Form.GLOBAL)
    node = after.node("mm_default")
    node.name = "mm_of_rank"
    ORIGIN[node] = "mm_default"
    assert diff(before, after) == "no difference"


def test_long_literals_are_cut() -> None:
    one = program()
    node = one.node("mm_default")
    with one.graph.inserting_after(node):
        view = one.graph.call_function(aten.view.default, (node, list(range(40))))
    view.meta["val"] = node.meta["val"]
    assert "11, … 40 in all])" in print_program(one)


def test_names_of_ops_and_types() -> None:
    assert op_name(aten.mm.default) == "aten.mm"
    assert op_name(aten.add.Tensor) == "aten.add.Tensor"
    assert op_name(all_reduce) == "all_reduce"
    assert short_dtype(torch.bfloat16) == "bf16"
    assert describe_value(None) == "-"
    assert describe_value(torch.empty(4, 6), ((4,), (2, 3)), Sharding((("dp",), (), ("tp",)))) == "f32[4@dp, (2, 3@tp)]"
