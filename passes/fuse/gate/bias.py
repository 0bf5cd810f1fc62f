"""One activation of a sum with a bias, which the activation alone reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from autopar.graph.constants import Constants
from autopar.graph.emit import tensor_of
from autopar.graph.overwrites import writes
from autopar.ops.spellings import is_cast
from autopar.passes.fuse.gate.activations import Activated, activation_at
from autopar.passes.fuse.gate.checks import check_interior, check_writes, narrowest, rounded, same_as, widest

aten = torch.ops.aten

_SUMS = (aten.add.Tensor, aten.add_.Tensor)


@dataclass(frozen=True)
class Biased:
    """activation(`x` + `bias`) as the value `root`; `interior` are the nodes between."""

    root: Node
    kind: str
    x: Node
    bias: Node
    dtype: torch.dtype
    interior: frozenset[Node]
    by_hand: bool

    def conditions(self) -> tuple[str, ...]:
        """What was found, a phrase each."""
        return (f"{self.kind} written by hand" if self.by_hand else self.kind, f"a bias of {tensor_of(self.bias).numel()} columns")


def match_bias(node: Node, constants: Constants, writers: Sequence[Node]) -> Biased | None:
    """The activation of a sum with a bias whose value is `node`; None where there is nothing like one. Raises `Refused`."""
    if not isinstance(node.meta.get("val"), torch.Tensor) or not tensor_of(node).is_floating_point() or is_cast(node):
        return None
    found = activation_at(node, constants)
    if found is None:
        return None
    total = narrowest(found.gate)
    operands = _bias_of(total)
    return None if operands is None else _biased(node, found, total, *operands, writers)


def _biased(node: Node, found: Activated, total: Node, x: Node, bias: Node, writers: Sequence[Node]) -> Biased:
    root = rounded(node)
    interior = found.interior | {node, root} | same_as(total)
    check_interior(interior - {root}, (root,), "its activation, or the sum with the bias, is used elsewhere, too")
    x, bias = (narrowest(each) for each in (x, bias))
    check_writes(interior, same_as(x) | same_as(bias), root, writers)
    return Biased(root, found.kind, x, bias, widest(x, bias, root), interior - {root}, found.by_hand)


def _bias_of(total: Node) -> tuple[Node, Node] | None:
    """x [..., N] and the bias, N elements along the last dim."""
    if total.target not in _SUMS or total.kwargs.get("alpha", 1) != 1:
        return None
    pair = total.args[:2]
    if not all(isinstance(each, Node) and tensor_of(each).is_floating_point() for each in pair):
        return None
    for x, bias in (pair, pair[::-1]) if not writes(total) else (pair,):
        whole, shape = tensor_of(x).shape, tensor_of(bias).shape
        rows = len(whole) > 1 and whole == tensor_of(total).shape and whole[-1] > 1 and tensor_of(x).numel() > whole[-1]
        if rows and len(shape) <= len(whole) and shape[-1:] == whole[-1:] and tensor_of(bias).numel() == whole[-1]:
            return x, bias  # type: ignore[return-value]
    return None
