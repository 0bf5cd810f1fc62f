"""A small sound GLOBAL program and its LOCAL form, for tests that damage them and ask the check what is wrong."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Graph

from autopar._torch import fake_mode
from autopar.checks.checker import violations
from autopar.graph.emit import Emitter
from autopar.ir.collectives import all_reduce, reshard, wait
from autopar.ir.keys import BATCH, DIMS, ORIGIN, PHASE, SHARDING, SOURCE, STRATEGY, Source
from autopar.ir.mesh import Mesh
from autopar.ir.program import Form, Input, Output, Program, Signature
from autopar.ir.sharding import Sharding, Strategy

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
            Input("batch", "0", (8, 16), torch.float32, dims=((8,), (16,)), sharding=X, batch_dim=0),
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
