"""The sum that is normalised: where it can be computed by the op, and for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from autopar.graph.emit import tensor_of
from autopar.graph.overwrites import memory_of, overwritten, written_by
from autopar.ir.keys import SOURCE, Source
from autopar.passes.fuse.norm.match import Match

aten = torch.ops.aten


@dataclass(frozen=True)
class Residual:
    """`total` = left + right is normalised. The op goes in front of `before`, and what reads the total reads it there."""

    total: Node
    left: Node
    right: Node
    before: Node


def residual_of(found: Match, writers: Sequence[Node], across_modules: bool) -> Residual | None:
    """The sum that `found` normalises, where the op can add it.

    All who read the sum must come after the op, and all that the op reads before it: it goes where the norm ended or, where the sum
    is read before that, right behind the sum. `across_modules`: whether a module's sum may go into the norm of the next module.
    """
    total = found.x
    if total.target is not aten.add.Tensor or total.kwargs.get("alpha", 1) != 1 or found.dtype != tensor_of(total).dtype:
        return None
    left, right = total.args[:2]
    for operand in (left, right):
        if not isinstance(operand, Node) or not _is_alike(tensor_of(operand), tensor_of(total)):
            return None
    assert isinstance(left, Node) and isinstance(right, Node)
    if not across_modules and not _is_within(found.start, total):
        return None
    if any(memory_of(written_by(writer)) is memory_of(total) for writer in writers):
        return None
    for before in (found.end, total.next):
        if _fits(found, total, before) and overwritten((left, right), before, writers) is None:
            return Residual(total, left, right, before)
    return None


def _is_alike(operand: torch.Tensor, total: torch.Tensor) -> bool:
    return operand.shape == total.shape and operand.dtype == total.dtype and operand.device == total.device


def _is_within(norm: Node, total: Node) -> bool:
    """Whether the norm belongs to the module that adds, or to one inside it."""
    outer, inner = ((SOURCE.get(node) or Source()).module for node in (total, norm))
    return not outer or inner == outer or inner.startswith(f"{outer}.")


def _fits(found: Match, total: Node, before: Node) -> bool:
    gone = _gone(found)
    readers = [user for user in total.users if user not in gone and user is not found.end]
    reads = [item for item in (found.weight, found.bias) if item is not None]
    return all(not reader < before for reader in readers) and all(item < before for item in reads)


def _gone(found: Match) -> set[Node]:
    """The nodes between that nothing reads once the norm is an op."""
    gone = set[Node]()
    for node in sorted(found.interior, reverse=True):
        if all(user in gone or user is found.end or (not user.users and user.op != "output") for user in node.users):
            gone.add(node)
    return gone
