"""One dropout that `KeyRandom` has keyed: x · mask · scale, with the sum that reads it, or alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from autopar.graph.emit import Emitter, tensor_of
from autopar.graph.overwrites import is_last_reader, memory_of, writes
from autopar.ir.fusion import NotFusible
from autopar.kernels.dropout import add_dropout, dropout
from autopar.kernels.normalisation import add_norm
from autopar.ops.rules.labels import argument
from autopar.ops.traits import COPIES, RESHAPES, SUMS, is_cast, widens
from autopar.passes.fuse.dropout.draw import Draw, read_mask
from autopar.passes.fuse.guards import check_operands
from autopar.passes.fuse.match import Match, first_match
from autopar.passes.fuse.reading import summands

aten = torch.ops.aten

# They keep the order of elements, so that the sum may as well be taken in the shape before.
_VIEWS = (*RESHAPES, *COPIES)


@dataclass(frozen=True)
class Dropped(Match):
    """x, dropped, plus `residual` where there is one.

    `x_dtype`: the dtype in which x is dropped, where in its own the sum would be of another dtype than it was.
    """

    x: Node
    residual: Node | None
    draw: Draw
    scale: float
    x_dtype: torch.dtype | None = None

    def conditions(self) -> tuple[str, ...]:
        between = [node for node in self.interior if node is not self.root]
        found = [f"p = {self.draw.probability:g}"]
        found += ["its sum is normalised by an op"] if self.residual is None else []
        found += ["through a view"] if any(node.target in _VIEWS for node in between) else []
        found += ["through a cast"] if any(is_cast(node) for node in between) else []
        return (*found, *(["in place"] if any(map(writes, (*between, self.root))) else []))

    def emit(self, emit: Emitter) -> Node:
        """What drew the mask is left for dead code to be eliminated."""
        root, draw = tensor_of(self.root), self.draw
        x = self.x if self.x_dtype is None else emit.cast(self.x, self.x_dtype)
        positions, options = (draw.rows, draw.second, draw.columns), {"keep_below": draw.keep_below, "scale": self.scale}
        if self.residual is None:
            return emit.call(dropout, x, *positions, **options, dtype=root.dtype)
        shape, residual = tensor_of(x).shape, self.residual
        residual = residual if shape == root.shape else emit.call(aten.reshape.default, residual, list(shape))
        out = emit.call(add_dropout, x, residual, *positions, **options)
        return out if shape == root.shape else emit.call(aten.reshape.default, out, list(root.shape))


def match_dropout(root: Node, writers: Sequence[Node]) -> Dropped | None:
    """The dropout that `root` adds to a residual, or whose value it is. Raises `NotFusible`. `writers` write in place."""
    return _match_sum(root, writers) if root.target in SUMS else _match_alone(root, writers)


def _match_sum(root: Node, writers: Sequence[Node]) -> Dropped | None:
    left, right = root.args[:2]
    if not isinstance(left, Node) or not isinstance(right, Node):
        return None
    return first_match(((right, left), (left, right)), lambda operands: _added(root, *operands, writers))


def _match_alone(root: Node, writers: Sequence[Node]) -> Dropped | None:
    """The dropout whose value an `add_norm` alone reads."""
    reader = next(iter(root.users), None)
    if reader is None or len(root.users) > 1 or reader.target is not add_norm or root not in reader.args[:2]:
        return None
    found = _product(root)
    if found is None:
        return None
    x, draw, scale, interior = found
    _check_writes(x, {x}, interior, root, writers)
    return Dropped(root, interior, x, None, draw, scale)


def _added(root: Node, operand: Node, residual: Node, writers: Sequence[Node]) -> Dropped | None:
    path, product = _path(operand)
    found = _product(product)
    if found is None:
        return None
    x, draw, scale, inside = found
    if not summands(root):
        raise NotFusible(f"the sum has a factor, alpha={argument(root, 2, 'alpha')}")
    shapes = [list(tensor_of(each).shape) for each in (residual, operand)]
    if shapes[0] != shapes[1]:
        raise NotFusible(f"one is broadcast: the residual is {shapes[0]}, what is dropped {shapes[1]}")
    for node, reader in zip((product, *reversed(path)), (*reversed(path), root), strict=True):
        if set(node.users) != {reader} or residual is node:
            raise NotFusible("the dropped value is read elsewhere, too")
    interior = frozenset({*inside, *path, product})
    _check_writes(x, {x, residual}, interior, root, writers)
    return Dropped(root, interior, x, residual, draw, scale, _x_dtype(root, x, operand, residual, path))


def _path(operand: Node) -> tuple[list[Node], Node]:
    """The views, casts and copies through which `operand` is read, nearest first, and what is read."""
    path: list[Node] = []
    while operand.target in _VIEWS or is_cast(operand) or operand.target is aten.copy_.default:
        path.append(operand)
        below = operand.args[operand.target is aten.copy_.default]
        assert isinstance(below, Node)
        operand = below
    return path, operand


def _product(product: Node) -> tuple[Node, Draw, float, frozenset[Node]] | None:
    """(x, its draw, scale, the nodes between) of x · mask · scale; None for another value. Raises `NotFusible`."""
    if product.target is not aten.mul.Tensor or not isinstance(product.args[1], float):
        return None
    masked, scale = product.args
    if not isinstance(masked, Node) or masked.target is not aten.mul.Tensor:
        return None
    x, mask = masked.args
    if not isinstance(x, Node) or not isinstance(mask, Node) or mask.target is not aten.lt.Scalar:
        return None
    assert isinstance(scale, float)
    draw = read_mask(mask, tensor_of(x).shape)
    if draw is None:
        return None
    if set(mask.users) != {masked}:
        raise NotFusible("its mask is read elsewhere, too")
    return x, draw, scale, frozenset({masked, mask})


def _x_dtype(root: Node, x: Node, operand: Node, residual: Node, path: Sequence[Node]) -> torch.dtype | None:
    dtypes = tensor_of(x).dtype, tensor_of(residual).dtype
    as_it_is = torch.promote_types(*dtypes) == tensor_of(root).dtype and all(widens(node) for node in path if is_cast(node))
    return None if as_it_is else tensor_of(operand).dtype


def _check_writes(x: Node, operands: set[Node], interior: frozenset[Node], root: Node, writers: Sequence[Node]) -> None:
    """Raises `NotFusible` where what is written in place would be missed, or an operand is written in front of `root`."""
    for node in interior:
        # Dropout in place: x is gone afterwards, for all who read it.
        if writes(node) and not (memory_of(x) is x and x.op == "call_function" and node.args[0] is x and set(x.users) <= interior):
            raise NotFusible("it is dropped in place, in a value that is read elsewhere, too")
    if writes(root) and not is_last_reader(root, root.all_input_nodes[0]):
        raise NotFusible("it is added in place, to a value that is read elsewhere, too")
    check_operands(operands, root, writers, "in front of the sum", {*interior, root})
