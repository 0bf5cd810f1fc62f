"""One gate, whole: a product of an activation and of what it gates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from autopar.graph.constants import Constants
from autopar.graph.emit import tensor_of
from autopar.ir.arguments import int_at
from autopar.ir.fusion import Refused
from autopar.ops.spellings import PRODUCTS, QUOTIENTS
from autopar.passes.fuse.gate.activations import Activated, by_hand, named
from autopar.passes.fuse.gate.checks import check_interior, check_writes, narrowest, rounded, same_as, widest
from autopar.passes.fuse.gate.factors import Factor, Factors, products_of

aten = torch.ops.aten

# Functions that gate in other models; the op has none of them.
_OTHERS: dict[object, str] = {
    aten.tanh.default: "tanh", aten.elu.default: "elu", aten.leaky_relu.default: "leaky_relu", aten.hardswish.default: "hardswish",
    aten.hardsigmoid.default: "hardsigmoid", aten.hardtanh.default: "hardtanh", aten.relu6.default: "relu6", aten.mish.default: "mish",
    aten.softplus.default: "softplus", aten.selu.default: "selu", aten.clamp_min.default: "clamp(min=...)", aten.clamp.default: "clamp",
}  # fmt: skip


@dataclass(frozen=True)
class Gate:
    """number · activation(`gate`) · `up`, as the value `root`. `interior` are the nodes between.

    Where `halves` is a dim, gate and up are the second and the first half of it, of one value.
    """

    root: Node
    kind: str
    gate: Node
    up: Node
    dtype: torch.dtype
    number: float = 1.0
    interior: frozenset[Node] = frozenset()
    by_hand: bool = False
    halves: int | None = None

    def conditions(self) -> tuple[str, ...]:
        """What was found, a phrase each."""
        found = [f"{self.kind} written by hand" if self.by_hand else self.kind]
        found += ["gate and up are halves of one value"] if self.halves is not None else []
        found += [f"times {self.number:.12g}"] if self.number != 1.0 else []
        for what, node in (("gate", self.gate), ("up", self.up)):
            before = tensor_of(node).dtype
            found += [f"{what} widened from {before} to {self.dtype}"] if before != self.dtype else []
        return tuple(found)


def match_gate(product: Node, constants: Constants, writers: Sequence[Node]) -> Gate | None:
    """The gate whose value is `product`; None where there is nothing like one. Raises `Refused`. `writers` write in place."""
    if product.target is aten.glu.default:
        return _halves(product)
    if product.target not in PRODUCTS and product.target not in QUOTIENTS:
        return None
    if not isinstance(product.meta.get("val"), torch.Tensor) or tensor_of(product).numel() == 1:
        return None
    reason: Refused | None = None
    for found in _readings(product, constants):
        try:
            return _gate(product, found, writers)
        except Refused as refused:
            reason = reason or refused
    if reason is not None:
        raise reason
    _refuse_others(product, constants)
    return None


def _halves(node: Node) -> Gate:
    whole = node.args[0]
    assert isinstance(whole, Node)
    dim = int_at(node, 1) if len(node.args) > 1 else -1
    return Gate(node, "sigmoid", whole, whole, tensor_of(node).dtype, halves=dim % tensor_of(whole).dim())


def _readings(product: Node, constants: Constants) -> list[Activated]:
    """The ways to read `product` as an activation and one factor more: what takes most ops first, then the first operand's."""
    found: list[Activated] = []
    for factors in products_of(product, constants):
        found += _named(factors, constants)
        found += by_hand(factors, constants)
    fitting = [each for each in found if len(each.rest) == 1 and not each.rest[0].divides]
    return sorted(fitting, key=lambda each: -len(each.interior))


def _named(factors: Factors, constants: Constants) -> Iterator[Activated]:
    for item in factors.items:
        each = named(item, constants)
        if each is not None:
            rest = tuple(other for other in factors.items if other is not item)
            number, interior = factors.number * each.number, factors.interior | each.interior
            yield Activated(each.kind, each.gate, number, interior, rest, each.by_hand)


def _gate(product: Node, found: Activated, writers: Sequence[Node]) -> Gate:
    root, (rest,) = rounded(product), found.rest
    gate, up = narrowest(found.gate), narrowest(rest.node)
    interior = found.interior | {product, root}
    if rest.node in interior:
        raise Refused("it gates its own value")
    _check_operands(gate, up, product)
    check_interior(interior - {root}, (root,), "its activation is used elsewhere, too")
    check_writes(interior, same_as(gate) | same_as(up), root, writers)
    return Gate(root, found.kind, gate, up, widest(gate, up, root), found.number, interior - {root}, found.by_hand)


def _check_operands(gate: Node, up: Node, product: Node) -> None:
    shapes = [tuple(tensor_of(node).shape) for node in (gate, up, product)]
    if shapes.count(shapes[2]) != 3:
        raise Refused(f"one is broadcast: the gate is {list(shapes[0])}, what it gates {list(shapes[1])}")
    dtypes = [tensor_of(node).dtype for node in (gate, up)]
    if not all(dtype.is_floating_point for dtype in dtypes):
        raise Refused(f"the gate is of {dtypes[0]}, what it gates of {dtypes[1]}")


def _refuse_others(product: Node, constants: Constants) -> None:
    factors = next(products_of(product, constants), None)
    for item in factors.items if factors is not None and not any(item.divides for item in factors.items) else ():
        name = _OTHERS.get(item.core.node.target)
        others = [other for other in factors.items if other is not item] if factors else []
        if name is not None and _is_whole(others, product) and _is_whole([item], product):
            raise Refused(f"{name} is none of silu, gelu, gelu_tanh, relu and sigmoid")


def _is_whole(items: list[Factor], product: Node) -> bool:
    return all(tensor_of(item.node).shape == tensor_of(product).shape for item in items)
