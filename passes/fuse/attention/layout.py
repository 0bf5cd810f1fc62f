"""Labels on dims. A dim carries labels, outermost first, whose sizes multiply to its own; a dim of size 1 carries none.

The walk goes upwards: given the labels of a result, what labels does the operand carry? A view only regroups them, and
splits a label where it cuts a dim; a permute moves them; what `expand` and `repeat` make is dropped: the operand does
not vary along it. Repeated key-value heads are then nothing but keys that lack a label that the queries have.

    scores [B, H, S, T]          (b)(h)(s)(t)
    view of [B·H, S, T]          (b h)(s)(t)
    keys [B, G, T, D] before repeat_kv made [B, H, T, D] of them: h splits into g and r, and the keys carry (b)(g)(t)(d)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.fx import Node

from autopar.graph.emit import tensor_of
from autopar.ir.arguments import arguments, int_at, ints_at

aten = torch.ops.aten

Layout = tuple[tuple[int, ...], ...]


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


def above(node: Node, layout: Layout, labels: Labels) -> tuple[Node, Layout] | None:
    """The operand of `node`, which only lays values out anew, and its layout; None where `node` does more, or cuts labels oddly."""
    rewrite = _REWRITES.get(node.target)
    if rewrite is None or not isinstance(node.args[0], Node):
        return None
    found = rewrite(node, labels.layout(layout), labels)
    return None if found is None else (node.args[0], found)


def _input_shape(node: Node) -> tuple[int, ...]:
    return tuple(tensor_of(node.args[0]).shape)


def _regroup(node: Node, layout: Layout, labels: Labels) -> Layout | None:
    return labels.regrouped(flat(layout), _input_shape(node))


def _same(_node: Node, layout: Layout, _labels: Labels) -> Layout:
    return layout


def _moved(layout: Layout, order: Sequence[int]) -> Layout:
    """`order[i]` is the operand's dim that the result's dim i shows."""
    found: list[tuple[int, ...]] = [()] * len(layout)
    for labels, dim in zip(layout, order, strict=True):
        found[dim] = labels
    return tuple(found)


def _permute(node: Node, layout: Layout, _labels: Labels) -> Layout:
    return _moved(layout, [dim % len(layout) for dim in ints_at(node, 1)])


def _swapped(layout: Layout, first: int, second: int) -> Layout:
    order = list(range(len(layout)))
    first, second = first % len(order), second % len(order)
    order[first], order[second] = second, first
    return _moved(layout, order)


def _transpose(node: Node, layout: Layout, _labels: Labels) -> Layout:
    return _swapped(layout, int_at(node, 1), int_at(node, 2))


def _matrix_transpose(_node: Node, layout: Layout, _labels: Labels) -> Layout:
    return _swapped(layout, -1, -2) if len(layout) > 1 else layout


def _reversed(_node: Node, layout: Layout, _labels: Labels) -> Layout:
    return layout[::-1]


def _movedim(node: Node, layout: Layout, _labels: Labels) -> Layout:
    source, destination = ([dims] if isinstance(dims, int) else list(dims) for dims in arguments(node)[1:3])
    num_dims = len(layout)
    placed = {to % num_dims: at % num_dims for at, to in zip(source, destination, strict=True)}
    others = iter(dim for dim in range(num_dims) if dim not in placed.values())
    return _moved(layout, [placed[dim] if dim in placed else next(others) for dim in range(num_dims)])


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
    **dict.fromkeys(
        (
            aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.view_as.default, aten.reshape_as.default,
            aten.flatten.using_ints, aten.unflatten.int, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
        ),
        _regroup,
    ),
    **dict.fromkeys((aten.contiguous.default, aten.clone.default, aten.alias.default, aten.lift_fresh_copy.default), _same),
    **dict.fromkeys((aten.expand.default, aten.expand_as.default, aten.broadcast_to.default), _expand),
    **dict.fromkeys((aten.transpose.int, aten.swapaxes.default, aten.swapdims.default), _transpose),
    **dict.fromkeys((aten.movedim.int, aten.movedim.intlist, aten.moveaxis.int, aten.moveaxis.intlist), _movedim),
    **dict.fromkeys((aten.t.default, aten.numpy_T.default), _reversed),
    **dict.fromkeys((aten.mT.default, aten.adjoint.default), _matrix_transpose),
    aten.permute.default: _permute,
    aten.repeat.default: _repeat,
    aten.repeat_interleave.self_int: _repeat_interleave,
}  # fmt: skip
