"""Small GLOBAL programs from plain functions, and programs as text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.checks.checker import check
from autopar.driver.manager import run_passes
from autopar.ir.keys import PHASE, SOURCE, Source
from autopar.ir.mesh import Mesh
from autopar.ir.program import Form, Input, Output, Program, Signature, results_of
from autopar.passes.global_.find_atoms import FindAtoms
from tests.support.programs import run

MESH = Mesh((("dp", 2), ("tp", 2)))


def traced(function: Callable[..., Any], *tensors: Tensor, mesh: Mesh = MESH, parameters: tuple[int, ...] = ()) -> Program:
    """`function` as a GLOBAL forward program. `parameters` says which inputs are; dim 0 of the others is the batch.

    Calls are traced as they are dispatched: write `torch.ops.aten…` to have a certain one.
    """
    graph = make_fx(function, tracing_mode="fake")(*tensors).graph
    inputs = []
    for index, node in enumerate(graph.find_nodes(op="placeholder")):
        value = node.meta["val"]
        is_parameter = index in parameters
        batch_dim = 0 if value.ndim and not is_parameter else None
        inputs.append(
            Input("parameter" if is_parameter else "batch", str(index), tuple(value.shape), value.dtype, is_parameter, batch_dim=batch_dim)
        )
    end = graph.output_node()
    results = end.args[0] if isinstance(end.args[0], (tuple, list)) else (end.args[0],)
    end.args = (tuple(results),)
    outputs = [Output("output", str(index), tuple(node.meta["val"].shape), node.meta["val"].dtype) for index, node in enumerate(results)]
    for node in graph.nodes:
        if node.op == "call_function":
            PHASE[node], SOURCE[node] = "forward", Source()
    return Program(graph, mesh, Signature(tuple(inputs), tuple(outputs)), Form.GLOBAL)


def with_atoms(program: Program) -> Program:
    return run_passes(program, (FindAtoms(),))


def text(program: Program) -> list[str]:
    """One line a call: `view: aten.view.default(x, [4, 2])`, and what is returned."""
    lines = []
    for node in program.graph.nodes:
        if node.op == "call_function":
            arguments = [*map(str, node.args), *(f"{name}={value}" for name, value in node.kwargs.items())]
            lines.append(f"{node.name}: {node.target}({', '.join(arguments)})")
    return [*lines, f"→ {', '.join(map(str, program.results))}"]


def ops(program: Program) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


def values(program: Program, *tensors: Tensor) -> list[Tensor]:
    named = {(item.kind, item.name): tensor for item, tensor in zip(program.signature.inputs, tensors, strict=True)}
    return list(run(program, named).values())


def assert_unchanged(before: Program, after: Program, *tensors: Tensor) -> None:
    """Equal values bit by bit, and a program that passes the check."""
    for one, other in zip(values(before, *tensors), values(after, *tensors), strict=True):
        assert torch.equal(one, other) and one.dtype == other.dtype
    for node in after.graph.nodes:
        assert node.op in ("placeholder", "output") or (node in PHASE and node in SOURCE), f"{node} has lost its origin"
    check(after)


def find(program: Program, target: Any) -> list[Node]:
    return [node for node in program.graph.nodes if node.target == target]


def tensor(node: Node) -> Tensor:
    (value,) = results_of(node)
    assert value is not None
    return value
