"""From what a softmax takes up to the product of queries and keys: scales, masks and casts on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from autopar.graph.constants import Constants
from autopar.graph.emit import tensor_of
from autopar.ir.arguments import float_at, node_at
from autopar.ir.fusion import NotFusible
from autopar.ops.traits import CASTS, CHOICES, FILLS, NEGATIONS, PRODUCTS, QUOTIENTS, is_cast
from autopar.passes.fuse.attention.conditions import Filled
from autopar.passes.fuse.attention.contractions import Contraction, contraction, is_contraction
from autopar.passes.fuse.attention.layout import Labels, Layout, Placed, Scaled, above, broadcast_to, flat
from autopar.passes.fuse.attention.softmax import softmax_at
from autopar.passes.fuse.reading import addends, name_of, scaled

aten = torch.ops.aten

_CAPS = (aten.tanh.default, aten.tanh_.default)
DROPOUTS = (aten.dropout.default, aten.dropout_.default)
# What an operand goes through on its way to a product, when only "is this attention at all?" is asked.
_MOST_STEPS = 24


class NotScores(NotFusible):
    """No product of queries and keys lies above: this is no attention, and nothing is said of it."""


@dataclass(frozen=True)
class TensorScale(Placed):
    """The product of queries and keys is multiplied (divided) by a tensor, which does not vary by key."""

    divides: bool


@dataclass
class Scores:
    """`product`, scaled, then capped, then masked. Masks stand outermost first: `Scaled` are added, `Filled` put a number in place.

    `soft_cap` · tanh(scaled product / `soft_cap`) are the scores, where it is not 0. With `is_shifted` a number is added to all of them,
    which no softmax shows.
    """

    product: Contraction
    scale: float
    keys: frozenset[int]
    soft_cap: float = 0.0
    is_shifted: bool = False
    tensor_scales: list[TensorScale] = field(default_factory=list)
    masks: list[Scaled | Filled] = field(default_factory=list)


# A way to read a node: the operand that may hold the scores, what it is multiplied by on its way, and what else happens to the scores.
Reading = tuple[Any, float, Callable[[Scores], None]]


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
        self._refused: dict[tuple[Node, Layout, bool], NotFusible] = {}

    def up(self, node: Node, layout: Layout, factor: float) -> Scores:
        """`factor` multiplies what `node` holds before it reaches the softmax."""
        # Of x + f(x) the walk comes to x by both operands, to what is above it by four ways, and so on. What was no scores is none again:
        # of the factor it only matters whether it is zero.
        place = node, self._labels.layout(layout), factor == 0.0
        if place not in self._refused:
            try:
                return self._read(node, layout, factor)
            except NotFusible as reason:
                self._refused[place] = reason
        raise self._refused[place]

    def _read(self, node: Node, layout: Layout, factor: float) -> Scores:
        if is_contraction(node):
            return self._product(node, layout, factor)
        inner = above(node, layout, self._labels) or self._unchanged(node, layout)
        if inner is not None:
            return self.up(*inner, factor)
        if node.target in _CAPS:
            return self._capped(node, layout, factor)
        # The operand that holds the scores: a better reason wins over none.
        reasons: list[NotFusible] = []
        for operand, times, note in (
            *self._scaled(node, layout, factor), *self._summed(node, layout, factor), *self._filled(node, layout, factor)
        ):  # fmt: skip
            try:
                scores = self.up(operand, broadcast_to(layout, tensor_of(operand).shape), times)
                note(scores)
                return scores
            except NotFusible as reason:
                reasons.append(reason)
        reasons = reasons or [self._unreadable(node)]
        raise next((reason for reason in reasons if not isinstance(reason, NotScores)), reasons[0])

    def _product(self, node: Node, layout: Layout, factor: float) -> Scores:
        if not tensor_of(node).is_floating_point():
            raise NotFusible(f"the scores are of {tensor_of(node).dtype}")
        found = contraction(node, layout, self._labels)
        scores = Scores(found, factor * found.scale, frozenset(self._labels.resolved(self._keys)))
        if found.added is not None:
            scores.masks.append(self._added(found.added, layout, factor * found.factor))
        return scores

    def _added(self, value: Node, layout: Layout, factor: float) -> Scaled:
        return Scaled(value, broadcast_to(layout, tensor_of(value).shape), factor)

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

    def _scaled(self, node: Node, layout: Layout, factor: float) -> list[Reading]:
        """Products with and quotients by numbers, or by tensors that do not vary by key."""
        if node.target not in (*NEGATIONS, *PRODUCTS, *QUOTIENTS):
            return []
        for operand, times in scaled(node, self._constants.number):
            return [(operand, factor * times, _nothing)]
        left, right = node.args[:2]
        if not isinstance(left, Node) or not isinstance(right, Node):
            return []
        divides = node.target in QUOTIENTS

        def scaled_by(other: Node) -> Callable[[Scores], None]:
            def scale(scores: Scores) -> None:
                found = broadcast_to(layout, tensor_of(other).shape)
                if divides and other is left:
                    raise NotFusible("the scores are a divisor")
                if scores.masks or scores.soft_cap:
                    raise NotFusible(f"the scores are scaled by a tensor after a {'mask' if scores.masks else 'soft cap'}")
                if not scores.keys.isdisjoint(self._labels.resolved(flat(found))):
                    raise NotFusible("the scale varies by key")
                scores.tensor_scales.append(TensorScale(other, found, divides))

            return scale

        return [(left, factor, scaled_by(right)), (right, factor, scaled_by(left))]

    def _summed(self, node: Node, layout: Layout, factor: float) -> list[Reading]:
        if (found := addends(node)) is None:
            return []
        left, right, alpha = found
        # A number added to every score changes no softmax.
        if not isinstance(right, Node):
            return [(left, factor, _shift)]
        if not isinstance(left, Node):
            return [(right, factor * alpha, _shift)]

        def plus(other: Node, weight: float) -> Callable[[Scores], None]:
            return lambda scores: scores.masks.insert(0, self._added(other, layout, weight))

        readings: list[Reading] = [(left, factor, plus(right, factor * alpha))]
        return readings if alpha != 1.0 else [*readings, (right, factor, plus(left, factor))]

    def _filled(self, node: Node, layout: Layout, factor: float) -> list[Reading]:
        if node.target in FILLS:
            scores, condition, value, attends = *node.args[:3], False
        elif node.target in CHOICES:
            condition, scores, value, attends = *node.args[:3], True
            if self._constants.number(scores) is not None:
                scores, value, attends = value, scores, False
        else:
            return []
        number = self._constants.number(value)
        if number is None or not isinstance(scores, Node):
            raise NotFusible("a mask puts values that are not one number in place of scores") if reaches_product(node) else NotScores("")
        assert isinstance(condition, Node)
        filled = Filled(condition, broadcast_to(layout, tensor_of(condition).shape), attends, number * factor)
        return [(scores, factor, lambda found: found.masks.insert(0, filled))]

    def _unreadable(self, node: Node) -> NotFusible:
        if not reaches_product(node):
            return NotScores("no product above")
        if softmax_at(node) is not None:
            return NotFusible("there is a second softmax on the scores")
        return NotFusible(f"the scores go through {name_of(node)}")


def _nothing(_: Scores) -> None:
    """What a number does to the scores is in their scale already."""


def _shift(scores: Scores) -> None:
    scores.is_shifted = True
