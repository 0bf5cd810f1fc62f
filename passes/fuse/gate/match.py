"""One gate, a product of an activation and of what it gates; one activation of a sum with a bias; or one activation written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace as changed

import torch
from torch.fx import Node

from autopar.graph.constants import Constants
from autopar.graph.emit import Emitter, tensor_of
from autopar.graph.overwrites import writes
from autopar.ir.arguments import int_at
from autopar.ir.fusion import NotFusible
from autopar.kernels.gated import bias_activation, gated
from autopar.ops.traits import PRODUCTS, QUOTIENTS, is_cast
from autopar.passes.fuse.gate.activations import Activated, activation_at, by_hand, named
from autopar.passes.fuse.gate.products import Multiplicand, products_of
from autopar.passes.fuse.guards import check_interior, check_kept, check_writes
from autopar.passes.fuse.match import Match, first_match
from autopar.passes.fuse.reading import is_tensor, narrowest, rounded, summands, widened, widest

aten = torch.ops.aten

# Functions that gate in other models; the op has none of them.
_OTHERS: dict[object, str] = {
    aten.tanh.default: "tanh", aten.elu.default: "elu", aten.leaky_relu.default: "leaky_relu", aten.hardswish.default: "hardswish",
    aten.hardsigmoid.default: "hardsigmoid", aten.hardtanh.default: "hardtanh", aten.relu6.default: "relu6", aten.mish.default: "mish",
    aten.softplus.default: "softplus", aten.selu.default: "selu", aten.clamp_min.default: "clamp(min=...)", aten.clamp.default: "clamp",
}  # fmt: skip


# What torch's own op calls them.
_GELU = {"gelu": "none", "gelu_tanh": "tanh"}


@dataclass(frozen=True)
class Gate(Match):
    """number · activation(`gate`) · `up`. Where `halves` is a dim, gate and up are the second and the first half of it, of one value."""

    kind: str
    gate: Node
    up: Node
    dtype: torch.dtype
    number: float = 1.0
    by_hand: bool = False
    halves: int | None = None

    def conditions(self) -> tuple[str, ...]:
        found = [f"{self.kind} written by hand" if self.by_hand else self.kind]
        found += ["gate and up are halves of one value"] if self.halves is not None else []
        found += [f"times {self.number:.12g}"] if self.number != 1.0 else []
        for what, node in (("gate", self.gate), ("up", self.up)):
            before = tensor_of(node).dtype
            found += [f"{what} widened from {before} to {self.dtype}"] if before != self.dtype else []
        return tuple(found)

    def emit(self, emit: Emitter) -> Node:
        gate, up = self.gate, self.up
        if self.halves is not None:
            middle = tensor_of(gate).shape[self.halves] // 2
            up, gate = (emit.call(aten.slice.Tensor, gate, self.halves, start, start + middle) for start in (0, middle))
        out = emit.call(gated, emit.cast(gate, self.dtype), emit.cast(up, self.dtype), activation=self.kind)
        return out if self.number == 1.0 else emit.call(aten.mul.Tensor, out, self.number)


@dataclass(frozen=True)
class Biased(Match):
    """activation(`x` + `bias`)."""

    kind: str
    x: Node
    bias: Node
    dtype: torch.dtype
    by_hand: bool

    def conditions(self) -> tuple[str, ...]:
        return (f"{self.kind} written by hand" if self.by_hand else self.kind, f"a bias of {tensor_of(self.bias).numel()} columns")

    def emit(self, emit: Emitter) -> Node:
        x, bias = emit.cast(self.x, self.dtype), emit.cast(self.bias, self.dtype)
        bias = bias if tensor_of(bias).dim() == 1 else emit.call(aten.reshape.default, bias, [tensor_of(bias).numel()])
        return emit.call(bias_activation, x, bias, activation=self.kind)


@dataclass(frozen=True)
class Written(Match):
    """activation(`x`) in several ops, each of which saves its operands."""

    kind: str
    x: Node
    dtype: torch.dtype

    def conditions(self) -> tuple[str, ...]:
        return (f"{self.kind} written by hand", "by the op of that name")

    def emit(self, emit: Emitter) -> Node:
        x = emit.cast(self.x, self.dtype)
        return emit.call(aten.silu.default, x) if self.kind == "silu" else emit.call(aten.gelu.default, x, approximate=_GELU[self.kind])


def match_gate(product: Node, constants: Constants, writers: Sequence[Node]) -> Gate | None:
    """The gate whose value is `product`; None where there is nothing like one. Raises `NotFusible`. `writers` write in place."""
    if product.target is aten.glu.default:
        return _halves(product)
    if product.target not in PRODUCTS and product.target not in QUOTIENTS:
        return None
    if not is_tensor(product) or tensor_of(product).numel() == 1:
        return None
    found = first_match(_readings(product, constants), lambda each: _gate(product, each, writers))
    if found is None:
        _refuse_others(product, constants)
    return found


def match_bias(node: Node, constants: Constants, writers: Sequence[Node]) -> Biased | None:
    """The activation of a sum with a bias whose value is `node`; None where there is nothing like one. Raises `NotFusible`."""
    if not is_tensor(node) or not tensor_of(node).is_floating_point() or is_cast(node):
        return None
    found = activation_at(node, constants)
    total = None if found is None else narrowest(found.gate)
    operands = None if total is None else _bias_of(total)
    if found is None or total is None or operands is None:
        return None
    root = rounded(node)
    interior = found.interior | {node, root} | widened(total)
    check_interior(interior - {root}, (root,), "its activation, or the sum with the bias, is used elsewhere, too")
    x, bias = map(narrowest, operands)
    check_writes(interior, widened(x) | widened(bias), root, writers)
    check_kept((x, bias), root, writers)
    return Biased(root, interior - {root}, found.kind, x, bias, widest(x, bias, root), found.by_hand)


def match_written(node: Node, constants: Constants, writers: Sequence[Node]) -> Written | None:
    """The silu or gelu in several ops whose value is `node`; None where there is nothing like one. Raises `NotFusible`."""
    if not is_tensor(node) or not tensor_of(node).is_floating_point() or is_cast(node):
        return None
    found = activation_at(node, constants)
    if found is None or not found.by_hand or found.kind not in ("silu", *_GELU):
        return None
    root, x = rounded(node), narrowest(found.gate)
    interior = found.interior | {node, root}
    check_interior(interior - {root}, (root,), "a part of it is used elsewhere, too")
    check_writes(interior, widened(x), root, writers)
    check_kept((x,), root, writers)
    return Written(root, interior - {root}, found.kind, x, widest(x, root))


def _bias_of(total: Node) -> tuple[Node, Node] | None:
    """x [..., N] and the bias, N elements along the last dim."""
    if not all(is_tensor(each) and tensor_of(each).is_floating_point() for each in total.args[:2]):
        return None
    # What is written into is x.
    for x, bias in summands(total)[: 1 if writes(total) else 2]:
        whole, shape = tensor_of(x).shape, tensor_of(bias).shape
        rows = len(whole) > 1 and whole == tensor_of(total).shape and whole[-1] > 1 and tensor_of(x).numel() > whole[-1]
        if rows and len(shape) <= len(whole) and shape[-1:] == whole[-1:] and tensor_of(bias).numel() == whole[-1]:
            return x, bias
    return None


def _halves(node: Node) -> Gate:
    whole = node.args[0]
    assert isinstance(whole, Node)
    dim = int_at(node, 1) if len(node.args) > 1 else -1
    return Gate(node, frozenset(), "sigmoid", whole, whole, tensor_of(node).dtype, halves=dim % tensor_of(whole).dim())


def _readings(product: Node, constants: Constants) -> list[Activated]:
    """The ways to read `product` as an activation and one factor more: what takes most ops first, then the first operand's."""
    found: list[Activated] = []
    for factors in products_of(product, constants):
        for item in factors.items:
            if (each := named(item, constants)) is not None:
                rest = tuple(other for other in factors.items if other is not item)
                number, interior = factors.number * each.number, factors.interior | each.interior
                found.append(changed(each, number=number, interior=interior, rest=rest))
        found += by_hand(factors, constants)
    fitting = [each for each in found if len(each.rest) == 1 and not each.rest[0].divides]
    return sorted(fitting, key=lambda each: -len(each.interior))


def _gate(product: Node, found: Activated, writers: Sequence[Node]) -> Gate:
    root, (rest,) = rounded(product), found.rest
    gate, up = narrowest(found.gate), narrowest(rest.node)
    interior = found.interior | {product, root}
    if rest.node in interior:
        raise NotFusible("it gates its own value")
    _check_shapes(gate, up, product)
    check_interior(interior - {root}, (root,), "its activation is used elsewhere, too")
    check_writes(interior, widened(gate) | widened(up), root, writers)
    check_kept((gate, up), root, writers)
    return Gate(root, interior - {root}, found.kind, gate, up, widest(gate, up, root), found.number, found.by_hand)


def _check_shapes(gate: Node, up: Node, product: Node) -> None:
    shapes = [tuple(tensor_of(node).shape) for node in (gate, up, product)]
    if shapes.count(shapes[2]) != 3:
        raise NotFusible(f"one is broadcast: the gate is {list(shapes[0])}, what it gates {list(shapes[1])}")
    dtypes = [tensor_of(node).dtype for node in (gate, up)]
    if not all(dtype.is_floating_point for dtype in dtypes):
        raise NotFusible(f"the gate is of {dtypes[0]}, what it gates of {dtypes[1]}")


def _refuse_others(product: Node, constants: Constants) -> None:
    factors = next(products_of(product, constants), None)
    if factors is None or any(item.divides for item in factors.items) or not all(_is_whole(item, product) for item in factors.items):
        return
    for item in factors.items:
        if (name := _OTHERS.get(item.core.node.target)) is not None:
            raise NotFusible(f"{name} is none of silu, gelu, gelu_tanh, relu and sigmoid")


def _is_whole(item: Multiplicand, product: Node) -> bool:
    return tensor_of(item.node).shape == tensor_of(product).shape
