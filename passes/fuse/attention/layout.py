"""Labels on dims. A dim carries labels, outermost first, whose sizes multiply to its own; a dim of size 1 carries none.

The walk goes upwards: given the labels of a result, what labels does the operand carry? A view only regroups them, and
splits a label where it cuts a dim; a permute moves them; what `expand` and `repeat` make is dropped: the operand does
not vary along it. Repeated key-value heads are then nothing but keys that lack a label that the queries have.

    scores [B, H, S, T]          (b)(h)(s)(t)
    view of [B·H, S, T]          (b h)(s)(t)
    keys [B, G, T, D] before repeat_kv made [B, H, T, D] of them: h splits into g and r, and the keys carry (b)(g)(t)(d)

What an op of ours reads is laid out from its labels: a reshape, a permute, an expand and a reshape, of which only what is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from autopar.graph.emit import Emitter, tensor_of
from autopar.ir.arguments import call_of
from autopar.ops.traits import COPIES, EXPANSIONS, RESHAPES

aten = torch.ops.aten

Layout = tuple[tuple[int, ...], ...]
# An op of one tensor and one argument, in a graph or on real values.
ViewCall = tuple[Callable[..., Any], list[int]]


class Labels:
    """The sizes of labels, and the parts into which views have split them."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._parts: dict[int, tuple[int, int]] = {}

    def new(self, size: int) -> tuple[int, ...]:
        if size == 1:
            return ()
        self._sizes.append(size)
        return (len(self._sizes) - 1,)

    def of_shape(self, shape: Sequence[int]) -> Layout:
        """A fresh label for every dim."""
        return tuple(self.new(size) for size in shape)

    def size(self, labels: Iterable[int]) -> int:
        return math.prod(self._sizes[label] for label in labels)

    def resolved(self, labels: Iterable[int]) -> tuple[int, ...]:
        """`labels` with the parts of those that have been split since."""
        found: list[int] = []
        for label in labels:
            found += self.resolved(self._parts[label]) if label in self._parts else (label,)
        return tuple(found)

    def layout(self, layout: Layout) -> Layout:
        return tuple(self.resolved(labels) for labels in layout)

    def regrouped(self, labels: Iterable[int], shape: Sequence[int]) -> Layout | None:
        """The same labels in order, on dims of `shape`; None where a dim's bounds do not divide a label."""
        rest, found = list(reversed(self.resolved(labels))), list[tuple[int, ...]]()
        for size in shape:
            dim: list[int] = []
            while (missing := size // self.size(dim)) > 1:
                if not rest:
                    return None
                label = rest.pop()
                if missing % self._sizes[label]:
                    if self._sizes[label] % missing:
                        return None
                    label, inner = self._split(label, missing)
                    rest.append(inner)
                dim.append(label)
            if self.size(dim) != size:
                return None
            found.append(tuple(dim))
        return tuple(found) if not rest else None

    def _split(self, label: int, outer_size: int) -> tuple[int, int]:
        (outer,), (inner,) = self.new(outer_size), self.new(self._sizes[label] // outer_size)
        self._parts[label] = outer, inner
        return outer, inner


def flat(layout: Layout) -> tuple[int, ...]:
    return tuple(label for labels in layout for label in labels)


def broadcast_to(layout: Layout, shape: Sequence[int]) -> Layout:
    """The layout of an operand of `shape` that is broadcast to a result with `layout`."""
    offset = len(layout) - len(shape)
    return tuple(layout[offset + dim] if size > 1 else () for dim, size in enumerate(shape))


@dataclass(frozen=True)
class Placed:
    """A value that carries `layout`."""

    node: Node
    layout: Layout

    def laid_out(self, emit: Emitter, wanted: Layout, labels: Labels) -> Node:
        """The value as `wanted`. Labels that it lacks are expanded."""
        node = self.node
        for op, argument in _views_between(tensor_of(node).shape, self.layout, wanted, labels):
            node = emit.call(op, node, argument)
        return node

    def along(self, emit: Emitter, wanted: Layout, labels: Labels) -> Node:
        """The value so that it broadcasts to what lies as `wanted`."""
        return self.laid_out(emit, broadcast_layout(self.layout, wanted, labels), labels)

    def known_along(self, value: torch.Tensor, wanted: Layout, labels: Labels) -> torch.Tensor:
        """`value`, which is this one computed ahead, in the same way."""
        for op, argument in self.views_along(wanted, labels):
            value = op(value, argument)
        return value

    def views_along(self, wanted: Layout, labels: Labels) -> list[ViewCall]:
        """What brings the value so that it broadcasts to what lies as `wanted`."""
        return _views_between(tensor_of(self.node).shape, self.layout, broadcast_layout(self.layout, wanted, labels), labels)


@dataclass(frozen=True)
class Scaled(Placed):
    """`scale` times a value that carries `layout`."""

    scale: float = 1.0


def above(node: Node, layout: Layout, labels: Labels) -> tuple[Node, Layout] | None:
    """The operand of `node`, which only lays values out anew, and its layout; None where `node` does more, or cuts labels oddly."""
    rewrite = _REWRITES.get(node.target)
    if rewrite is None or not isinstance(node.args[0], Node):
        return None
    found = rewrite(node, labels.layout(layout), labels)
    return None if found is None else (node.args[0], found)


def broadcast_layout(layout: Layout, wanted: Layout, labels: Labels) -> Layout:
    """`wanted` without the dims of which `layout` has no label: they keep size 1."""
    has = set(labels.resolved(flat(layout)))
    return tuple(dim if has & set(dim) else () for dim in labels.layout(wanted))


def _views_between(shape: Sequence[int], layout: Layout, wanted: Layout, labels: Labels) -> list[ViewCall]:
    """What brings a tensor of `shape` that carries `layout` to `wanted`."""
    layout, wanted = labels.layout(layout), labels.layout(wanted)
    has, order = flat(layout), flat(wanted)
    assert set(has) <= set(order), f"labels {layout} do not fit {wanted}"
    found: list[ViewCall] = []
    current = list(shape)

    def add(op: Callable[..., Any], argument: list[int], result: list[int]) -> None:
        if result != current or op is aten.permute.default:
            found.append((op, argument))
            current[:] = result

    if layout == wanted:
        return found
    present = [label for label in order if label in has]
    if list(has) != present:
        sizes = [labels.size([label]) for label in has]
        add(aten.reshape.default, sizes, sizes)
        permutation = [has.index(label) for label in present]
        add(aten.permute.default, permutation, [sizes[at] for at in permutation])
    single = [labels.size([label]) if label in has else 1 for label in order]
    whole = [labels.size([label]) for label in order]
    final = [labels.size(dim) for dim in wanted]
    if single != whole:
        add(aten.reshape.default, single, single)
        add(aten.expand.default, whole, whole)
    add(aten.reshape.default, final, final)
    return found


def _input_shape(node: Node) -> tuple[int, ...]:
    return tuple(tensor_of(node.args[0]).shape)


def _regroup(node: Node, layout: Layout, labels: Labels) -> Layout | None:
    return labels.regrouped(flat(layout), _input_shape(node))


def _same(_node: Node, layout: Layout, _labels: Labels) -> Layout:
    return layout


def _permute(node: Node, layout: Layout, _labels: Labels) -> Layout:
    """The op on a value whose dims have each another size, by which they are known again."""
    value = torch.empty(tuple(range(len(layout))), device="meta")
    place = dict(zip(call_of(node)(value, *node.args[1:]).shape, layout, strict=True))
    return tuple(place[dim] for dim in range(len(layout)))


def _expand(node: Node, layout: Layout, _labels: Labels) -> Layout:
    return broadcast_to(layout, _input_shape(node))


def _repeat(node: Node, layout: Layout, labels: Labels) -> Layout | None:
    """Whole copies one after another: the copies are the outer part of a dim."""
    shape, found = _input_shape(node), list[tuple[int, ...]]()
    for dim, size in zip(layout[len(layout) - len(shape) :], shape, strict=True):
        parts = labels.regrouped(dim, (labels.size(dim) // size, size))
        if parts is None:
            return None
        found.append(parts[1])
    return tuple(found)


def _repeat_interleave(node: Node, layout: Layout, labels: Labels) -> Layout | None:
    """Every entry several times: the copies are the inner part of the dim."""
    shape, dim = _input_shape(node), node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
    if not isinstance(dim, int):
        return None
    dim %= len(shape)
    parts = labels.regrouped(layout[dim], (shape[dim], labels.size(layout[dim]) // shape[dim]))
    return None if parts is None else (*layout[:dim], parts[0], *layout[dim + 1 :])


_REWRITES: dict[object, Callable[[Node, Layout, Labels], Layout | None]] = {
    **dict.fromkeys(RESHAPES, _regroup),
    **dict.fromkeys(COPIES, _same),
    **dict.fromkeys(EXPANSIONS, _expand),
    **dict.fromkeys(
        (
            aten.permute.default, aten.transpose.int, aten.swapaxes.default, aten.swapdims.default, aten.movedim.int, aten.movedim.intlist,
            aten.moveaxis.int, aten.moveaxis.intlist, aten.t.default, aten.numpy_T.default, aten.mT.default, aten.adjoint.default,
        ),
        _permute,
    ),
    aten.repeat.default: _repeat,
    aten.repeat_interleave.self_int: _repeat_interleave,
}  # fmt: skip
