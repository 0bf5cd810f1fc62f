"""From a layout to the one an op wants: a reshape, a permute, an expand and a reshape, of which only what is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from autopar.graph.emit import Emitter, tensor_of
from autopar.passes.fuse.attention.layout import Labels, Layout, flat

aten = torch.ops.aten

# An op of one tensor and one argument, in a graph or on real values.
Step = tuple[Callable[..., Any], list[int]]


def steps(shape: Sequence[int], layout: Layout, wanted: Layout, labels: Labels) -> list[Step]:
    """What brings a tensor of `shape` that carries `layout` to `wanted`. Labels that it lacks are expanded."""
    layout, wanted = labels.layout(layout), labels.layout(wanted)
    has, order = flat(layout), flat(wanted)
    assert set(has) <= set(order), f"labels {layout} do not fit {wanted}"
    found: list[Step] = []
    current = list(shape)

    def step(op: Callable[..., Any], argument: list[int], result: list[int]) -> None:
        if result != current or op is aten.permute.default:
            found.append((op, argument))
            current[:] = result

    if layout == wanted:
        return found
    present = [label for label in order if label in has]
    if list(has) != present:
        sizes = [labels.size([label]) for label in has]
        step(aten.reshape.default, sizes, sizes)
        permutation = [has.index(label) for label in present]
        step(aten.permute.default, permutation, [sizes[at] for at in permutation])
    single = [labels.size([label]) if label in has else 1 for label in order]
    whole = [labels.size([label]) for label in order]
    final = [labels.size(dim) for dim in wanted]
    if single != whole:
        step(aten.reshape.default, single, single)
        step(aten.expand.default, whole, whole)
    step(aten.reshape.default, final, final)
    return found


def arranged(emit: Emitter, node: Node, layout: Layout, wanted: Layout, labels: Labels) -> Node:
    """`node` as `wanted`, in the graph."""
    for op, argument in steps(tensor_of(node).shape, layout, wanted, labels):
        node = emit.call(op, node, argument)
    return node


def arranged_value(value: torch.Tensor, layout: Layout, wanted: Layout, labels: Labels) -> torch.Tensor:
    """The same of a real tensor."""
    for op, argument in steps(value.shape, layout, wanted, labels):
        value = op(value, argument)
    return value


def broadcast_layout(layout: Layout, wanted: Layout, labels: Labels) -> Layout:
    """`wanted` without the dims of which `layout` has no label: they keep size 1."""
    has = set(labels.resolved(flat(layout)))
    return tuple(dim if has & set(dim) else () for dim in labels.layout(wanted))
