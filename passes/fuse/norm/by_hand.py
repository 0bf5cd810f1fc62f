"""One norm in plain ops: a value divided by the root of the mean of its squares."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from autopar.graph.constants import Constants
from autopar.graph.emit import tensor_of
from autopar.ir.arguments import node_at
from autopar.ir.fusion import NotFusible
from autopar.ops import traits
from autopar.ops.traits import EXPANSIONS, is_cast
from autopar.passes.fuse.norm.moments import (
    DEVIATIONS,
    FLOORS,
    LENGTHS,
    MEANS,
    PAIRS,
    POWERS,
    PRODUCTS,
    QUOTIENTS,
    SUMS,
    TOTALS,
    VARIANCES,
    Reading,
    casts_above,
    root_of,
    stripped,
)
from autopar.passes.fuse.reading import is_tensor, number_of, operand_pairs

aten = torch.ops.aten

_IN_PLACE = (aten.mul_.Tensor, aten.div_.Tensor)
_ROOTS = (aten.rsqrt.default, aten.sqrt.default)
# What a scale goes through between the mean of squares and the value, when only "is this a norm at all?" is asked.
_ON_THE_WAY = frozenset(
    {
        *_ROOTS, *FLOORS, *SUMS, *PRODUCTS, *QUOTIENTS, *EXPANSIONS, aten.reciprocal.default, aten.unsqueeze.default, aten.sub.Tensor,
        aten.detach.default,
    }
)  # fmt: skip
# Of these both operands may be computed: a difference of means, an eps that is a parameter, the shape to expand to.
_OF_TWO = frozenset({*SUMS, *FLOORS, aten.sub.Tensor, aten.expand_as.default})
_MOST_STEPS = 16


@dataclass(frozen=True)
class Normalised:
    """`node` = x / sqrt(mean(x²) + eps), or of x − mean(x); times `weight` [N] where it stood inside. `interior` are nodes above."""

    node: Node
    x: Node
    centred: bool
    eps: float
    interior: frozenset[Node]
    weight: Node | None = None


def normalised_at(node: Node, constants: Constants) -> Normalised | None:
    """The norm whose value `node` is, before any weight; None where there is nothing like one. Raises `NotFusible`."""
    for value, scale, divides in _pairs(node):
        if not _is_candidate(value, scale, constants):
            continue
        if node.target in _IN_PLACE:
            raise NotFusible(f"the value is scaled in place, by {str(node.target).removeprefix('aten.').split('.')[0]}")
        return _read(node, value, scale, divides, constants)
    return None


def _pairs(node: Node) -> Iterator[tuple[Node, Node, bool]]:
    """(value, scale, whether it divides)."""
    if node.target in (*PRODUCTS, *QUOTIENTS, *_IN_PLACE) and all(map(is_tensor, node.args[:2])):
        for value, scale in operand_pairs(node)[: 1 if node.target in _IN_PLACE else 2]:
            yield value, scale, node.target in traits.QUOTIENTS


def _is_candidate(value: Node, scale: Node, constants: Constants) -> bool:
    """Whether `scale` is made of a root of a mean of squares, or of the length of `value`."""
    pending = [(scale, False)]
    for _ in range(_MOST_STEPS):
        if not pending:
            break
        node, below_root = pending.pop()
        if node.op != "call_function":
            continue
        if (measured := _measured(node)) is not None:
            below_root = below_root or node.target in (*DEVIATIONS, *LENGTHS)
            # A sum of squares of another value is no length.
            if below_root and (node.target not in (*LENGTHS, *TOTALS) or stripped(measured) is stripped(value)):
                return True
            continue
        below_root = below_root or node.target in _ROOTS or (node.target in POWERS and node.args[1] in (0.5, -0.5))
        if is_cast(node) or node.target in POWERS or node.target in _ON_THE_WAY:
            computed = [each for each in node.args[:2] if isinstance(each, Node) and number_of(each, constants) is None]
            pending += [(each, below_root) for each in computed] if len(computed) < 2 or node.target in _OF_TWO else []
    return False


def _measured(node: Node) -> Node | None:
    """What a mean or sum of squares, a variance or a length is of."""
    if node.target in LENGTHS:
        return node.args[0] if node.args[1:2] in ((), (None,), (2,)) else None  # type: ignore[return-value]
    if node.target in (*VARIANCES, *DEVIATIONS):
        return node_at(node, 0)
    if node.target is operator.getitem:
        pair = node.args[0]
        assert isinstance(pair, Node)
        return node_at(pair, 0) if pair.target in PAIRS and node.args[1] == 0 else None
    return root_of(stripped(node_at(node, 0))) if node.target in (*MEANS, *TOTALS) else None


def _read(node: Node, value: Node, scale: Node, divides: bool, constants: Constants) -> Normalised:
    _check_value(value)
    reading = Reading(constants)
    squares, eps = reading.scale(scale, divides)
    averaged, is_variance = reading.mean(squares)
    measured = averaged if is_variance else reading.squared(averaged)
    found = _same(value, measured, is_variance, reading)
    weight = None
    for inner, item in _weighted(value) if found is None else ():
        if found is None and (found := _same(inner, measured, is_variance, reading)) is not None:
            weight = item
            reading.interior |= {stripped(value)} | casts_above(inner)
    if found is None:
        raise NotFusible("the mean of squares is of another value than is scaled")
    x, centred = found
    reading.interior |= casts_above(value) | casts_above(measured)
    if tensor_of(x).shape[-1] < 2:
        raise NotFusible("its rows have one element")
    if tensor_of(node).shape != tensor_of(x).shape:
        raise NotFusible("the mean does not keep its dim with size 1, so that it meets other rows")
    return Normalised(node, x, centred, eps, frozenset(reading.interior), weight)


def _same(value: Node, measured: Node, is_variance: bool, reading: Reading) -> tuple[Node, bool] | None:
    """x, and whether it is centred, where `value` is what `measured` is, or that minus its mean."""
    x = reading.centred(value)
    if is_variance:
        if x is not None and (stripped(measured) is x or stripped(measured) is stripped(value)):
            return x, True
        if stripped(measured) is stripped(value):
            raise NotFusible("the variance scales a value from which the mean is not subtracted")
        return None
    if stripped(value) is stripped(measured):
        return (x, True) if x is not None else (stripped(value), False)
    return (x, True) if x is not None and reading.centred(measured) is x else None


def _weighted(value: Node) -> Iterator[tuple[Node, Node]]:
    """(value, weight) of a value that was multiplied by its weight before it was scaled."""
    value = stripped(value)
    if value.target in PRODUCTS and all(map(is_tensor, value.args[:2])):
        yield from ((inner, weight) for inner, weight in operand_pairs(value) if is_affine(weight, inner))


def is_affine(item: Node, x: Node) -> bool:
    """Whether `item` has one number a column of x."""
    value, like = tensor_of(item), tensor_of(x)
    columns = like.shape[-1] if like.dim() else 1
    fits = 0 < value.dim() <= like.dim() and value.shape[-1] == columns == value.numel()
    return fits and value.is_floating_point()


def _check_value(node: Node) -> None:
    value = tensor_of(node)
    if not value.is_floating_point():
        raise NotFusible(f"the value is of {value.dtype}")
    if value.dim() == 0:
        raise NotFusible("the value is a single number")
