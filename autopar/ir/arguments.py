"""Typed access to the arguments of a call: torch.fx gives all of them the same broad type, ops say what they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import Node

from autopar._torch import schema_of


def node_at(call: Node, position: int) -> Node:
    """The argument at `position`, which is another node's value."""
    value = call.args[position]
    assert isinstance(value, Node), f"argument {position} of {call.format_node()} is {value!r}"
    return value


def int_at(call: Node, position: int) -> int:
    """The argument at `position`, a whole number (a flag counts as one)."""
    value = call.args[position]
    assert isinstance(value, int), f"argument {position} of {call.format_node()} is {value!r}"
    return value


def float_at(call: Node, position: int) -> float:
    """The argument at `position`, a number."""
    value = call.args[position]
    assert isinstance(value, (int, float)), f"argument {position} of {call.format_node()} is {value!r}"
    return float(value)


def float_named(call: Node, name: str, default: float) -> float:
    """The keyword argument `name`, a number; `default` where it is not given, or None."""
    value = call.kwargs.get(name)
    assert value is None or isinstance(value, (int, float)), f"{name} of {call.format_node()} is {value!r}"
    return default if value is None else float(value)


def list_at(call: Node, position: int) -> list[object]:
    """The argument at `position`, a list."""
    value = call.args[position]
    assert isinstance(value, Sequence) and not isinstance(value, str), f"argument {position} of {call.format_node()} is {value!r}"
    return list(value)


def ints_at(call: Node, position: int) -> list[int]:
    """The argument at `position`, a list of whole numbers."""
    found = list_at(call, position)
    assert all(isinstance(each, int) for each in found), f"argument {position} of {call.format_node()} is {found!r}"
    return [each for each in found if isinstance(each, int)]


def arguments(call: Node) -> tuple[Any, ...]:
    """All positional arguments; the op's schema says of which types."""
    return call.args


def all_named(call: Node) -> dict[str, Any]:
    """All arguments of a call of an ATen op by name, defaults of its schema among them."""
    known = schema_of(call.target).arguments
    found = {each.name: each.default_value for each in known}
    return found | {each.name: value for each, value in zip(known, call.args, strict=False)} | call.kwargs


def call_of(node: Node) -> Callable[..., Any]:
    """The function that `node` calls."""
    assert callable(node.target), f"{node.format_node()} calls nothing"
    return node.target
