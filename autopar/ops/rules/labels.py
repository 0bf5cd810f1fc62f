"""How rules read a node: its arguments, shapes, and the labels of broadcast and positional dims."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.fx import Node

from autopar._torch import pytree
from autopar.ir.collectives import reshard
from autopar.ir.program import operands, results_of
from autopar.ops.rule import Labels

aten = torch.ops.aten


def argument(node: Node, index: int, name: str = "", default: Any = None) -> Any:
    """The argument at `index`, or the keyword `name`, or `default`."""
    return node.args[index] if index < len(node.args) else node.kwargs.get(name, default)


def value_of(node: Any) -> torch.Tensor:
    """The fake tensor of a one-result node."""
    value = results_of(node)[0]
    assert value is not None, node
    return value


def shape_of(node: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in value_of(node).shape)


def dim_of(dim: Any, num_dims: int) -> int:
    """A dim argument, counted from the front."""
    return int(dim) % num_dims if num_dims else 0


def dims_of(dims: Any, num_dims: int) -> tuple[int, ...]:
    """A list of dims (or one dim, or None or empty for all), counted from the front."""
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        return tuple(range(num_dims))
    return tuple(dim_of(dim, num_dims) for dim in ([dims] if isinstance(dims, int) else dims))


def positional(num_dims: int, prefix: str = "d", start: int = 0) -> Labels:
    """`d0, d1, …`"""
    return tuple(f"{prefix}{start + i}" for i in range(num_dims))


def blocked(num_dims: int) -> Labels:
    return (None,) * num_dims


def without(labels: Labels, dims: Iterable[int]) -> Labels:
    """The labels with those of `dims` replaced by None."""
    taken = set(dims)
    return tuple(None if i in taken else label for i, label in enumerate(labels))


def broadcast(operand: Sequence[int], result: Sequence[int]) -> Labels:
    """Positional labels of an operand against its result: aligned at the right, None where it is broadcast."""
    offset = len(result) - len(operand)
    return tuple(f"d{offset + i}" if size == result[offset + i] else None for i, size in enumerate(operand))


def aligned(node: Node, pairs: Iterable[tuple[Any, Labels]]) -> tuple[Labels, ...]:
    """The labels of the operands in their order, from (argument, labels) pairs; arguments that are no nodes are left out."""
    remaining = [(argument, labels) for argument, labels in pairs if isinstance(argument, Node)]
    found: list[Labels] = []
    for operand in operands(node):
        position = next(i for i, (candidate, _) in enumerate(remaining) if candidate is operand)
        found.append(remaining.pop(position)[1])
    return tuple(found)


def position_at(node: Node, index: int) -> frozenset[int]:
    """The position among the operands of the argument at `index`, as a set for `Rule.linear`; empty when it is no node. By its place, since
    one value may stand at several."""
    if not isinstance(node.args[index], Node):
        return frozenset()
    return frozenset({sum(isinstance(each, Node) for each in pytree.tree_leaves(node.args[:index]))})


_LAYOUT_ONLY = (
    "view",
    "_unsafe_view",
    "reshape",
    "expand",
    "unsqueeze",
    "squeeze",
    "clone",
    "alias",
    "detach",
    "_to_copy",
    "permute",
    "t",
    "transpose",
)
_FILLED: dict[str, Callable[[Node], Any]] = {
    "full": lambda node: node.args[1],
    "full_like": lambda node: node.args[1],
    "new_full": lambda node: node.args[2],
    "scalar_tensor": lambda node: node.args[0],
    "zeros": lambda _: 0,
    "zeros_like": lambda _: 0,
    "new_zeros": lambda _: 0,
}


def is_zero(value: Any) -> bool:
    """Whether an argument is the number 0 or a tensor made of zeros in this graph."""
    while isinstance(value, Node):
        if value.op != "call_function":
            return False
        if value.target is reshard:
            value = value.args[0]
            continue
        name = str(value.target).removeprefix("aten.").split(".")[0]
        if name in _FILLED:
            value = _FILLED[name](value)
        elif name in _LAYOUT_ONLY:
            value = value.args[0]
        else:
            return False
    return isinstance(value, (int, float)) and value == 0


def numel(sizes: Iterable[int]) -> int:
    return math.prod(sizes)
