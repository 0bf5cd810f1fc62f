"""Calls that move elements and compute nothing of them: views, parts, joins, padding."""

from __future__ import annotations

import math

from tests.support.random_models.builder import Builder, Shape

_MOVES = (
    "{x}.movedim({i}, {j})", "{x}.transpose({i}, {j})", "{x}.swapaxes({i}, {j})", "{x}.mT", "torch.rot90({x}, {turns}, [{i}, {j}])",
    "{x}.permute({order})", "{x}.flip([{i}, {j}])", "torch.roll({x}, ({a}, {b}), ({i}, {j}))", "torch.roll({x}, {a})", "{x}.fliplr()",
)  # fmt: skip
# A tensor that says how often each row comes back is refused: how many rows there are depends on values.
_EXPANSIONS = (
    "{x}.unsqueeze({dim}).expand({new})", "{x}.unsqueeze({dim}).expand({new}).reshape({merged})", "{x}.expand(2, {whole})", "{x}.tile(2)",
    "{x}.repeat_interleave({k}, {before})", "{x}.repeat({often})", "{x}.unsqueeze({dim}).expand({new}).contiguous()",
    "torch.broadcast_to({x}, {twice})",
)  # fmt: skip
_PARTS = (
    "{x}[{index}]", "{x}[{index}]", "{x}.narrow({dim}, {start}, {length})", "{x}.select({dim}, {last})", "{x}.unbind({dim})[{start}]",
    "{x}.diagonal(0, 0, {end})", "{x}.tril({shift})", "{x}.triu()", "{x}.diff(dim={dim})", "{x}.unfold({dim}, {window}, {step})",
    "{x}.as_strided(({size},), (1,))", "torch.diag_embed({x})", "{x}.movedim({dim}, 0)[{start}]", "{x}[..., -1]",
    "{x}.index_select({dim}, torch.tensor({rows}))", "torch.atleast_3d({x})", "{x}.squeeze()",
)  # fmt: skip
_SPLITS = (
    "{x}.split([{k}, {rest}], {dim})",
    "torch.tensor_split({x}, [{k}], dim={dim})",
    "torch.tensor_split({x}, 2, dim={dim})",
    "{x}.chunk(2, {dim})",
)
# All parts of a dim, used unequally.
_ALL_PARTS = (
    "torch.cat([part * (i + 1) for i, part in enumerate({x}.split({k}, {dim}))], {dim})",
    "torch.cat([part.sin() for part in {x}.chunk({count}, {dim})][::-1], {dim})", "torch.stack({x}.unbind({dim})[::-1], {dim})",
    "sum(part.mean() * i for i, part in enumerate({x}.split({k}, {dim}))) * {x}",
    "torch.stack([{x}.select({dim}, i) * i for i in range({size} - 1)], -1)", "F.glu({x}, {dim})",
)  # fmt: skip
# An empty tensor among those that are joined has no gradient in one place and zeros in another: left out.
_JOINS = (
    "torch.cat([{x}, {y}], {dim})", "torch.cat([{y}, {x}.flip({dim}), {y} * 2], {dim})", "torch.stack([{x}, {x} * 2], {dim})",
    "torch.cat([{x}, torch.zeros_like({x}), {x}[:1]], 0)", "torch.hstack([{x}, {x}])", "torch.dstack([{x}, {x}])",
    "torch.stack([{x}, {x}])",
)  # fmt: skip


def index_of(at: Builder, shape: Shape, drops_dims: bool = True) -> str:
    """A basic index: slices, numbers, None, an ellipsis."""
    parts: list[str] = []
    for size in shape[: at.number(1, len(shape))]:
        start = at.number(0, size - 1)
        forms = [":", f"{at.number(0, 1)}::2", f"-{at.number(1, size)}:", f"{start}:{at.number(start + 1, size)}", f":{at.number(1, size)}"]
        parts.append(at.one_of([*forms, *[str(at.number(-size, size - 1))] * drops_dims]))
    if at.chance(0.15):
        parts.insert(at.number(0, len(parts)), "None")
    return ", ".join(["..."] * at.chance(0.2) + parts)


def reshape(at: Builder) -> None:
    x = at.tensor()
    shape = at.shape(x)
    if len(shape) > 1 and at.chance(0.6):
        first = at.number(0, len(shape) - 2)
        order = at.draw.sample(range(len(shape)), len(shape))
        forms = (
            "{x}.flatten({first}, {last})", "{x}.transpose({first}, -1).reshape({merged})",
            "{x}.permute({order}).contiguous().view({shape})",
        )  # fmt: skip
        merged = at.one_of(([-1], [shape[-1], -1], [-1, shape[0]]))
        at.keep(at.form(forms, x=x, first=first, last=at.number(first + 1, len(shape) - 1), merged=merged, order=order, shape=list(shape)))
        return
    sizes, left = list[int](), math.prod(shape)
    for _ in range(at.number(0, 3)):
        sizes.append(at.one_of([size for size in range(1, left + 1) if left % size == 0]))
        left //= sizes[-1]
    sizes.insert(at.number(0, len(sizes)), left)
    at.keep(f"{x}.{at.one_of(('view', 'reshape', 'reshape'))}({sizes})")


def move(at: Builder) -> None:
    x = at.tensor(lambda shape: len(shape) >= 2)
    dims = range(len(at.shape(x)))
    i, j = at.draw.sample(dims, 2)
    order, a, b = at.draw.sample(dims, len(dims)), at.number(-3, 3), at.number(-3, 3)
    at.keep(at.form(_MOVES, x=x, i=i, j=j, order=order, turns=at.number(1, 3), a=a, b=b))


def expand(at: Builder) -> None:
    x, k = at.tensor(lambda shape: 1 <= len(shape) <= 3), at.one_of((2, 3, 5))
    shape = list(at.shape(x))
    dim = at.number(0, len(shape))
    fields = {
        "new": [*shape[:dim], k, *shape[dim:]],
        "merged": [k * shape[0], *shape[1:]],
        "whole": ", ".join("-1" for _ in shape),
        "often": [at.one_of((1, 2)) for _ in range(len(shape) + 1)],
        "twice": [2, *shape],
    }
    at.keep(at.form(_EXPANSIONS, x=x, k=k, dim=dim, before=max(dim - 1, 0), **fields))


def part(at: Builder) -> None:
    x = at.tensor(lambda shape: len(shape) > 0)
    shape, dim = at.shape(x), at.dim(x)
    size = shape[dim]
    start = at.number(0, size - 1)
    fields = {"start": start, "length": at.number(1, size - start), "last": start - size, "end": len(shape) - 1, "shift": at.number(-1, 1)}
    fields |= {"window": min(size, 2), "step": at.number(1, 2), "size": size}
    at.keep(at.form(_PARTS, x=x, dim=dim, index=index_of(at, shape), rows=[at.number(0, size - 1) for _ in range(3)], **fields))


def split(at: Builder) -> None:
    x = at.tensor(lambda shape: max(shape, default=0) > 1)
    dim = at.dim(x, lambda size: size > 1)
    k = at.number(1, at.shape(x)[dim] - 1)
    first, second = at.new_name(), at.new_name()
    parts = at.form(_SPLITS, x=x, dim=dim, k=k, rest=at.shape(x)[dim] - k)
    at.add([f"{first}, {second} = {parts}"], [first, second])
    if at.chance(0.4):
        at.keep(f"torch.cat([{second} * 2, {first}.cos(), {second}], {dim})")


def all_parts(at: Builder) -> None:
    x = at.tensor(lambda shape: max(shape, default=0) > 2)
    dim = at.dim(x, lambda size: size > 2)
    size = at.shape(x)[dim]
    at.keep(at.form(_ALL_PARTS, x=x, dim=dim, size=size, k=at.number(1, size // 2), count=at.number(2, 4)))


def join(at: Builder) -> None:
    x = at.tensor(lambda shape: len(shape) > 0)
    shape, dim = at.shape(x), at.dim(x)
    others = [name for name in at.kept if len(at.shape(name)) == len(shape)]
    y = at.one_of([name for name in others if all(a == b for i, (a, b) in enumerate(zip(at.shape(name), shape, strict=True)) if i != dim)])
    at.keep(at.form(_JOINS, x=x, y=y, dim=dim))


def pad(at: Builder) -> None:
    x = at.tensor(lambda shape: len(shape) > 0)
    shape = at.shape(x)
    if at.chance(0.4):
        sizes = [at.number(0, min(1, shape[-1] - 1)) for _ in range(2)]
        at.keep(f"F.pad({x}, {sizes}, mode='{at.one_of(('reflect', 'replicate', 'circular'))}')")
        return
    sizes = [at.number(-1 if shape[-1] > 2 else 0, 2) for _ in range(2 * at.number(1, min(len(shape), 2)))]
    at.keep(f"F.pad({x}, {sizes}, value={at.one_of((0.0, 1.5))})")


SMOOTH = (reshape, move, expand, split, join)
FAMILIES = (reshape, move, expand, part, split, all_parts, join, pad)
