"""Pooling, padding, resizing and sampling of images: batch and channels may be split, space may not (no halos are exchanged)."""

from __future__ import annotations

import re

from torch.fx import Node

from autopar.ir.arguments import int_at
from autopar.ir.program import operands, results_of
from autopar.ops.rule import Label, Labels, Rule, rule
from autopar.ops.rules.labels import argument, aten, blocked, positional, shape_of

_FIRST = (frozenset({0}),)


def _named(*patterns: str, space: str = "123") -> tuple[str, ...]:
    """Op names with each number of space dims in the place of `#`, and their backward ops."""
    forward = tuple(f"aten.{pattern.replace('#', number)}" for pattern in patterns for number in space)
    return tuple(f"{name}{end}" for name in forward for end in (".default", "_backward.default"))


# Each output is a fixed weighted sum of inputs of its own image and channel, and so are the gradients.
_LINEAR = (
    *_named("avg_pool#d", "_adaptive_avg_pool#d", space="23"),
    "aten.avg_pool1d.default",
    "aten.adaptive_avg_pool1d.default",
    *_named("upsample_nearest#d", "_upsample_nearest_exact#d", "reflection_pad#d", "replication_pad#d"),
    *_named("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d", space="_"),
    *_named("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", space="_"),
    *(
        f"aten.upsample_{kind}.vec"
        for kind in ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "bicubic2d", "trilinear3d")
    ),
    *(
        f"aten.{name}{number}d{end}_backward.default"
        for name, end in (("max_pool", "_with_indices"), ("adaptive_max_pool", ""))
        for number in "23"
    ),
)
# What is chosen depends on the values.
_CHOOSING = tuple(
    f"aten.{name}.default" for name in ("max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d", "adaptive_max_pool3d")
)
# The gradient is asked for by its logical shape, the argument at this index.
RESIZING_BACKWARD = tuple(name for name in _LINEAR if "upsample" in name and "backward" in name)
INPUT_SIZE = 2


@rule(*_LINEAR, *_CHOOSING)
def within_channels(node: Node) -> Rule:
    """Batch and channels pass; the dims of space, which the op's name counts, are blocked."""
    name = str(node.target)
    found = re.search(r"(\d)d", name)
    assert found is not None
    num_space = int(found[1])
    labels = tuple((*positional(len(shape_of(operand)) - num_space), *blocked(num_space)) for operand in operands(node))
    return Rule(labels, (labels[0],) * len(results_of(node)), linear=() if name in _CHOOSING else _FIRST)


@rule("aten.grid_sampler_2d.default", "aten.grid_sampler_3d.default")
def grid_sample(node: Node) -> Rule:
    """(input[n, c, …], grid[n, *positions, dims]) → [n, c, *positions]: each position by itself."""
    positions = positional(len(shape_of(node)) - 2, "p")
    return Rule((("n", "c", *blocked(len(positions))), ("n", *positions, None)), (("n", "c", *positions),), linear=_FIRST)


@rule("aten.grid_sampler_2d_backward.default", "aten.grid_sampler_3d_backward.default")
def grid_sample_backward(node: Node) -> Rule:
    """(gradient, input, grid, …) → (input, grid) gradients: sums over positions, and over channels."""
    positions = positional(len(shape_of(node.args[0])) - 2, "p")
    image, grid = ("n", "c", *blocked(len(positions))), ("n", *positions, None)
    results = tuple(labels if value is not None else () for labels, value in zip((image, grid), results_of(node), strict=True))
    return Rule((("n", "c", *positions), image, grid), results, linear=_FIRST)


@rule(aten.im2col.default, aten.col2im.default)
def patches(node: Node) -> Rule:
    """[*batch, c, height, width] ↔ [*batch, c · patch, positions]. Pieces of a patch and positions are blocked."""
    to_columns = node.target is aten.im2col.default
    kernel = argument(node, 1 if to_columns else 2, "kernel_size")
    size = int(kernel[0]) * int(kernel[1])
    images = node.args[0] if to_columns else node
    batch = positional(len(shape_of(images)) - 3)
    merged: Label = ("c", "k") if size > 1 else "c"
    image: Labels = (*batch, "c", None, None)
    column: Labels = (*batch, merged, None)
    source, result = (image, column) if to_columns else (column, image)
    return Rule((source,), (result,), frozenset({"k"}), linear=_FIRST, sizes={"c": shape_of(images)[-3], "k": size})


@rule(aten.pixel_shuffle.default, aten.pixel_unshuffle.default)
def pixel_shuffle(node: Node) -> Rule:
    """[*batch, c · r · r, h, w] ↔ [*batch, c, h · r, w · r]: a view, a transpose and a view, of which r is needed whole."""
    factor, is_shuffle = int_at(node, 1), node.target is aten.pixel_shuffle.default
    deep, wide = (node.args[0], node) if is_shuffle else (node, node.args[0])
    batch, shape = positional(len(shape_of(wide)) - 3), shape_of(deep)
    sizes = {"c": shape_of(wide)[-3], "h": shape[-2], "w": shape[-1], "p": factor, "q": factor}
    channels, plane = (*batch, ("c", "p", "q"), "h", "w"), (*batch, "c", ("h", "p"), ("w", "q"))
    source, result = (channels, plane) if is_shuffle else (plane, channels)
    return Rule((source,), (result,), frozenset({"p", "q"}), linear=_FIRST, sizes=sizes)
