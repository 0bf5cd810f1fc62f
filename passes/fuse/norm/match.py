"""One norm, whole: an op of ATen's or a norm by hand, with the casts, the weight and the bias that follow it, and the sum it is of."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from autopar.graph.constants import Constants
from autopar.graph.default_eps import default_eps
from autopar.graph.emit import Emitter, lay_out_anew, tensor_of
from autopar.graph.overwrites import between, memory_of, overwritten, sources_of, writers_of, writes, written_by
from autopar.ir.arguments import list_at, node_at
from autopar.ir.fusion import NotFusible
from autopar.ir.keys import SOURCE, Source
from autopar.kernels.normalisation import add_norm, norm
from autopar.ops.rules.labels import argument
from autopar.ops.traits import is_cast
from autopar.passes.fuse.guards import check_kept, check_operands, readers_of
from autopar.passes.fuse.match import Match, Rewriting
from autopar.passes.fuse.norm.by_hand import Normalised, is_affine, normalised_at
from autopar.passes.fuse.norm.moments import PRODUCTS, SUMS, stripped
from autopar.passes.fuse.reading import is_tensor, narrowest, operand_pairs, summands, widest

aten = torch.ops.aten

_LAYER_NORMS = (aten.layer_norm.default, aten.native_layer_norm.default)


@dataclass(frozen=True)
class Norm(Match):
    """norm(x) · weight + bias; `start` is the norm without what follows it. With `adds_residual` the op computes the sum x, too."""

    start: Node
    x: Node
    weight: Node | None
    bias: Node | None
    eps: float
    centred: bool
    adds_residual: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """What the op returns: at least as wide as its operand and its result. Of 16 bits it computes in float32 anyway."""
        wide = any(tensor_of(item).dtype == torch.float64 for item in self.affine())
        return torch.float64 if wide else widest(self.x, self.root)

    def affine(self) -> list[Node]:
        """Weight and bias, if there are any."""
        return [item for item in (self.weight, self.bias) if item is not None]

    def conditions(self) -> tuple[str, ...]:
        kind, columns = "layer norm" if self.centred else "RMS norm", tensor_of(self.x).shape[-1]
        there = [name for name, item in (("a weight", self.weight), ("a bias", self.bias)) if item is not None]
        beside = f"with {' and '.join(there)}" if there else "without a weight"
        found = f"{kind} over the last dim ({columns}), eps {self.eps:.6g}, {beside}"
        return (found, "residual added inside") if self.adds_residual else (found,)

    def emit(self, emit: Emitter) -> Node:
        return self._result(emit, norm, emit.cast(self.x, self.dtype))

    def write(self, rewriting: Rewriting) -> None:
        residual = residual_of(self, writers_of(self.root.graph)) if self.adds_residual else None
        assert (residual is not None) == self.adds_residual, self
        emit = Emitter(self.root.graph, self.root if residual is None else residual.before, like=self.root)
        result = self.emit(emit) if residual is None else self._result(emit, add_norm, residual.left, residual.right)
        replaced = {self.root: emit.cast(emit.call(operator.getitem, result, 0), tensor_of(self.root).dtype)}
        if residual is not None:
            total = Emitter(emit.graph, residual.before, like=residual.total).call(operator.getitem, result, 1)
            replaced = {residual.total: total, **replaced}
        for node, by in replaced.items():
            strides = tensor_of(node).stride()
            rewriting.replace(node, by)
            if tensor_of(by).stride() != strides:
                lay_out_anew(by)
        self.erase_interior()

    def _result(self, emit: Emitter, op: Any, *operands: Node) -> Node:
        """What `op` gives of them: the norm and, of a sum, the sum."""
        columns = tensor_of(self.x).shape[-1]
        weight, bias = (None if item is None else _row(emit, item, columns) for item in (self.weight, self.bias))
        return emit.call(op, *operands, weight, bias, eps=self.eps, centred=self.centred)


@dataclass(frozen=True)
class Residual:
    """`total` = left + right is normalised. The op goes in front of `before`, and what reads the total reads it there."""

    total: Node
    left: Node
    right: Node
    before: Node


def match_norm(node: Node, constants: Constants, writers: Sequence[Node]) -> Norm | None:
    """The norm whose value, before any weight that follows, is `node`; None where there is nothing like one. Raises `NotFusible`."""
    if node.op != "call_function":
        return None
    is_op = node.target in _LAYER_NORMS or node.target is aten.rms_norm.default
    found = _of_op(node) if is_op else normalised_at(node, constants)
    if found is None:
        return None
    found = _with_tail(found)
    weight, bias = (None if item is None else narrowest(item) for item in (found.weight, found.bias))
    # A weight may be computed from x, too.
    outside = {found.x, found.node, *sources_of(item for item in (weight, bias) if item is not None)}
    result = Norm(found.node, frozenset(between(found.x, found.node) - outside), node, found.x, weight, bias, found.eps, found.centred)
    check_operands((found.x, *result.affine()), found.node, writers, "between where it is made and the norm")
    if not is_op:  # which keeps them itself
        check_kept((found.x, *result.affine()), found.node, writers)
    return result


def residual_of(found: Norm, writers: Sequence[Node]) -> Residual | None:
    """The sum that `found` normalises, where the op can add it.

    All who read the sum must come after the op, and all that the op reads before it: it goes where the norm ended or, where the sum
    is read before that, right behind the sum.
    """
    total = found.x
    if total.target is not aten.add.Tensor or not summands(total) or found.dtype != tensor_of(total).dtype:
        return None
    left, right = total.args[:2]
    if not isinstance(left, Node) or not isinstance(right, Node) or not (_is_alike(left, total) and _is_alike(right, total)):
        return None
    if any(memory_of(written_by(writer)) is memory_of(total) for writer in writers):
        return None
    for before in (found.root, total.next):
        if _fits(found, total, before) and overwritten((left, right), before, writers) is None:
            return Residual(total, left, right, before)
    return None


def is_within_module(found: Norm) -> bool:
    """Whether the norm belongs to the module that computes its operand, or to one inside it."""
    outer, inner = ((SOURCE.get(node) or Source()).module for node in (found.x, found.start))
    return not outer or inner == outer or inner.startswith(f"{outer}.")


def _is_alike(node: Node, other: Node) -> bool:
    operand, total = tensor_of(node), tensor_of(other)
    return operand.shape == total.shape and operand.dtype == total.dtype and operand.device == total.device


def _fits(found: Norm, total: Node, before: Node) -> bool:
    """Whether nobody but what goes reads `total` before the op, and weight and bias are there by then."""
    gone = {found.root}
    for node in sorted(found.interior, reverse=True):
        if gone.issuperset(readers_of(node)):
            gone.add(node)
    return not any(reader < before for reader in total.users if reader not in gone) and all(item < before for item in found.affine())


def _of_op(node: Node) -> Normalised:
    """An op of ATen's."""
    x, shape = node_at(node, 0), list_at(node, 1)
    if len(shape) != 1:
        raise NotFusible(f"it runs over the last {len(shape)} dims")
    if not tensor_of(x).is_floating_point():
        raise NotFusible(f"the value is of {tensor_of(x).dtype}")
    centred = node.target in _LAYER_NORMS
    weight = argument(node, 2, "weight")
    bias = argument(node, 3, "bias") if centred else None
    eps = argument(node, 4, "eps", 1e-5) if centred else argument(node, 3, "eps")
    eps = default_eps(tensor_of(x).dtype) if eps is None else float(eps)
    value = node
    if node.target is aten.native_layer_norm.default:
        read = readers_of(node)
        if [user.args[1] for user in read] != [0]:
            raise NotFusible("its mean or its deviation is read")
        value = read[0]
    return Normalised(value, stripped(x), centred, eps, weight, bias)


def _with_tail(found: Normalised) -> Normalised:
    """`found` with casts, one weight and one bias below it, as long as nothing else reads what is between."""
    node = found.node
    while (user := _only_user(node)) is not None:
        item = _affine(user, node, found.x) if found.bias is None else None
        if is_cast(user):
            # What is made wider stays so only where it is then weighed: a rounded value that is widened is read as it is.
            found = found if widest(node, user) == tensor_of(user).dtype else replace(found, node=user)
        elif item is not None and user.target in SUMS:
            found = replace(found, node=user, bias=item)
        elif item is not None and found.weight is None:
            found = replace(found, node=user, weight=item)
        else:
            break
        node = user
    return found


def _only_user(node: Node) -> Node | None:
    users = readers_of(node)
    return users[0] if len(users) == 1 and users[0].op == "call_function" and not writes(users[0]) else None


def _affine(user: Node, node: Node, x: Node) -> Node | None:
    """The other operand of a product or a sum, where it has one number a column."""
    pairs = operand_pairs(user) if user.target in PRODUCTS else summands(user) if user.target in SUMS else ()
    others = [other for value, other in pairs if value is node is not other]
    return others[0] if others and is_tensor(others[0]) and is_affine(others[0], x) else None


def _row(emit: Emitter, item: Node, columns: int) -> Node:
    """A weight or bias as [N]."""
    return item if tensor_of(item).dim() == 1 else emit.call(aten.reshape.default, item, [columns])
