"""Cosines and sines in the shape that the op takes: [..., R], one for each rotated element."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch.fx import Node

from autopar.graph.emit import Emitter, tensor_of
from autopar.ir.fusion import NotFusible
from autopar.passes.fuse.rotary.elements import Angle, real_shape

aten = torch.ops.aten


@dataclass(frozen=True)
class Angles:
    """`node`, of whose last `num_inner` dims the turned elements take those at `indices`."""

    node: Node
    num_inner: int
    indices: tuple[int, ...]
    negative: bool = False

    @staticmethod
    def of(found: Sequence[Angle], what: str, negative: bool = False) -> Angles:
        """Raises `NotFusible` where they do not come from one value."""
        first = found[0]
        if any((each.node, each.num_inner) != (first.node, first.num_inner) for each in found):
            raise NotFusible(f"its {what} come from several values")
        angles = Angles(first.node, first.num_inner, tuple(each.index for each in found), negative)
        if angles._parts() is None:
            raise NotFusible(f"its {what} lie in an order that is neither one for each element nor one for each pair")
        return angles

    @property
    def outer(self) -> tuple[int, ...]:
        shape = real_shape(self.node)
        return shape[: len(shape) - self.num_inner]

    def write(self, emit: Emitter) -> Node:
        """The node, of shape [*outer, R]."""
        parts = self._parts()
        assert parts is not None
        once, joined = parts
        node, size = self.node, self._size
        node = emit.call(aten.view_as_real.default, node) if tensor_of(node).is_complex() else node
        if self.num_inner > 1:
            node = emit.call(aten.reshape.default, node, [*self.outer, size])
        step = once[1] - once[0] if len(once) > 1 else 1
        if list(once) != list(range(size)):
            node = emit.call(aten.slice.Tensor, node, -1, min(once), max(once) + 1, step)
        if joined == "halves":
            node = emit.call(aten.cat.default, [node, node], -1)
        elif joined == "pairs":
            node = emit.call(aten.reshape.default, emit.call(aten.stack.default, [node, node], -1), [*self.outer, len(self.indices)])
        return emit.call(aten.neg.default, node) if self.negative else node

    @property
    def _size(self) -> int:
        return math.prod(real_shape(self.node)[len(self.outer) :])

    def _parts(self) -> tuple[tuple[int, ...], str] | None:
        """Indices in even steps, and how they are repeated."""
        half, of_pairs = self.indices[: len(self.indices) // 2], self.indices[::2]
        ways = ((self.indices, self.indices, ""), (half, half * 2, "halves"), (of_pairs, np.repeat(of_pairs, 2), "pairs"))
        for once, repeated, joined in ways:
            steps = {after - before for before, after in pairwise(once)}
            if tuple(repeated) == self.indices and (not steps or (len(steps) == 1 and min(steps) > 0)):
                return once, joined
        return None
