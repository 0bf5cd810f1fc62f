"""One norm, whole: an op of ATen's or a norm by hand, with the casts, the weight and the bias that follow it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.fx import Node

from autopar.graph.constants import Constants
from autopar.graph.emit import tensor_of
from autopar.graph.overwrites import overwritten, writes
from autopar.ir.fusion import Refused
from autopar.ops.rules.labels import argument
from autopar.ops.spellings import is_cast
from autopar.passes.fuse.norm.by_hand import Normalised, is_affine, normalised_at
from autopar.passes.fuse.norm.reading import PRODUCTS, SUMS, casts_above, is_tensor, narrowest, stripped

aten = torch.ops.aten

_LAYER_NORMS = (aten.layer_norm.default, aten.native_layer_norm.default)


@dataclass(frozen=True)
class Match:
    """norm(x) · weight + bias as the value `end`; `start` is the norm without what follows it, `interior` the nodes between."""

    start: Node
    end: Node
    x: Node
    weight: Node | None
    bias: Node | None
    eps: float
    centred: bool
    interior: frozenset[Node]

    @property
    def dtype(self) -> torch.dtype:
        """What the op returns: at least as wide as its operand and its result. Of 16 bits it computes in float32 anyway."""
        found = torch.promote_types(tensor_of(self.x).dtype, tensor_of(self.end).dtype)
        wide = any(item is not None and tensor_of(item).dtype == torch.float64 for item in (self.weight, self.bias))
        return torch.float64 if wide else found

    def condition(self) -> str:
        """What was found, in a phrase."""
        kind, columns = "layer norm" if self.centred else "RMS norm", tensor_of(self.x).shape[-1]
        there = [name for name, item in (("a weight", self.weight), ("a bias", self.bias)) if item is not None]
        return f"{kind} over the last dim ({columns}), eps {self.eps:.6g}, {'with ' + ' and '.join(there) if there else 'without a weight'}"


@dataclass
class _Tail:
    """What follows a norm: the furthest node that the op can give, and what it takes in on the way."""

    end: Node
    weight: Node | None
    bias: Node | None
    interior: set[Node]


def match(node: Node, constants: Constants) -> Match | None:
    """The norm whose value, before any weight that follows, is `node`; None where there is nothing like one. Raises `Refused`."""
    if node.op != "call_function":
        return None
    bias, value = None, node
    if node.target in _LAYER_NORMS or node.target is aten.rms_norm.default:
        found, bias, value = _of_op(node)
    else:
        found = normalised_at(node, constants)
    if found is None:
        return None
    tail = _tail(value, found, bias)
    weight, bias = (None if item is None else narrowest(item) for item in (tail.weight, tail.bias))
    interior = found.interior | tail.interior | {node, value}
    return Match(node, tail.end, found.x, weight, bias, found.eps, found.centred, interior - {tail.end})


def check_writes(found: Match, writers: Sequence[Node]) -> None:
    """The op reads its operands where `end` stood: none may have been written since it was made. Raises `Refused`."""
    read = [item for item in (found.x, found.weight, found.bias) if item is not None]
    writer = overwritten(read, found.end, writers)
    if writer is not None:
        raise Refused(f"{writer.target} writes into an operand in place, between where it is made and the norm")


def _of_op(node: Node) -> tuple[Normalised, Node | None, Node]:
    """An op of ATen's: the norm, its bias, and the node that holds its value."""
    x, shape = node.args[0], node.args[1]
    assert isinstance(x, Node)
    if len(shape) != 1:  # type: ignore[arg-type]
        raise Refused(f"it runs over the last {len(shape)} dims")  # type: ignore[arg-type]
    if not tensor_of(x).is_floating_point():
        raise Refused(f"the value is of {tensor_of(x).dtype}")
    centred = node.target in _LAYER_NORMS
    weight = argument(node, 2, "weight")
    bias = argument(node, 3, "bias") if centred else None
    eps = argument(node, 4, "eps", 1e-5) if centred else argument(node, 3, "eps")
    eps = default_eps(tensor_of(x).dtype) if eps is None else float(eps)
    value = node
    if node.target is aten.native_layer_norm.default:
        read = [user for user in node.users if user.users or user.op == "output"]
        if [user.args[1] for user in read] != [0]:
            raise Refused("its mean or its deviation is read")
        value = read[0]
    return Normalised(value, stripped(x), centred, eps, frozenset(casts_above(x)), weight), bias, value


@cache
def default_eps(dtype: torch.dtype) -> float:
    """What `rms_norm` without an eps takes for `dtype`: torch took the rounding of that dtype first, later of the one it computes in."""
    small = 1e-3
    candidates = [torch.finfo(each).eps for each in (dtype, torch.promote_types(dtype, torch.float32))]
    got = float(torch.nn.functional.rms_norm(torch.full((1, 1), small, dtype=dtype), (1,)))
    return min(candidates, key=lambda eps: abs(small / (small**2 + eps) ** 0.5 - got))


def _tail(value: Node, found: Normalised, bias: Node | None) -> _Tail:
    """Casts, one weight and one bias below `value`, as long as nothing else reads what is between."""
    tail, passed = _Tail(value, found.weight, bias, set()), [value]
    while (user := _only_user(passed[-1])) is not None:
        node = passed[-1]
        if is_cast(user):
            # What is made wider stays so only where it is then weighed: a rounded value that is widened is read as it is.
            tail.end = tail.end if _is_wider(user, node) else user
        elif tail.bias is None and (item := _affine(user, node, found.x)) is not None:
            if user.target in PRODUCTS and tail.weight is None:
                tail.weight = item
            elif user.target in SUMS:
                tail.bias = item
            else:
                break
            tail.end = user
        else:
            break
        passed.append(user)
    tail.interior = set(passed[: passed.index(tail.end)])
    return tail


def _is_wider(user: Node, node: Node) -> bool:
    before, after = tensor_of(node).dtype, tensor_of(user).dtype
    return torch.promote_types(before, after) == after


def _only_user(node: Node) -> Node | None:
    users = [user for user in node.users if user.users or user.op == "output" or writes(user)]
    return users[0] if len(users) == 1 and users[0].op == "call_function" and not writes(users[0]) else None


def _affine(user: Node, node: Node, x: Node) -> Node | None:
    """The other operand of a product or a sum, where it has one number a column."""
    if user.target not in (*PRODUCTS, *SUMS) or user.kwargs.get("alpha", 1) != 1:
        return None
    others: list[Any] = [each for each in user.args[:2] if each is not node]
    return others[0] if len(others) == 1 and is_tensor(others[0]) and is_affine(others[0], x) else None
