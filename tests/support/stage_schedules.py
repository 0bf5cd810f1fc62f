"""Two stages of two microbatches each, as schedules written by hand: on `MESH`, ranks 0 and 1 run FIRST, ranks 2 and 3 LAST."""

from __future__ import annotations

from torch import empty, float32, nn
from torch.fx import Graph, GraphModule

from autopar._torch import fake_mode
from autopar.ir.instructions import parse
from autopar.ir.mesh import Mesh
from autopar.ir.program import Input, Output, Signature
from autopar.ir.schedule import Fragment, Schedule, TensorType
from tests.support.schedules import buffers_of

MESH = Mesh((("pp", 2), ("tp", 2)))
LAYOUT: TensorType = ((4, 4), float32)

FIRST = """
RUN f2 (x, w) -> (h@0)
SEND 0F0>1 pp=1 (h@0)
RUN f2 (x, w) -> (h@1)
SEND 0F1>1 pp=1 (h@1)
RECV 1B0>0 pp=1 (d@0)
WAIT 1B0>0
RUN f1 (d@0) -> (g_w@0)
ADD g_w (g_w@0)
WAIT 0F0>1
FREE h@0 d@0 g_w@0
RECV 1B1>0 pp=1 (d@1)
WAIT 1B1>0
RUN f1 (d@1) -> (g_w@1)
ADD g_w (g_w@1)
WAIT 0F1>1
FREE h@1 d@1 g_w@1
LAUNCH all_reduce sum tp (g_w) -> gradient
WAIT gradient
FREE g_w
"""
LAST = """
RECV 0F0>1 pp=0 (h@0)
WAIT 0F0>1
RUN f1 (h@0) -> (d@0)
SEND 1B0>0 pp=0 (d@0)
RECV 0F1>1 pp=0 (h@1)
WAIT 0F1>1
RUN f1 (h@1) -> (d@1)
SEND 1B1>0 pp=0 (d@1)
WAIT 1B0>0
WAIT 1B1>0
FREE h@0 d@0 h@1 d@1
"""


def first(text: str = FIRST, **shapes: TensorType) -> Schedule:
    inputs = (Input("batch", "0", *LAYOUT), Input("parameter", "w", *LAYOUT, True))
    signature = Signature(inputs, (Output("gradient", "w", *LAYOUT),))
    return Schedule(parse(text), _fragments(), ("x", "w"), ("gradient",), signature, buffers_of(text, _shapes(shapes)))


def last(text: str = LAST, **shapes: TensorType) -> Schedule:
    return Schedule(parse(text), _fragments(), (), (), Signature((), ()), buffers_of(text, _shapes(shapes)))


def edited(text: str, *changes: tuple[str, str]) -> str:
    """`text` with each first string replaced by the second; it must be there."""
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


def _shapes(others: dict[str, TensorType]) -> dict[str, TensorType]:
    return dict.fromkeys(("x", "w", "h", "d", "g_w", "gradient"), LAYOUT) | others


def _fragments() -> dict[str, Fragment]:
    return {f"f{count}": Fragment(f"f{count}", _module(count)) for count in (1, 2)}


def _module(num_inputs: int) -> GraphModule:
    graph = Graph()
    nodes = [graph.placeholder(f"a{i}") for i in range(num_inputs)]
    with fake_mode():
        for node in nodes:
            node.meta["val"] = empty(LAYOUT[0], dtype=LAYOUT[1])
    graph.output((nodes[0],))
    return GraphModule(nn.Module(), graph)
