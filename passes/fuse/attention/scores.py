"""From what a softmax takes up to the product of queries and keys: scales, masks and casts on the way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from autopar.graph.constants import Constants
from autopar.graph.emit import tensor_of
from autopar.ir.arguments import float_at, node_at
from autopar.ir.fusion import NotFusible
from autopar.ops.traits import CASTS, PRODUCTS, QUOTIENTS, is_cast
from autopar.passes.fuse.attention.contractions import Contraction, contraction, is_contraction
from autopar.passes.fuse.attention.layout import Labels, Layout, above, broadcast_to
from autopar.passes.fuse.attention.softmax import softmax_at

aten = torch.ops.aten

_SUMS = (aten.add.Tensor, aten.add_.Tensor, aten.add.Scalar, aten.add_.Scalar)
_DIFFERENCES = (aten.sub.Tensor, aten.sub_.Tensor, aten.sub.Scalar)
_CAPS = (aten.tanh.default, aten.tanh_.default)
_FILLS = (aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.masked_fill_.Scalar, aten.masked_fill_.Tensor)
_CHOICES = (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf)
DROPOUTS = (aten.dropout.default, aten.dropout_.default)
# What an operand goes through on its way to a product, when only "is this attention at all?" is asked.
_MOST_STEPS = 24


class NotScores(NotFusible):
    """No product of queries and keys lies above: this is no attention, and nothing is said of it."""


@dataclass(frozen=True)
class Added:
    """`factor` · `value` is added to the scores."""

    value: Node
    layout: Layout
    factor: float


@dataclass(frozen=True)
class Filled:
    """Scores become `value` where `condition` is not `attends`."""

    condition: Node
    layout: Layout
    value: float
    attends: bool


@dataclass(frozen=True)
class Factor:
    """The product of queries and keys is multiplied (divided) by a tensor, which does not vary by key."""

    value: Node
    layout: Layout
    divides: bool


@dataclass
class Scores:
    """`product`, scaled, then capped, then masked. Masks stand outermost first.

    `soft_cap` · tanh(scaled product / `soft_cap`) are the scores, where it is not 0. With `is_shifted` a number is added to all of them,
    which no softmax shows. `interior` are the nodes on the way, the product's among them.
    """

    product: Contraction
    scale: float
    keys: frozenset[int]
    soft_cap: float = 0.0
    is_shifted: bool = False
    factors: list[Factor] = field(default_factory=list)
    masks: list[Added | Filled] = field(default_factory=list)
    interior: set[Node] = field(default_factory=set)
    dtypes: set[torch.dtype] = field(default_factory=set)


def scores_above(node: Node, layout: Layout, labels: Labels, keys: tuple[int, ...], constants: Constants) -> Scores:
    """The scores that `node` with `layout` holds; `keys` are the labels that the softmax runs over.

    Raises `NotFusible`, or `NotScores` where no product of two tensors lies above.
    """
    return _Walk(labels, keys, constants).up(node, layout, 1.0)


def reaches_product(node: Node) -> bool:
    """Whether a product of two computed tensors lies a few steps above, with nothing like a layer between."""
    pending, seen = [node], set[Node]()
    while pending and len(seen) < _MOST_STEPS:
        current = pending.pop(0)
        if current in seen or current.op != "call_function":
            continue
        seen.add(current)
        if is_contraction(current):
            return _is_computed(current)
        if current.target not in (aten.linear.default, aten.embedding.default, aten.layer_norm.default):
            pending += list(current.all_input_nodes)
    return False


def _is_computed(product: Node) -> bool:
    """Whether both operands of a product are computed: neither is a parameter, but for its layout."""
    for operand in product.all_input_nodes[-2:]:
        while operand.op == "call_function" and (operand.target in (aten.t.default, aten.transpose.int) or operand.target in CASTS):
            operand = operand.all_input_nodes[0]
        if operand.op != "call_function" and operand.name.startswith("p_"):
            return False
    return True


class _Walk:
    def __init__(self, labels: Labels, keys: tuple[int, ...], constants: Constants) -> None:
        self._labels, self._keys, self._constants = labels, keys, constants

    def up(self, node: Node, layout: Layout, factor: float) -> Scores:
        """`factor` multiplies what `node` holds before it reaches the softmax."""
        if is_contraction(node):
            return self._product(node, layout, factor)
        for found in (above(node, layout, self._labels), self._unchanged(node, layout)):
            if found is not None:
                return self._with(node, self.up(*found, factor))
        if node.target in _CAPS:
            return self._with(node, self._capped(node, layout, factor))
        for read in (self._scaled, self._summed, self._filled):
            for inner, change, times in read(node, layout, factor):
                return self._with(node, self._first(inner, change, layout, times))
        raise self._unreadable(node)

    def _with(self, node: Node, scores: Scores) -> Scores:
        scores.interior.add(node)
        scores.dtypes.add(tensor_of(node).dtype)
        return scores

    def _product(self, node: Node, layout: Layout, factor: float) -> Scores:
        if not tensor_of(node).is_floating_point():
            raise NotFusible(f"the scores are of {tensor_of(node).dtype}")
        found = contraction(node, layout, self._labels)
        scores = Scores(found, factor * found.scale, frozenset(self._labels.resolved(self._keys)))
        if found.added is not None:
            scores.masks.append(Added(found.added, broadcast_to(layout, tensor_of(found.added).shape), factor * found.factor))
        return self._with(node, scores)

    def _capped(self, node: Node, layout: Layout, factor: float) -> Scores:
        """`factor` · tanh(what is above), whose own scale is in units of the cap."""
        scores = self.up(node_at(node, 0), layout, 1.0)
        if scores.soft_cap:
            raise NotFusible("the scores are capped by tanh twice")
        if scores.masks or scores.is_shifted:
            raise NotFusible("something is added to the scores, or they are masked, before they are capped by tanh")
        if factor == 0.0:
            raise NotFusible("the capped scores are multiplied by zero")
        scores.soft_cap, scores.scale = abs(factor), scores.scale * factor
        return scores

    def _unchanged(self, node: Node, layout: Layout) -> tuple[Node, Layout] | None:
        """Through casts, and dropout that drops nothing."""
        if node.target in DROPOUTS:
            if float_at(node, 1) > 0.0 and node.args[2]:
                raise NotFusible("there is dropout on the scores")
            return node_at(node, 0), layout
        if is_cast(node):
            if not tensor_of(node.args[0]).is_floating_point():
                raise NotFusible(f"the scores are of {tensor_of(node.args[0]).dtype}")
            return node_at(node, 0), layout
        return None

    def _first(self, candidates: list[Node], change: Any, layout: Layout, factor: float) -> Scores:
        """The operand that holds the scores, and what the other does to them. A better reason wins over none."""
        reasons: list[NotFusible] = []
        for position, candidate in enumerate(candidates):
            try:
                inner = broadcast_to(layout, tensor_of(candidate).shape)
                scores = self.up(candidate, inner, factor)
                change(scores, candidates[1 - position] if len(candidates) > 1 else None)
                return scores
            except NotFusible as reason:
                reasons.append(reason)
        raise next((reason for reason in reasons if not isinstance(reason, NotScores)), reasons[0])

    def _scaled(self, node: Node, layout: Layout, factor: float) -> Iterator[tuple[list[Node], Any, float]]:
        """Products with and quotients by numbers, or by tensors that do not vary by key."""
        if node.target is aten.neg.default:
            yield [node_at(node, 0)], _nothing, -factor
        if node.target not in (*PRODUCTS, *QUOTIENTS):
            return
        divides = node.target in QUOTIENTS
        left, right = node.args[:2]
        for scores, other in ((left, right),) if divides else ((left, right), (right, left)):
            number = self._constants.number(other)
            if number is not None and isinstance(scores, Node):
                yield [scores], _nothing, factor / number if divides else factor * number
        candidates = [item for item in (left, right) if isinstance(item, Node)]

        def scale(scores: Scores, other: Node | None) -> None:
            assert other is not None
            if divides and other is left:
                raise NotFusible("the scores are a divisor")
            self._add_factor(scores, other, layout, divides)

        if len(candidates) == 2:
            yield candidates, scale, factor

    def _add_factor(self, scores: Scores, other: Node, layout: Layout, divides: bool) -> None:
        found = broadcast_to(layout, tensor_of(other).shape)
        if scores.masks or scores.soft_cap:
            raise NotFusible(f"the scores are scaled by a tensor after a {'mask' if scores.masks else 'soft cap'}")
        if not scores.keys.isdisjoint(self._labels.resolved(label for labels in found for label in labels)):
            raise NotFusible("the scale varies by key")
        scores.factors.append(Factor(other, found, divides))

    def _summed(self, node: Node, layout: Layout, factor: float) -> Iterator[tuple[list[Node], Any, float]]:
        if node.target not in (*_SUMS, *_DIFFERENCES):
            return
        left, right = node.args[:2]
        alpha = float(node.kwargs.get("alpha", 1))  # type: ignore[arg-type]
        alpha = -alpha if node.target in _DIFFERENCES else alpha

        def add(scores: Scores, other: Node | None) -> None:
            if other is None:
                scores.is_shifted = True
            else:
                weight = factor * (alpha if other is right else 1.0)
                scores.masks.insert(0, Added(other, broadcast_to(layout, tensor_of(other).shape), weight))

        candidates = [item for item in (left, right) if isinstance(item, Node)]
        if len(candidates) == 1:  # a number added to every score changes no softmax
            yield candidates, add, factor if candidates[0] is left else factor * alpha
        elif alpha == 1.0:
            yield candidates, add, factor
        else:  # only the left operand can be the scores

            def subtract(scores: Scores, _: Node | None) -> None:
                add(scores, right)  # type: ignore[arg-type]

            yield [left], subtract, factor  # type: ignore[list-item]

    def _filled(self, node: Node, layout: Layout, factor: float) -> Iterator[tuple[list[Node], Any, float]]:
        if node.target in _FILLS:
            scores, condition, value, attends = node.args[0], node.args[1], node.args[2], False
        elif node.target in _CHOICES:
            condition, scores, value, attends = *node.args[:3], True
            if self._constants.number(scores) is not None:
                scores, value, attends = value, scores, False
        else:
            return
        number = self._constants.number(value)
        if number is None or not isinstance(scores, Node):
            raise NotFusible("a mask puts values that are not one number in place of scores") if reaches_product(node) else NotScores("")
        filled = Filled(condition, broadcast_to(layout, tensor_of(condition).shape), number * factor, attends)  # type: ignore[arg-type]

        def fill(found: Scores, _: Node | None) -> None:
            found.masks.insert(0, filled)

        yield [scores], fill, factor

    def _unreadable(self, node: Node) -> NotFusible:
        if not reaches_product(node):
            return NotScores("no product above")
        if softmax_at(node) is not None:
            return NotFusible("there is a second softmax on the scores")
        name = str(node.target).split(".")[1] if "." in str(node.target) else str(node.target)
        return NotFusible(f"the scores go through {name}")


def _nothing(_scores: Scores, _other: Node | None) -> None:
    """What a number does to the scores is in their scale already."""
