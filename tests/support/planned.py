"""A small program whose nodes have strategies, as it stands after the search: what plans are made of."""

from __future__ import annotations

import torch
from torch.fx import Graph

from autopar._torch import fake_mode
from autopar.graph.emit import Emitter
from autopar.ir.collectives import reshard
from autopar.ir.keys import DIMS, PHASE, SHARDING, SOURCE, STRATEGY, Source
from autopar.ir.mesh import Mesh
from autopar.ir.program import Form, Input, Output, Program, Signature
from autopar.ir.sharding import Dims, Sharding, Strategy

aten = torch.ops.aten
MESH = Mesh((("dp", 2), ("tp", 2)))
X, WEIGHT, PRODUCT = Sharding((("dp",), ("tp",))), Sharding((("tp",), (), ())), Sharding((("dp",), (), ()), (("tp", "sum"),))
WHOLE = Sharding((("dp",), (), ()))


def program(width: int = 6, mesh: Mesh = MESH, prefix: str = "", with_reshard: bool = False) -> Program:
    """relu(x @ weight), the weight's second dim of atoms 3 and width / 3."""
    graph = Graph()
    x, weight = graph.placeholder(f"{prefix}x"), graph.placeholder(f"{prefix}w")
    with fake_mode():
        x.meta["val"], weight.meta["val"] = torch.empty(8, 16), torch.empty(16, width)
    output = graph.output(())
    emit = Emitter(graph, output)
    product = emit.call(aten.mm.default, x, weight)
    second = emit.call(reshard, product, WHOLE) if with_reshard else product
    relu = emit.call(aten.relu.default, second)
    again = emit.call(aten.relu.default, relu)
    output.args = ((again,),)
    dims: dict[str, Dims] = {"x": ((8,), (16,)), "w": ((16,), (3, width // 3)), "product": ((8,), (3, width // 3))}
    for node, key, sharding in (
        (x, "x", X),
        (weight, "w", WEIGHT),
        *((each, "product", WHOLE) for each in (second, relu, again)),
        (product, "product", PRODUCT),
    ):
        DIMS[node], SHARDING[node] = (dims[key],), (sharding,)
    for node in (product, relu, again):
        SOURCE[node], PHASE[node] = Source("model.py", 3, "", "h.0.fc"), "forward"
        STRATEGY[node] = Strategy((WHOLE,), (WHOLE,), (("dp", "d0"),), 2)
    STRATEGY[product] = Strategy((X, WEIGHT), (PRODUCT,), (("dp", "m"), ("tp", "k")), 4)
    signature = Signature(
        (Input("batch", "0", (8, 16), torch.float32, batch_dim=0), Input("parameter", "h.0.fc.weight", (16, width), torch.float32, True)),
        (Output("output", "0", (8, width), torch.float32, batch_dim=0),),
    )
    return Program(graph, mesh, signature, Form.GLOBAL)
