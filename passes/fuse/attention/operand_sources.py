"""Queries, keys and values before views, `repeat_kv`, a scale by a number or a cast to a wider dtype."""

from __future__ import annotations

from torch.fx import Node

from autopar.graph.constants import Constants
from autopar.graph.overwrites import writes
from autopar.ir.arguments import node_at
from autopar.ops.traits import is_cast, widens
from autopar.passes.fuse.attention.layout import Labels, Layout, Scaled, above, flat
from autopar.passes.fuse.reading import is_alike, scaled


def sources(node: Node, layout: Layout, labels: Labels, constants: Constants, strip_scales: bool) -> list[Scaled]:
    """The operand `node` and what it came from, step by step upwards. In-place ops end the way: above them the value is another."""
    found = [Scaled(node, layout)]
    while (step := _above(found[-1], labels, constants, strip_scales)) is not None:
        found.append(step)
    return [Scaled(each.node, labels.layout(each.layout), each.scale) for each in found]


def best(candidates: list[Scaled], wanted: Layout, labels: Labels) -> Scaled:
    """The furthest that lies as `wanted`; where none does, the furthest of all."""
    fitting = [each for each in candidates if labels.layout(each.layout) == wanted]
    return fitting[-1] if fitting else candidates[-1]


def labels_of(candidates: list[Scaled], labels: Labels) -> set[int]:
    """The labels that the furthest source carries."""
    return set(labels.resolved(flat(candidates[-1].layout)))


def _above(source: Scaled, labels: Labels, constants: Constants, strip_scales: bool) -> Scaled | None:
    node, layout, scale = source.node, source.layout, source.scale
    if (moved := above(node, layout, labels)) is not None:
        return Scaled(*moved, scale)
    if is_cast(node) and widens(node):
        return Scaled(node_at(node, 0), layout, scale)
    for value, factor in scaled(node, constants.number) if strip_scales and not writes(node) else ():
        if factor and is_alike(value, node):
            return Scaled(value, layout, scale * factor)
    return None
