"""A program as JSON, and back: FORWARD as capture gives it, GLOBAL as the joint trace does.

What differs between compiles is not written (mesh, freedom, order, precision): the program that is read takes another's.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from typing import Any, cast

import torch
from safetensors.torch import load, save
from torch.fx import Graph, Node

from autopar._torch import fake_mode
from autopar._torch_cache import flattening_of, parts_of_structure, structure_of, structure_of_leaf
from autopar.cache.encode import CannotStore, Decoder, Encoder, Unreadable, op_name, op_of
from autopar.ir import keys
from autopar.ir.mesh import Mesh
from autopar.ir.program import Form, Program, Signature

# Of what torch notes about a node, what passes and the joint trace read.
_RECORDS = (
    "val", "stack_trace", "nn_module_stack", "fwd_nn_module_stack", "seq_nr", "custom", "ac_graph_id", "partitioner_tag", "is_gradient_acc",
)  # fmt: skip
# Those that many nodes have alike.
_STACKS = ("nn_module_stack", "fwd_nn_module_stack")
_KEYS = {key.name: key for key in vars(keys).values() if isinstance(key, keys.Key)}
_CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "dict": dict, "OrderedDict": OrderedDict}
_OPS = ("placeholder", "call_function", "output")
Classes = Mapping[str, type]


def class_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


# ---- to JSON


def written(program: Program, has_constants: bool = True) -> dict[str, Any]:
    """`program` as JSON; without its constants where those are another program's. Raises `CannotStore`."""
    encoder = Encoder()
    signature = program.signature
    nodes = [_node(encoder, node) for node in program.graph.nodes]
    return {
        "form": program.form.value,
        "nodes": nodes,
        "inputs": [encoder.value(each) for each in signature.inputs],
        "outputs": [encoder.value(each) for each in signature.outputs],
        "structure": _structure(encoder, signature.structure) if signature.structure is not None else None,
        "leaves": encoder.value(signature.leaves),
        "checks": list(signature.checks),
        "written": list(program.written),
        "autocast": program.autocast,
        "reduce": encoder.value(program.reduce),
        "constants": _constants(program.constants) if has_constants else None,
        "table": encoder.table,
    }


def digest(program: Program) -> str:
    """Equal for FORWARD programs of which the joint trace makes the same. Raises `CannotStore`."""
    entry = written(program, has_constants=False)
    shapes = {name: [list(each.shape), str(each.dtype), each.requires_grad] for name, each in program.constants.items()}
    return hashlib.sha256(json.dumps([entry, shapes]).encode()).hexdigest()


def _node(encoder: Encoder, node: Node) -> list[Any]:
    if node.op not in _OPS:
        raise CannotStore(f"{node.name} is a {node.op}")
    target = op_name(node.target) if node.op == "call_function" else str(node.target)
    args, kwargs = encoder.value(node.args), encoder.value(dict(node.kwargs))
    meta: dict[str, Any] = {}
    for key, value in node.meta.items():
        if isinstance(key, keys.Key):
            meta[f"={key.name}"] = encoder.shared((key, value), value)
        elif key == "val":
            meta[key] = encoder.value(value)
        elif key in _STACKS and value:
            stack = {name: (entry[0], _type_name(entry[1])) for name, entry in value.items()}
            meta[key] = encoder.shared(tuple(stack.items()), stack)
        elif key in _RECORDS:
            meta[key] = encoder.shared((key, value), value) if isinstance(value, str) else encoder.value(value)
    encoder.nodes[node] = len(encoder.nodes)
    return [node.op, node.name, target, args, kwargs, meta]


def _type_name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else str(kind)


def _structure(encoder: Encoder, spec: Any) -> list[Any]:
    kind, context, children = parts_of_structure(spec)
    if kind is None:
        return []
    name = next((name for name, each in _CONTAINERS.items() if each is kind), None)
    encoded = ["class", class_name(context)] if isinstance(context, type) else encoder.value(context)
    return [name or class_name(kind), encoded, *(_structure(encoder, child) for child in children)]


def _constants(constants: Mapping[str, torch.Tensor]) -> str:
    """As a safetensors file, in text."""
    for name, tensor in constants.items():
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise CannotStore(f"the constant {name} is no plain contiguous tensor on the CPU")
        if tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or tensor.is_complex():
            raise CannotStore(f"the constant {name} is complex, or has gradients")
    return base64.b64encode(save({name: tensor.detach().clone() for name, tensor in constants.items()})).decode()


# ---- from JSON


def read(entry: Any, mesh: Mesh, classes: Classes) -> Program:
    """The program that `written` gave as `entry`. Classes in the structure of its output are looked up in `classes`, and nowhere else.

    Raises `Unreadable` for anything that `written` does not give.
    """
    try:
        return _read(entry, mesh, classes)
    except Unreadable:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError, AssertionError) as error:
        raise Unreadable(f"{type(error).__name__}: {error}") from error


def _read(entry: Any, mesh: Mesh, classes: Classes) -> Program:
    decoder, graph = Decoder(fake_mode(), table=entry["table"]), Graph()
    with torch.no_grad():
        for each in entry["nodes"]:
            decoder.nodes.append(_node_read(decoder, graph, each))
    inputs, outputs = (tuple(decoder.values(entry[name])) for name in ("inputs", "outputs"))
    if len(graph.find_nodes(op="placeholder")) != len(inputs) or len(graph.output_node().args[0]) != len(outputs):  # type: ignore[arg-type]
        raise Unreadable("the graph and its signature do not fit")
    structure = None if entry["structure"] is None else _structure_read(decoder, entry["structure"], classes)
    signature = Signature(inputs, outputs, structure, decoder.value(entry["leaves"]), tuple(map(str, entry["checks"])))
    constants = {} if entry["constants"] is None else load(base64.b64decode(entry["constants"], validate=True))
    names = [item.name for item in inputs if item.kind == "constant"]
    if entry["constants"] is not None and sorted(names) != sorted(constants):
        raise Unreadable(f"constants {sorted(constants)} for {sorted(names)}")
    autocast = None if entry["autocast"] is None else str(entry["autocast"])
    program = Program(graph, mesh, signature, Form(entry["form"]), {name: constants[name] for name in names if name in constants})
    return replace(program, written=tuple(map(str, entry["written"])), autocast=autocast, reduce=decoder.value(entry["reduce"]))


def _node_read(decoder: Decoder, graph: Graph, entry: Any) -> Node:
    op, name, target, args, kwargs, meta = entry
    if op not in _OPS or not str(name).isidentifier() or not str(target or "x"):
        raise Unreadable(f"{name!r} is a {op!r}")
    if op == "placeholder" and not str(target).isidentifier():
        raise Unreadable(f"{target!r} is no name of a placeholder")
    node = graph.create_node(op, op_of(target) if op == "call_function" else target, decoder.value(args), decoder.value(kwargs))
    node.name = name
    for key, value in meta.items():
        if not key.startswith("=") and key not in _RECORDS:
            raise Unreadable(f"a record {key!r} of a node")
        node.meta[_KEYS[key[1:]] if key.startswith("=") else key] = decoder.value(value)  # type: ignore[index]
    return node


def _structure_read(decoder: Decoder, entry: Any, classes: Classes) -> Any:
    if entry == []:
        return structure_of_leaf()
    name, context, *children = entry
    kind = _CONTAINERS.get(name) or _class_of(name, classes)
    if name not in _CONTAINERS and not flattening_of(kind) and is_dataclass(kind):
        torch.export.register_dataclass(cast("type[Any]", kind))  # as capture does
    is_class = isinstance(context, list) and context[:1] == ["class"]
    found = _class_of(context[1], classes) if is_class else decoder.value(context)
    return structure_of(kind, found, [_structure_read(decoder, child, classes) for child in children])


def _class_of(name: Any, classes: Classes) -> type:
    if name not in classes:
        raise Unreadable(f"{name!r} is no class that the model's forward knows")
    return classes[name]
