"""One norm in plain ops: a value divided by the root of the mean of its squares."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from autopar.graph.constants import Constants
from autopar.graph.emit import tensor_of
from autopar.ir.fusion import NotFusible
from autopar.ops import traits
from autopar.passes.fuse.norm.moments import PRODUCTS, QUOTIENTS, Reading, may_scale, stripped
from autopar.passes.fuse.reading import is_tensor, operand_pairs

aten = torch.ops.aten

_IN_PLACE = (aten.mul_.Tensor, aten.div_.Tensor)


@dataclass(frozen=True)
class Normalised:
    """`node` = x / sqrt(mean(x²) + eps), or of x − mean(x); times `weight` [N], plus `bias` [N]."""

    node: Node
    x: Node
    centred: bool
    eps: float
    weight: Node | None = None
    bias: Node | None = None


def normalised_at(node: Node, constants: Constants) -> Normalised | None:
    """The norm whose value `node` is, before any weight; None where there is nothing like one. Raises `NotFusible`."""
    for value, scale, divides in _pairs(node):
        if not may_scale(value, scale, constants):
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
    if found is None:
        raise NotFusible("the mean of squares is of another value than is scaled")
    x, centred = found
    if tensor_of(x).shape[-1] < 2:
        raise NotFusible("its rows have one element")
    if tensor_of(node).shape != tensor_of(x).shape:
        raise NotFusible("the mean does not keep its dim with size 1, so that it meets other rows")
    return Normalised(node, x, centred, eps, weight)


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
