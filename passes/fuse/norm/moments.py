"""What norms by hand are made of: means and variances over the last dim, squares, differences from the mean, roots."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from autopar.graph.constants import Constants
from autopar.graph.emit import tensor_of
from autopar.ir.arguments import float_named, node_at
from autopar.ir.fusion import NotFusible
from autopar.ops import traits
from autopar.ops.rules.labels import argument
from autopar.ops.traits import EXPANSIONS, is_cast, out_of_place, widens
from autopar.passes.fuse.reading import addends, name_of, number_of, operand_pairs, scaled, summands

aten = torch.ops.aten

# Only the operands of a norm are asked whether someone writes into them: an op in place on the way ends what is read.
PRODUCTS, QUOTIENTS = out_of_place(traits.PRODUCTS), out_of_place(traits.QUOTIENTS)
SUMS, _DIFFERENCES = out_of_place(traits.SUMS), out_of_place(traits.DIFFERENCES)
FLOORS = (aten.clamp.default, aten.clamp_min.default, aten.maximum.default, aten.clamp.Tensor, aten.clamp_min.Tensor)
MEANS = (aten.mean.dim, aten.mean.default)
TOTALS = (aten.sum.dim_IntList, aten.sum.default)
VARIANCES = (aten.var.correction, aten.var.dim, aten.var.default)
PAIRS = (aten.var_mean.correction, aten.var_mean.dim, aten.var_mean.default)
DEVIATIONS = (aten.std.correction, aten.std.dim, aten.std.default)
LENGTHS = (aten.linalg_vector_norm.default, aten.linalg_norm.default, aten.norm.ScalarOpt_dim)
POWERS = (aten.pow.Tensor_Scalar,)
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
# Numbers that are this near mean the same: 1 / N is written with some rounding.
_TOLERANCE = 1e-12


def stripped(node: Node) -> Node:
    """What `node` is a copy of in another float dtype, of float32 or wider than it was."""
    while is_cast(node) and (widens(node) or tensor_of(node).dtype in (torch.float32, torch.float64)):
        operand = node_at(node, 0)
        if not tensor_of(operand).is_floating_point():
            break
        node = operand
    return node


def root_of(node: Node) -> Node | None:
    """y where `node` is y²."""
    if node.target is aten.square.default or (node.target in POWERS and node.args[1] == 2):
        return node_at(node, 0)
    if node.target in PRODUCTS and all(isinstance(each, Node) for each in node.args[:2]):
        left, right = node_at(node, 0), node_at(node, 1)
        return left if stripped(left) is stripped(right) else None
    return None


def may_scale(value: Node, scale: Node, constants: Constants) -> bool:
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
        return node_at(node, 0) if node.args[1:2] in ((), (None,), (2,)) else None
    if node.target in (*VARIANCES, *DEVIATIONS):
        return node_at(node, 0)
    if node.target is operator.getitem:
        pair = node.args[0]
        assert isinstance(pair, Node)
        return node_at(pair, 0) if pair.target in PAIRS and node.args[1] == 0 else None
    return root_of(stripped(node_at(node, 0))) if node.target in (*MEANS, *TOTALS) else None


@dataclass
class Reading:
    """Reads upwards from a factor. `opened`: whether a last dim of size 1 was put in on the way."""

    constants: Constants
    opened: bool = False

    def through(self, node: Any) -> Node:
        """The value above casts, and above a dim of size 1 that is put in behind the others, or made longer."""
        assert isinstance(node, Node)
        while True:
            node = stripped(node)
            if node.target is aten.unsqueeze.default and node.args[1] in (-1, tensor_of(node).dim() - 1) and not self.opened:
                self.opened = True
            elif node.target not in EXPANSIONS or not _is_row_by_row(node):
                return node
            node = node.args[0]

    def scale(self, node: Any, divides: bool) -> tuple[Node, float]:
        """The mean of squares and eps, where `node` is 1 / sqrt(mean + eps), or sqrt(mean + eps) and `divides`."""
        node = self.through(node)
        exponent = node.args[1] if node.target in POWERS else None
        if node.target is aten.rsqrt.default or exponent == -0.5:
            inverse = True
        elif node.target is aten.sqrt.default or exponent == 0.5:
            inverse = False
        elif (flipped := self._reciprocal(node)) is not None:
            return self.scale(flipped, not divides)
        elif (same := self._times_one(node)) is not None:
            return self.scale(same, divides)
        else:
            raise NotFusible(_why_no_root(node))
        if inverse == divides:
            raise NotFusible("the value is multiplied by the root, not divided")
        return self.increased(node.args[0])

    def _reciprocal(self, node: Node) -> Any:
        if node.target is aten.reciprocal.default:
            return node.args[0]
        is_quotient = node.target in QUOTIENTS and isinstance(node.args[1], Node)
        return node.args[1] if is_quotient and self._number(node.args[0]) == 1.0 else None

    def _times_one(self, node: Node) -> Any:
        known = scaled(node, self._number) if node.target in (*PRODUCTS, *QUOTIENTS) else ()
        return next((value for value, factor in known if factor == 1.0), None)

    def _number(self, value: Any) -> float | None:
        return number_of(value, self.constants)

    def increased(self, node: Any) -> tuple[Node, float]:
        """The value and eps of value + eps."""
        node = self.through(node)
        if node.target in FLOORS:
            raise NotFusible("the mean of squares has a floor instead of an eps that is added")
        if node.target not in SUMS:
            return node, 0.0
        for value, eps in summands(node):
            number = self._number(eps)
            if number is not None and isinstance(value, Node):
                if not number >= 0.0:
                    raise NotFusible(f"eps is {number}")
                return self.through(value), number
        raise NotFusible("what is added to the mean of squares is not known before the program runs")

    def mean(self, node: Any) -> tuple[Node, bool]:
        """What `node` is the mean of over the last dim, or the variance. The other dims stay; the last is kept, with size 1."""
        node = self.through(node)
        if node.target in MEANS:
            return self._over_last(node), False
        if node.target in (*QUOTIENTS, *PRODUCTS):
            return self._averaged(node), False
        if node.target is operator.getitem and node.args[0].target in PAIRS and node.args[1] == 0:
            node = node.args[0]
        if node.target in (*VARIANCES, *PAIRS):
            value = self._over_last(node, keep=3 if str(node.target).endswith(".dim") else None)
            if _correction(node) != 0:
                raise NotFusible(f"the variance is unbiased: a sum divided by N - {_correction(node):g}")
            return value, True
        if node.target in TOTALS:
            raise NotFusible("the root is of a sum of squares, not of their mean")
        if node.target in _DIFFERENCES:
            raise NotFusible("the variance is a difference of two means, which rounds otherwise")
        raise NotFusible(f"the mean of squares goes through {name_of(node)}")

    def _averaged(self, node: Node) -> Node:
        """Of a sum over the last dim, times 1 / N."""
        for total, factor in operand_pairs(node):
            number = self._number(factor)
            total = self.through(total) if isinstance(total, Node) else None
            if number and total is not None and total.target in TOTALS:
                value = self._over_last(total)
                share = number if node.target in PRODUCTS else 1.0 / number
                if not math.isclose(share * tensor_of(value).shape[-1], 1.0, rel_tol=_TOLERANCE):
                    raise NotFusible(
                        f"the sum of squares is divided by {1.0 / share:g}, and a row has {tensor_of(value).shape[-1]} elements"
                    )
                return value
        raise NotFusible("the mean of squares is scaled")

    def _over_last(self, node: Node, keep: int | None = 2) -> Node:
        """The operand of a reduction, which must run over its last dim alone and keep it."""
        value, dims = node_at(node, 0), argument(node, 1, "dim")
        num_dims = tensor_of(value).dim()
        dims = list(range(num_dims)) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
        if [dim % num_dims for dim in dims] != [num_dims - 1]:
            raise NotFusible(f"the mean runs over dims {list(dims)} of {num_dims}, not over the last alone")
        kept = bool(node.kwargs.get("keepdim", keep is not None and len(node.args) > keep and node.args[keep]))
        if num_dims > 1 and kept == self.opened:
            raise NotFusible("the mean does not keep its dim with size 1, so that it meets other rows")
        return value

    def squared(self, node: Any) -> Node:
        """y of y²."""
        node = self.through(node)
        if (value := root_of(node)) is None:
            raise NotFusible(f"the mean is of {name_of(node)}, not of squares")
        return value

    def centred(self, node: Node) -> Node | None:
        """x where `node` is x minus its mean over the last dim."""
        node = stripped(node)
        x, mean, factor = addends(node) or (None, None, None)
        if node.target not in _DIFFERENCES or factor != -1.0 or not isinstance(x, Node) or not isinstance(mean, Node):
            return None
        x, inner = stripped(x), Reading(self.constants)
        mean = inner.through(mean)
        try:
            found = inner.paired(mean) or inner.mean(mean)
        except NotFusible:
            return None
        if found[1] or stripped(found[0]) is not x:
            return None
        return x

    def paired(self, node: Node) -> tuple[Node, bool] | None:
        """What `node`, result 1 of a `var_mean`, is the mean of."""
        pair = node.args[0] if node.target is operator.getitem else None
        if not isinstance(pair, Node) or pair.target not in PAIRS or node.args[1] != 1:
            return None
        return self._over_last(pair, keep=3 if str(pair.target).endswith(".dim") else None), False


def _is_row_by_row(expansion: Node) -> bool:
    """Whether only the last dim is made longer."""
    return tensor_of(expansion.args[0]).shape == (*tensor_of(expansion).shape[:-1], 1)


def _correction(node: Node) -> float:
    """What a variance subtracts from the number of elements."""
    if str(node.target).endswith(".correction"):
        return float_named(node, "correction", 1.0)
    unbiased = node.args[2] if len(node.args) > 2 else node.kwargs.get("unbiased", True)
    if str(node.target).endswith(".default"):
        unbiased = node.args[1] if len(node.args) > 1 else True
    return float(bool(unbiased))


def _why_no_root(node: Node) -> str:
    if node.target in SUMS:
        return "eps is added outside the root"
    if node.target in FLOORS:
        return "the root has a floor instead of an eps inside"
    if node.target in DEVIATIONS:
        return "a standard deviation has no eps inside its root"
    if node.target in LENGTHS:
        return "the value is divided by its length: a root of a sum of squares, not of their mean"
    return f"the root goes through {name_of(node)}"
