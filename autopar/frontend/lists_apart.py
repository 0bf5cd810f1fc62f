"""Calls on lists of tensors (`torch._foreach_mul_`) become calls on one tensor each, in the order of the list, as a CPU computes them.

What is rewritten goes by what single calls read and write.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from autopar._torch import OpOverload, schema_of
from autopar.errors import CaptureError
from autopar.ir.arguments import all_named, int_at
from autopar.ir.source import WRAPPED, source_of

aten = torch.ops.aten

_PREFIX = "aten::_foreach_"
# Torch computes these lists by others.
_BY_OTHERS = {
    "maximum": "clamp_min", "minimum": "clamp_max", "maximum_": "clamp_min_", "minimum_": "clamp_max_", "norm": "linalg_vector_norm",
}  # fmt: skip
# The overload of one tensor's op, the first that there is, by that of the list's: by what is computed with.
_WITH_TENSORS, _WITH_NUMBERS = ("Tensor", "Tensor_Tensor", "default"), ("Tensor_Scalar", "Scalar", "default")
_OVERLOADS = {
    "": ("default",), "List": _WITH_TENSORS, "Tensor": _WITH_TENSORS, "Scalar": _WITH_NUMBERS, "ScalarList": _WITH_NUMBERS,
    "ScalarAndTensor": ("Scalar",),
}  # fmt: skip
_ARITHMETIC = ("add", "sub", "mul", "div")  # traced with a number in the place of a tensor


def lists_taken_apart(graph: Graph) -> frozenset[Node]:
    """Take apart the calls on lists of an exported graph. Returns those in their places, which no autocast casts: it casts no lists."""
    made = set[Node]()
    for node in [each for each in graph.nodes if (schema := schema_of(each.target)) is not None and schema.name.startswith(_PREFIX)]:
        made |= _taken_apart(node)
    return frozenset(made)


def _taken_apart(node: Node) -> set[Node]:
    op, named = _of_one(node), all_named(node)
    length = next(len(value) for value in named.values() if isinstance(value, (list, tuple)))
    results, calls = node.meta.get("val"), list[Node]()
    for place in range(length):
        given = {name: value[place] if isinstance(value, (list, tuple)) else value for name, value in named.items()}
        args, kwargs = _arguments(op, given)
        with node.graph.inserting_before(node):
            calls.append(node.graph.call_function(op, args, kwargs))
        calls[-1].meta = dict(node.meta) | {"val": args[0].meta["val"] if results is None else results[place]}
    for reader in list(node.users):
        assert reader.target is operator.getitem, reader.format_node()
        reader.replace_all_uses_with(calls[int_at(reader, 1)])
        node.graph.erase_node(reader)
    node.graph.erase_node(node)
    return set(calls)


def _of_one(node: Node) -> OpOverload:
    """The op of one tensor that the list's repeats."""
    schema = schema_of(node.target)
    name: str = schema.name.removeprefix(_PREFIX)
    packet = getattr(aten, _BY_OTHERS.get(name, name), None)
    is_arithmetic = name.removesuffix("_") in _ARITHMETIC
    overloads = ("Tensor",) if is_arithmetic else _OVERLOADS[schema.overload_name]
    found = next((getattr(packet, each) for each in overloads if packet is not None and each in packet.overloads()), None)
    # Numbers that lie in a tensor are known to none but the list's.
    if found is None or (schema.overload_name == "Tensor" and not is_arithmetic):
        raise CaptureError(
            f"forward calls {node.target}, which autopar does not take apart into ops of one tensor each\n"
            f"  where: {source_of(node, WRAPPED).at}\n  how to mend it: write a loop over the list"
        )
    return found


def _arguments(op: OpOverload, given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What `op` takes, by what the list's op calls it: the same, or otherwise at the same place."""
    known = schema_of(op).arguments
    names = [each.name for each in known]
    named: dict[str, Any] = {}
    for place, (name, value) in enumerate(given.items()):
        named[name if name in names else "value" if "value" in names else names[place]] = value
    args = list[Any]()
    for each in known:
        if each.kwarg_only or each.name not in named:
            break
        args.append(named.pop(each.name))
    defaults = {each.name: each.default_value for each in known}
    return tuple(args), {name: value for name, value in named.items() if value != defaults[name]}
