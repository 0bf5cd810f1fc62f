"""Writes into memory: of copies, through views of them, and of buffers."""

from __future__ import annotations

import torch

from tests.support.random_models.builder import Builder, Shape, need
from tests.support.random_models.layout import index_of

_THROUGH_AN_INDEX = (
    "{v}[{index}] += {y}", "{v}[{index}] = {y}", "{v}[{index}].mul_({y})", "{v}[{index}].copy_(torch.as_tensor({y}))",
    "{v}[{index}].{change}", "{v}.transpose(0, -1).{change}", "{v}.unsqueeze(0).{change}",
    "{v}.select({dim}, {place}).mul_(2)", "{v}.narrow({dim}, {place}, 1).mul_(2)", "{v}.view(-1)[::2] *= 0.5",
)  # fmt: skip
_CHANGES = (
    "tanh_()", "neg_()", "clamp_(min=0.1)", "zero_()", "fill_(0.7)", "sigmoid_()", "abs_()", "square_()", "relu_()", "cos_()", "mul_(1.5)",
    "add_(0.25)",
)  # fmt: skip
_BY_INDICES = (
    "{v}.index_add_({dim}, {ids}, {y}, alpha=0.5)", "{v}.scatter_add_({dim}, {like}, {y})", "{v}.scatter_({dim}, {places}, {y})",
    "{v}.index_copy_({dim}, {some}, {y})", "{v}.index_fill_({dim}, {some}, 0.5)", "{v}.masked_fill_({mask}, 1.5)",
    "{v}.index_put_(({rows},), {of_rows}, accumulate=True)", "{v}.scatter_reduce_({dim}, {like}, {y}, '{reduction}', include_self={flag})",
    "{v}.scatter_({dim}, {like}, 0.5)", "{v}[{before}{some}] = {y}", "{v}[{before}{some}] += {y}",
    "{v}.index_reduce_({dim}, {some}, {y}, 'amax')",
)  # fmt: skip
# Each reads the buffer, too: before or behind the write. A copy, where the backward needs what is overwritten.
_OF_BUFFERS = (
    ("{b}.mul_(0.9).add_({mean}, alpha=0.1)", "{v} = {x} - {b}.unsqueeze({dim})"),
    ("{v} = {x} * {b}.clone().unsqueeze({dim})", "{b}.lerp_({mean}, 0.3)"),
    ("{v} = {x} * {b}.clone().unsqueeze({dim})", "{b}.copy_({mean})"),
    ("{v} = {x} + {b}.unsqueeze({dim})", "{b} = 0.9 * {b} + 0.1 * {mean}"),
    ("{v} = {x} + {b}.sum()", "{b}[{index}] += 1"),
    ("{b}[:1] = {mean}[:1]", "{v} = {x} + {b}.unsqueeze({dim})", "{b}.mul_(0.5)"),
)
_OF_COUNTERS = (
    ("{b} += 2", "{v} = {x} * (1 + 0.1 * {b})"),
    ("{b}.add_(({x} > 0).sum())", "{v} = {x} + 0.01 * {b}"),
)


def through_views(at: Builder) -> None:
    x, v = at.tensor(lambda shape: len(shape) > 0), at.new_name()
    lines, kept = [at.one_of((f"{v} = {x}.clone()", f"{v} = {x}.clone()", f"{v} = {x} * 1.5"))], [v]
    for _ in range(at.number(1, 3)):
        index = index_of(at, at.shape(x))
        dim = at.dim(x)
        if at.chance(0.2):  # a view that is written into by its name, or read behind a write into what it is of
            view = at.new_name()
            lines += [f"{view} = {v}[{index}]", f"{at.one_of((v, view))}.{at.one_of(('mul_(0.5)', 'add_(0.25)'))}"]
            kept.append(view)
            continue
        fields = {"index": index, "change": at.one_of(_CHANGES), "dim": dim, "place": at.number(0, at.shape(x)[dim] - 1)}
        lines.append(at.form(_THROUGH_AN_INDEX, v=v, y=lambda index=index: at.broadcast(_indexed(at.shape(x), index)), **fields))
    at.add(lines, kept)


def _indexed(shape: Shape, index: str) -> Shape:
    try:
        found = tuple(eval(f"x[{index}]", {"x": torch.empty(shape, device="meta")}).shape)
    except IndexError:
        found = (0,)
    need(0 not in found)
    return found


def by_indices(at: Builder) -> None:
    """Where several rows go to one place the op sums them, or takes their maximum: which is written last is nobody's to say."""
    x = at.tensor(lambda shape: len(shape) > 0)
    shape, dim = at.shape(x), at.dim(x)
    n = at.number(1, min(3, shape[dim]))
    some = f"torch.tensor({at.draw.sample(range(shape[dim]), n)})"
    like = tuple(n if i == dim else size for i, size in enumerate(shape))
    v = at.new_name()
    write = at.form(
        _BY_INDICES,
        v=v,
        dim=dim,
        before=":, " * dim,
        some=some,
        places=f"{some}.reshape({[n if i == dim else 1 for i in range(len(shape))]}).expand({list(like)})",
        y=lambda: at.one_of(at.of_shape(like)) if at.of_shape(like) and at.chance(0.7) else at.parameter(*like),
        ids=lambda: at.ids((n,), shape[dim]),
        like=lambda: at.ids(like, shape[dim]),
        mask=lambda: at.mask(shape),
        rows=lambda: at.ids((n,), shape[0]),
        of_rows=lambda: at.parameter(n, *shape[1:]),
        reduction=at.one_of(("sum", "mean", "amax", "amin")),
        flag=at.chance(),
    )
    base = f"{v} = {x}.clone()" if at.chance(0.7) else f"{v} = torch.zeros({list(shape)}, dtype=torch.float64)"
    at.add([base, write], [v])


def of_a_buffer(at: Builder) -> None:
    x, v = at.tensor(lambda shape: len(shape) >= 2), at.new_name()
    shape, dim = at.shape(x), at.dim(x)
    if at.chance(0.3):
        b = at.buffer((), None)
        at.add([line.format(b=b, v=v, x=x) for line in at.one_of(_OF_COUNTERS)], [v])
        return
    left = shape[:dim] + shape[dim + 1 :]
    b, mean, index = at.buffer(left), f"{x}.detach().mean({dim})", index_of(at, left, drops_dims=False)
    at.add([line.format(b=b, v=v, x=x, dim=dim, mean=mean, index=index) for line in at.one_of(_OF_BUFFERS)], [v])


FAMILIES = (through_views, by_indices, of_a_buffer)
