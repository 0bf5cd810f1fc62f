"""Capture: an unmodified `nn.Module` and example inputs become a FORWARD program.

`torch.export.export(strict=True)` (Dynamo, public API) keeps composite ops single, parameter names
original and source lines attached. The captured graph is then brought to one device-independent
form: placeholders for parameters, buffers, constants and batch tensors in that order, values faked on the CPU.
"""

from __future__ import annotations

import contextlib
import operator
import os
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass, replace
from enum import Enum
from typing import Any, Literal

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind as ExportedKind
from torch.export.graph_signature import OutputKind as ExportedOutput
from torch.fx import Graph, GraphModule, Node

from autopar._torch import HigherOrderOperator, fake_mode, pytree
from autopar.compiled import TENSOR
from autopar.errors import CaptureError
from autopar.keys import Source
from autopar.mesh import Mesh
from autopar.program import Form, Input, Output, Program, Signature
from autopar.source import set_sources, source_of, user_frames

_PREFIX = "model."
_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
LossPlace = Literal["itself", "attribute", "key"]
# The batch dim of each input that has one, by the input's flat index.
BatchDims = Mapping[int, int] | None


@dataclass(frozen=True)
class OutputSpec:
    """The user's output: its pytree `structure`, its `leaves` (TENSOR where a tensor stands) and where the loss is."""

    structure: Any
    leaves: tuple[Any, ...]
    loss: LossPlace | None
    loss_index: int


class _Captured(nn.Module):
    """What is exported: the model, returning its loss alone or everything."""

    def __init__(self, model: nn.Module, loss: LossPlace | None) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.model(*args, **kwargs)
        if self.loss == "attribute":
            return output.loss
        return output["loss"] if self.loss == "key" else output


def capture(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh, outputs: str | None = None, batch_dims: BatchDims = None
) -> Program:
    """Capture `model(*args, **kwargs)` as a FORWARD program.

    Inputs have the global batch's shapes; their values are not read. `outputs="all"` keeps every tensor of
    the output, None or "loss" the loss alone where there is one. `batch_dims` gives the batch dim of every input
    that has one; by default it is dim 0 of every tensor whose dim 0 is as long as the first one's.
    Raises `CaptureError`.
    """
    if outputs not in (None, "loss", "all"):
        raise CaptureError(f'outputs={outputs!r} is neither "loss" nor "all"')
    args, kwargs = _distinct_examples(model, args, kwargs)
    spec = _output_spec(model, args, kwargs)
    loss = None if outputs == "all" else spec.loss
    if outputs == "loss" and loss is None:
        raise CaptureError(
            'outputs="loss" was asked for, but the model returns no scalar, no `.loss` and no ["loss"]; pass labels, or outputs="all"'
        )
    with _explained(model), warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        exported = torch.export.export(_Captured(model, loss), args, kwargs, strict=True)
    program = _forward_program(exported, model, mesh, spec, loss)
    _refake(program)
    return _with_batch_dims(program, batch_dims)


def _with_batch_dims(program: Program, batch_dims: BatchDims) -> Program:
    if batch_dims is None:
        sized = [item for item in program.signature.inputs_of("batch") if item.shape]
        batch_dims = {int(item.name): 0 for item in sized if item.shape[0] == sized[0].shape[0]}
    inputs = tuple(
        replace(item, batch_dim=batch_dims.get(int(item.name))) if item.kind == "batch" else item for item in program.signature.inputs
    )
    return replace(program, signature=replace(program.signature, inputs=inputs))


def _distinct_examples(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Fresh tensors of the same shapes: the same tensor given twice (ids as labels) must stay two inputs."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))

    def example(leaf: Any) -> Any:
        return torch.zeros(leaf.shape, dtype=leaf.dtype, device=device) if isinstance(leaf, torch.Tensor) else leaf

    return pytree.tree_map(example, (args, kwargs))


def _output_spec(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OutputSpec:
    """Run the forward on fake tensors to learn what it returns."""
    mode = fake_mode()
    state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    with mode, torch.no_grad(), _explained(model), torch.random.fork_rng(devices=[]):
        fakes = {name: mode.from_tensor(value) for name, value in state.items()}
        fake_args, fake_kwargs = pytree.tree_map(
            lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs)
        )
        output = torch.func.functional_call(model, fakes, fake_args, fake_kwargs)
    leaves, structure = _flatten(output)
    place, loss = _find_loss(output)
    index = next((index for index, leaf in enumerate(leaves) if leaf is loss), None)
    if place is not None and index is None:
        raise CaptureError(
            f"the output holds a loss, but {type(output).__name__} is no structure that torch can take apart; "
            "return a dict, a tuple, a dataclass or a ModelOutput, or register the class with torch.utils._pytree.register_pytree_node"
        )
    return OutputSpec(structure, tuple(leaf if _is_constant(leaf) else TENSOR for leaf in leaves), place, index or 0)


def _flatten(output: Any) -> tuple[list[Any], Any]:
    """Leaves and structure. Plain dataclasses are made known to torch: export and the runtime take them apart, too."""
    leaves, structure = pytree.tree_flatten(output)
    unknown = {type(leaf) for leaf in leaves if is_dataclass(leaf) and not isinstance(leaf, type)}
    for kind in unknown:
        torch.export.register_dataclass(kind)
    return _flatten(output) if unknown else (leaves, structure)


def _is_constant(leaf: Any) -> bool:
    """Whether a leaf is the same in every call; tensors are not, nor are objects that may hold some (a key-value cache)."""
    return leaf is None or isinstance(leaf, (bool, int, float, complex, str, bytes, Enum, type, torch.dtype, torch.device))


def _find_loss(output: Any) -> tuple[LossPlace | None, Any]:
    if _is_loss(output):
        return "itself", output
    if _is_loss(getattr(output, "loss", None)):
        return "attribute", output.loss
    if isinstance(output, Mapping) and _is_loss(output.get("loss")):
        return "key", output["loss"]
    return None, None


def _is_loss(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 0 and value.is_floating_point()


def _forward_program(exported: ExportedProgram, model: nn.Module, mesh: Mesh, spec: OutputSpec, loss: LossPlace | None) -> Program:
    signature = exported.graph_signature
    kinds = {spec.arg.name: spec for spec in signature.input_specs}
    graph, constants, inputs = Graph(), dict[str, torch.Tensor](), list[tuple[int, Input, Node]]()
    trainable = {name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad}
    batch = 0
    for node in exported.graph.nodes:
        if node.op != "placeholder":
            continue
        entry, value = kinds[node.name], node.meta["val"]
        target = (entry.target or "").removeprefix(_PREFIX)
        if entry.kind == ExportedKind.USER_INPUT:
            if isinstance(value, torch.Tensor):
                inputs.append((3, Input("batch", str(batch), tuple(value.shape), value.dtype), node))
            batch += 1
        elif entry.kind == ExportedKind.PARAMETER:
            inputs.append((0, Input("parameter", target, tuple(value.shape), value.dtype, target in trainable), node))
        elif entry.kind == ExportedKind.BUFFER:
            inputs.append((1, Input("buffer", target, tuple(value.shape), value.dtype), node))
        elif entry.kind == ExportedKind.CONSTANT_TENSOR:
            constants[target] = exported.constants[entry.target]
            inputs.append((2, Input("constant", target, tuple(value.shape), value.dtype), node))
        else:
            raise CaptureError(
                f"the captured graph takes {node.name!r} of kind {entry.kind}, which autopar cannot place; move it out of forward"
            )
    inputs.sort(key=lambda item: item[0])
    mapping: dict[Node, Node] = {}
    for _, item, node in inputs:
        mapping[node] = graph.placeholder(_placeholder_name(item))
        mapping[node].meta = dict(node.meta)
    _copy_calls(exported.graph_module, graph, mapping)
    outputs = _copy_outputs(exported, graph, mapping, spec.loss_index if loss else None)
    return Program(
        graph, mesh, Signature(tuple(item for _, item, _ in inputs), outputs, spec.structure, spec.leaves), Form.FORWARD, constants
    )


def _placeholder_name(item: Input) -> str:
    prefix = {"parameter": "p", "buffer": "b", "constant": "c", "batch": "input"}[item.kind]
    return f"{prefix}_{item.name}".replace(".", "_")


def _copy_calls(module: GraphModule, graph: Graph, mapping: dict[Node, Node]) -> tuple[Any, ...]:
    """Copy the calls of `module` into `graph`, regions under `no_grad` or a disabled autocast inlined; returns what it outputs."""
    for node in module.graph.nodes:
        if node.op == "output":
            return torch.fx.map_arg(node.args[0], lambda argument: mapping[argument])  # type: ignore[return-value]
        if node.op in ("placeholder", "get_attr") or "_assert" in str(node.target):
            continue
        assert node.op == "call_function", node.format_node()
        if isinstance(node.target, HigherOrderOperator):
            mapping[node] = _inline(module, node, graph, mapping)
            continue
        if node.target is operator.getitem and isinstance(mapping[node.args[0]], tuple):
            mapping[node] = mapping[node.args[0]][node.args[1]]  # type: ignore[index]
            continue
        copied = graph.node_copy(node, lambda argument: mapping[argument])
        copied.args, copied.kwargs = pytree.tree_map(_on_cpu, (copied.args, dict(copied.kwargs)))
        mapping[node] = copied
    raise AssertionError("a graph without an output")


def _on_cpu(argument: Any) -> Any:
    return torch.device("cpu") if isinstance(argument, torch.device) else argument


def _inline(module: GraphModule, call: Node, graph: Graph, mapping: dict[Node, Node]) -> Any:
    """The body of a region: results of `no_grad` are detached; a disabled autocast changes nothing here."""
    name, args = str(call.target), list(call.args)
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
    inner: dict[Node, Node] = {}
    for placeholder, operand in zip(region.graph.find_nodes(op="placeholder"), operands, strict=True):
        inner[placeholder] = mapping[operand]  # type: ignore[index]
    results = _copy_calls(region, graph, inner)
    if not detached:
        return results

    def detach(result: Node) -> Node:
        node = graph.call_function(torch.ops.aten.detach.default, (result,))
        node.meta = dict(result.meta)
        return node

    return tuple(detach(result) for result in results)


def _region_source(module: GraphModule, args: list[Any]) -> Source:
    """Where the first call of a region stands."""
    bodies = [getattr(module, str(argument.target)) for argument in args if isinstance(argument, Node) and argument.op == "get_attr"]
    calls = [node for body in bodies for node in body.graph.nodes if node.meta.get("stack_trace")]
    return source_of(calls[0], _PREFIX) if calls else Source()


def _copy_outputs(exported: ExportedProgram, graph: Graph, mapping: dict[Node, Node], loss_index: int | None) -> tuple[Output, ...]:
    """Outputs of the graph; with `loss_index` the only user output is the loss, which is that leaf of the user's structure."""
    outputs: list[Output] = []
    nodes: list[Node] = []
    position = 0
    for entry, node in zip(exported.graph_signature.output_specs, exported.graph.output_node().args[0], strict=True):
        mutation = entry.kind == ExportedOutput.BUFFER_MUTATION
        if isinstance(node, Node):
            value = node.meta["val"]
            kind = "buffer" if mutation else "output" if loss_index is None else "loss"
            name = (entry.target or "").removeprefix(_PREFIX) if mutation else str(loss_index or position)
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
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda argument: values[argument])  # type: ignore[misc]
                values[node] = node.target(*args, **kwargs)
            if node in values:
                node.meta["val"] = values[node]
    set_sources(program.graph, _PREFIX)


@contextlib.contextmanager
def _explained(model: nn.Module) -> Any:
    """Turn what Dynamo or the model raises while it is traced into a `CaptureError`."""
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        text = str(error).split("\nfrom user code")[0].split("\nUser Stack")[0].strip()
        what = f"{type(model).__name__} cannot be captured as one graph: {type(error).__name__}: {text}"
        raise CaptureError(f"{what}\n  where: {_where(error)}\n  how to mend it: {_hint(type(error).__name__ + text)}") from error


def _where(error: Exception) -> str:
    """The innermost line of the user's that the error, or Dynamo's text of it, passes through."""
    frames = [frame for frame in user_frames(str(error)) if not frame.file.startswith(_OWN)]
    if not frames:
        frames = [frame for frame in user_frames("".join(traceback.format_tb(error.__traceback__))) if not frame.file.startswith(_OWN)]
    return f"{frames[-1].file}:{frames[-1].line}  {frames[-1].code}" if frames else "(no source line)"


_HINTS = (
    (
        ("DynamicCache", "pytree"),
        "the output holds an object that is no tensor structure (a key-value cache): set config.use_cache=False, or return tensors only",
    ),
    (
        ("DataDependent", "data-dependent", "Dynamic control flow", "item()"),
        "forward reads the value of a tensor (a branch, .item(), .tolist()); write it with torch.where, or decide it before the call",
    ),
    (
        ("DynamicOutputShape", "nonzero"),
        "the shape of a result depends on values (a boolean index, nonzero, unique); keep the shape and mask with torch.where",
    ),
    (
        ("graph break", "Unsupported", "skip", "numpy"),
        "this line leaves the graph (I/O, a foreign library, an unsupported call); move it out of forward",
    ),
)


def _hint(text: str) -> str:
    found = (hint for words, hint in _HINTS if any(word.lower() in text.lower() for word in words))
    return next(found, "the model must run as plain tensor code on inputs of these shapes")
