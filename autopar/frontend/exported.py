"""From torch's `ExportedProgram` to a FORWARD program: one device-independent form.

Placeholders for parameters, buffers, constants and batch tensors in that order, regions under `no_grad` inlined,
values faked on the CPU whatever device the model is on.
"""

from __future__ import annotations

import operator
import re
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind as ExportedKind
from torch.export.graph_signature import InputSpec
from torch.export.graph_signature import OutputKind as ExportedOutput
from torch.fx import Graph, GraphModule, Node

from autopar._torch import HigherOrderOperator, fake_mode, pytree
from autopar.errors import CaptureError
from autopar.frontend.custom_functions import function_at
from autopar.frontend.hooks import hooks_placed
from autopar.frontend.value_checks import ASSERTS, checks_as_outputs
from autopar.graph.differentiable import differentiable
from autopar.graph.emit import replace
from autopar.graph.overwrites import gives_back, memory_of, writers_of, written_by
from autopar.ir.arguments import arguments, int_at, node_at
from autopar.ir.keys import SOURCE, Source
from autopar.ir.mesh import Mesh
from autopar.ir.program import Form, Input, InputKind, Output, Program, Signature
from autopar.ir.source import set_sources, source_of

# The attribute under which capture wraps the user's model.
_PREFIX = "model."
_KINDS: dict[ExportedKind, InputKind] = {
    ExportedKind.PARAMETER: "parameter",
    ExportedKind.BUFFER: "buffer",
    ExportedKind.CONSTANT_TENSOR: "constant",
    ExportedKind.USER_INPUT: "batch",
}


def forward_program(
    exported: ExportedProgram,
    mesh: Mesh,
    trainable: frozenset[str],
    structure: Any,
    leaves: tuple[Any, ...],
    loss_index: int | None,
    kept: tuple[int, ...] | None = None,
) -> Program:
    """The FORWARD program of what was exported.

    `trainable` names the parameters that get gradients; `structure` and `leaves` describe the user's output, in which the
    loss is leaf `loss_index` (None: there is none); `kept` are the leaves that the graph returns, all by default.
    Raises `CaptureError` for what has no place.
    """
    graph, mapping = Graph(), dict[Node, Any]()
    constants: dict[str, torch.Tensor] = {}
    inputs = _inputs(exported, trainable)
    for item, node in inputs:
        mapping[node] = _placeholder(graph, item)
        mapping[node].meta = dict(node.meta)
        if item.kind == "constant":
            constants[item.name] = exported.constants[item.name]  # type: ignore[assignment]
    _copy_calls(exported.graph_module, graph, mapping)
    hooks_placed(graph)
    outputs = _copy_outputs(exported, graph, mapping, loss_index, kept)
    program = Program(graph, mesh, Signature(tuple(item for item, _ in inputs), outputs, structure, leaves), Form.FORWARD, constants)
    _refake(program)
    _drop_needless_detaches(program)
    return checks_as_outputs(program)


def _inputs(exported: ExportedProgram, trainable: frozenset[str]) -> list[tuple[Input, Node]]:
    """Every tensor that the graph takes: parameters, buffers, constants, then the batch by flat index of its leaf."""
    specs = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}
    users = [spec.arg.name for spec in exported.graph_signature.input_specs if spec.kind == ExportedKind.USER_INPUT]
    found: list[tuple[Input, Node]] = []
    for node in exported.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        if isinstance(value, torch.Tensor):
            kind, name = _identity(specs[node.name], users)
            found.append((Input(kind, name, tuple(value.shape), value.dtype, name in trainable and kind == "parameter"), node))
    order = list(_KINDS.values())
    return sorted(found, key=lambda pair: order.index(pair[0].kind))


def _identity(spec: InputSpec, users: list[str]) -> tuple[InputKind, str]:
    if spec.kind not in _KINDS:
        raise CaptureError(f"the captured graph takes {spec.arg} of kind {spec.kind}, which autopar cannot place; move it out of forward")
    kind = _KINDS[spec.kind]
    if kind == "batch":
        return kind, str(users.index(spec.arg.name))
    name = spec.target or ""
    return kind, name if kind == "constant" else name.removeprefix(_PREFIX)


def _placeholder(graph: Graph, item: Input) -> Node:
    """The placeholder of an input. Both its name and its target are arguments of generated code: valid in Python, and no two alike
    (`offset["default"]` is a name of a parameter, and `a.b` and `a_b` may be two)."""
    prefix = {"parameter": "p", "buffer": "b", "constant": "c", "batch": "input"}[item.kind]
    node = graph.placeholder(re.sub(r"\W", "_", f"{prefix}_{item.name}"))
    node.target = node.name
    return node


def _copy_calls(module: GraphModule, graph: Graph, mapping: dict[Node, Any]) -> tuple[Any, ...]:
    """Copy the calls of `module` into `graph`, regions under `no_grad` or a disabled autocast inlined; returns what it outputs."""
    for node in module.graph.nodes:
        if node.op == "output":
            return torch.fx.map_arg(node.args[0], lambda argument: mapping[argument])
        # What else torch asserts, of shapes and dtypes, held when it was traced.
        if node.op in ("placeholder", "get_attr") or ("_assert" in str(node.target) and node.target not in ASSERTS):
            continue
        assert node.op == "call_function", node.format_node()
        if isinstance(node.target, HigherOrderOperator):
            mapping[node] = _inline(module, node, graph, mapping)
            continue
        if node.target is operator.getitem and isinstance(mapping[node.args[0]], tuple):
            mapping[node] = mapping[node_at(node, 0)][int_at(node, 1)]
            continue
        copied = graph.node_copy(node, lambda argument: mapping[argument])
        copied.args, copied.kwargs = pytree.tree_map(_on_cpu, (copied.args, dict(copied.kwargs)))
        mapping[node] = copied
        if copied.target is torch.ops.autopar.custom_function.default:
            operands, site = copied.args
            copied.target, copied.args = function_at(site), tuple(operands)
        if copied.target is torch.ops.aten.detach_.default:  # of `torch.tensor(...)` in forward; the fake constant may be a view
            copied.target = torch.ops.aten.detach.default
            mapping[node.args[0]] = copied
    raise AssertionError("a graph without an output")


def _on_cpu(argument: Any) -> Any:
    return torch.device("cpu") if isinstance(argument, torch.device) else argument


def _inline(module: GraphModule, call: Node, graph: Graph, mapping: dict[Node, Any]) -> Any:
    """The body of a region: what `no_grad` computes with is detached; a disabled autocast changes nothing here."""
    name, args = str(call.target), list(arguments(call))
    if name == "wrap_with_set_grad_enabled":
        detached, body, operands = not args[0], args[1], args[2:]
    elif name == "wrap_with_autocast" and not args[2]:
        detached, body, operands = False, args[4], args[5:]
    else:
        raise CaptureError(
            f"{_region_source(module, args)} runs under {name}{tuple(map(str, args[:4]))}, a region that autopar does not rewrite; "
            "move the context out of forward (an enabled autocast: cast the model's weights instead)"
        )
    assert isinstance(body, Node)
    region = getattr(module, str(body.target))
    outer = [mapping[operand] for operand in operands]
    # The operands rather than the results: what is written in place inside has no gradient either.
    own = [_detached(graph, operand) if detached else operand for operand in outer]
    results = _copy_calls(region, graph, dict(zip(region.graph.find_nodes(op="placeholder"), own, strict=True)))
    # An operand that the region hands back, written in place or not, is itself.
    themselves = dict(zip(own, outer, strict=True))
    return tuple(themselves.get(_written(result), result) for result in results)


def _written(result: Node) -> Node:
    """The value that in-place ops wrote to make `result`, which they returned; `result` itself if none did."""
    while result.op == "call_function" and gives_back(result):
        result = written_by(result)
    return result


def _detached(graph: Graph, operand: Node) -> Node:
    node = graph.call_function(torch.ops.aten.detach.default, (operand,))
    node.meta = dict(operand.meta)
    return node


def _drop_needless_detaches(program: Program) -> None:
    """Drop a detach of a gradient-free value, unless a differentiable one may later be written into its memory."""
    trained, written = differentiable(program), {memory_of(each) for each in writers_of(program.graph)}
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default):
        operand = node_at(node, 0)
        if operand not in trained and (memory_of(operand) not in written or memory_of(operand).op == "placeholder"):
            replace(node, operand)


def _region_source(module: GraphModule, args: list[Any]) -> Source:
    """Where the first call of a region stands."""
    bodies = [getattr(module, str(argument.target)) for argument in args if isinstance(argument, Node) and argument.op == "get_attr"]
    calls = [node for body in bodies for node in body.graph.nodes if node.meta.get("stack_trace")]
    return source_of(calls[0], _PREFIX) if calls else Source()


def _copy_outputs(
    exported: ExportedProgram, graph: Graph, mapping: dict[Node, Any], loss_index: int | None, kept: tuple[int, ...] | None
) -> tuple[Output, ...]:
    """Outputs of the graph; the loss, where there is one, is the leaf `loss_index` of the user's structure; `kept` as above."""
    outputs: list[Output] = []
    nodes: list[Node] = []
    position = 0
    results: Any = exported.graph.output_node().args[0]
    for entry, node in zip(exported.graph_signature.output_specs, results, strict=True):
        mutation = entry.kind == ExportedOutput.BUFFER_MUTATION
        if isinstance(node, Node):
            value = node.meta["val"]
            place = position if mutation or kept is None else kept[position]
            kind = "buffer" if mutation else "loss" if place == loss_index else "output"
            name = (entry.target or "").removeprefix(_PREFIX) if mutation else str(place)
            outputs.append(Output(kind, name, tuple(value.shape), value.dtype, not mutation and value.is_floating_point()))
            nodes.append(mapping[node])
        position += not mutation
    graph.output(tuple(nodes))
    return tuple(outputs)


def _refake(program: Program) -> None:
    """Give every node a fake value on the CPU, all of one mode, and its source."""
    mode = fake_mode()
    values: dict[Node, Any] = {}
    with mode, torch.no_grad():
        for item, node in program.named_inputs():
            values[node] = torch.empty(item.shape, dtype=item.dtype, device="cpu")
        for node in program.graph.nodes:
            if node.op == "call_function":
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda argument: values[argument])
                values[node] = node.target(*args, **kwargs)
            if node in values:
                node.meta["val"] = values[node]
    set_sources(program.graph, _PREFIX)
    _refuse_sparse(program.graph)


def _refuse_sparse(graph: Graph) -> None:
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            raise CaptureError(
                f"{node.target} makes a tensor of layout {value.layout}, of which nothing is known that could be split\n"
                f"  where: {SOURCE[node].at}\n"
                "  how to mend it: compute with dense tensors, masked where they are zero, or with scatter_add and index_select"
            )
