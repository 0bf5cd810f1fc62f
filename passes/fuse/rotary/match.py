"""One rotation, whole: x and its neighbour half or pair times cosines and sines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

import numpy as np
import torch
from torch.fx import Node

from autopar.graph.constants import Constants
from autopar.graph.emit import Emitter, tensor_of
from autopar.graph.overwrites import between
from autopar.ir.fusion import NotFusible
from autopar.kernels.rotary import rotary
from autopar.ops.traits import PRODUCTS
from autopar.passes.fuse.guards import check_interior, check_writes
from autopar.passes.fuse.match import Match
from autopar.passes.fuse.reading import is_tensor, narrowest, rounded, widened, widest
from autopar.passes.fuse.rotary.angles import Angles
from autopar.passes.fuse.rotary.elements import SHOWN, Elements, Term, Terms, is_understood

aten = torch.ops.aten

_ROOTS = (aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.cat.default)
_JOINING = (aten.flatten.using_ints, aten.view.default, aten.reshape.default)
_JOINED = (aten.stack.default, aten.view_as_real.default)
_MOST_NODES = 48


@dataclass(frozen=True)
class Rotation(Match):
    """`x` turned by `cos` and `sin`. `swapped`: x is [B, S, H, D], not [B, H, S, D]."""

    x: Node
    cos: Angles
    sin: Angles
    interleaved: bool
    swapped: bool
    dtype: torch.dtype

    def conditions(self) -> tuple[str, ...]:
        size, rotated = tensor_of(self.x).shape[-1], len(self.cos.indices)
        found = [f"{'pairs' if self.interleaved else 'halves'} of {rotated} elements" + (f" of {size}" if rotated < size else "")]
        found += ["by negative angles"] if self.sin.negative else []
        return (*found, "positions before heads" if self.swapped else "heads before positions")

    def emit(self, emit: Emitter) -> Node:
        shape = list(tensor_of(self.root).shape)
        x = self._laid_out(emit, emit.cast(self.x, self.dtype))
        cos, sin = (self._laid_out(emit, angles.write(emit)) for angles in (self.cos, self.sin))
        out = emit.call(rotary, x, cos, sin, interleaved=self.interleaved)
        out = emit.call(aten.transpose.int, out, 1, 2) if self.swapped else out
        return out if list(tensor_of(out).shape) == shape else emit.call(aten.reshape.default, out, shape)

    def _laid_out(self, emit: Emitter, node: Node) -> Node:
        """Four dims, heads before positions. Angles may have fewer where nothing is moved."""
        shape = list(tensor_of(node).shape)
        if len(shape) < 4:
            node = emit.call(aten.reshape.default, node, [1] * (4 - len(shape)) + shape)
        return emit.call(aten.transpose.int, node, 1, 2) if self.swapped else node


def match_rotary(root: Node, constants: Constants, writers: Sequence[Node], differentiable: Set[Node]) -> Rotation | None:
    """The rotation whose value is `root`; None where there is nothing like one. Raises `NotFusible`. `writers` write in place."""
    if not _may_be(root):
        return None
    region = _region(root)
    products = [node for node in region if node.target in PRODUCTS and all(isinstance(each, Node) for each in node.args[:2])]
    if len(products) < 2 and not any(tensor_of(node).is_complex() for node in products):
        return None
    for x in _candidates(root, region):
        elements = Elements(x, constants)
        found = elements.of(root)
        if found is not None and (read := _read(found)) is not None:
            return _rotation(root, elements, *read, writers, differentiable)
    if _looks_turned(root):
        raise NotFusible("what is turned and what is scaled by the cosines are two values")
    return None


def _may_be(root: Node) -> bool:
    if root.op != "call_function" or not is_tensor(root):
        return False
    value, above = tensor_of(root), root.args[0] if root.args else None
    joins = root.target in _JOINING and isinstance(above, Node) and (above.target in _JOINED or above.target in _ROOTS)
    return (root.target in _ROOTS or joins) and value.is_floating_point() and value.dim() > 1 and value.shape[-1] > 1


def _region(root: Node) -> list[Node]:
    """The nodes above `root` that we may look past, and those at which that ends, nearest first."""
    found, pending = set[Node](), [root]
    while pending and len(found) < _MOST_NODES:
        node = pending.pop(0)
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes if is_understood(node) or isinstance(node.meta.get("val"), (list, tuple)) else []
    return sorted(found, reverse=True)


def _candidates(root: Node, region: list[Node]) -> Iterator[Node]:
    """What may be x: any value of the shape of `root`, the nearest first, so that nothing of how x was made gets in."""
    shape = tensor_of(root).shape
    for node in region:
        if node is not root and is_tensor(node) and tensor_of(node).shape == shape and tensor_of(node).is_floating_point():
            yield node


def _read(found: np.ndarray) -> tuple[Angles, Angles, bool] | None:
    """Cosines, sines and whether pairs are turned; None where this is no rotation. Raises `NotFusible` where it is nearly one."""
    if found.ndim != 1:
        return None
    terms: list[Terms] = list(found)
    rotated = next((place for place, each in enumerate(terms) if each == (Term(1.0, place),)), len(terms))
    tail_passes = all(each == (Term(1.0, place),) for place, each in enumerate(terms[rotated:], rotated))
    turned = [_own_and_other(each, place) for place, each in enumerate(terms[:rotated])]
    if rotated < 2 or rotated % 2 or not tail_passes or any(each is None for each in turned):
        return None
    pairs = [each for each in turned if each is not None]
    interleaved = _is_interleaved([other.index for _, other in pairs])
    signs = [other.number for _, other in pairs]
    expected = [(-1.0, 1.0)[place % 2 if interleaved else place >= rotated // 2] for place in range(rotated)]
    negative = signs == [-each for each in expected]
    if any(own.number != 1.0 for own, _ in pairs) or not (negative or signs == expected):
        raise NotFusible("the signs of its terms make no rotation")
    cos = Angles.of([own.angles[0] for own, _ in pairs], "cosines")
    return cos, Angles.of([other.angles[0] for _, other in pairs], "sines", negative), interleaved


def _own_and_other(terms: Terms, place: int) -> tuple[Term, Term] | None:
    """Of two terms with one angle each that with x's element `place`, and the other."""
    if len(terms) != 2 or any(len(each.angles) != 1 for each in terms):
        return None
    first, second = terms
    if (first.index == place) == (second.index == place):
        return None
    return (first, second) if first.index == place else (second, first)


def _is_interleaved(others: list[int]) -> bool:
    half = len(others) // 2
    if others == [(place + half) % len(others) for place in range(len(others))]:
        return False
    if others == [place ^ 1 for place in range(len(others))]:
        return True
    raise NotFusible(f"element 0 is turned with element {others[0]}, which makes neither halves nor pairs of {len(others)} elements")


def _rotation(
    node: Node, elements: Elements, cos: Angles, sin: Angles, interleaved: bool, writers: Sequence[Node], differentiable: Set[Node]
) -> Rotation:
    root, x = rounded(node), narrowest(elements.x)
    interior = frozenset(between(elements.x, node) - {elements.x})
    num_dims = tensor_of(x).dim()
    if num_dims > 4:
        raise NotFusible(f"it has {num_dims} dims; the op takes batches, heads, positions and elements")
    if cos.node in differentiable or sin.node in differentiable:
        raise NotFusible("its cosines or sines need gradients")
    if cos.outer != sin.outer:
        raise NotFusible(f"cosines and sines are broadcast from unequal shapes, {list(cos.outer)} and {list(sin.outer)}")
    read = [each for each in interior - {root} if each.target not in SHOWN]
    check_interior(read, (*interior, root), "a part of it is used elsewhere, too")
    check_writes(interior | {root}, widened(x) | {cos.node, sin.node}, root, writers)
    return Rotation(root, interior - {root}, x, cos, sin, interleaved, _is_swapped(x, cos.outer), widest(x, root))


def _is_swapped(x: Node, outer: tuple[int, ...]) -> bool:
    """Whether the angles vary along the dim that would be of heads, and not along the next."""
    outer = (1, 1, *outer)[-2:]
    return tensor_of(x).dim() > 2 and outer[0] > 1 and outer[1] == 1 and tensor_of(x).shape[-2] > 1


def _looks_turned(root: Node) -> bool:
    """A sum of two products, one of which is of a value with a negative part, of the same shape."""
    pair = [each for each in root.args[:2] if isinstance(each, Node)]
    if root.target is aten.cat.default or len(pair) < 2 or any(each.target not in PRODUCTS for each in pair):
        return False
    factors = [factor for product in pair for factor in product.args[:2] if isinstance(factor, Node)]
    joined = [each for each in factors if each.target is aten.cat.default]
    signed = [each for each in joined if any(part.target is aten.neg.default for part in each.all_input_nodes)]
    return any(tensor_of(each).shape == tensor_of(root).shape for each in signed)
