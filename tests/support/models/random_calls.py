"""The calls that random graphs are made of: each draws its operands and literals, and returns its source."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from hypothesis import assume
from hypothesis import strategies as st

from tests.support.models.random import BATCHES, SIZES, Builder, RandomGraph, Unfit, need

Call = Callable[[Builder], str]
MIN_CALLS, MAX_CALLS = 3, 10

_SMOOTH = (
    "-{x}", "{x} * 0.5", "{x} / 3", "1 - {x}", "{x} + 1.0", "torch.tanh({x})", "torch.sigmoid({x})", "functional.gelu({x})",
    "functional.gelu({x}, approximate='tanh')", "functional.silu({x})", "torch.exp(torch.tanh({x}))", "torch.sin({x})",
    "functional.softplus({x})", "{x} * {x}", "torch.rsqrt({x} * {x} + 1)", "torch.log1p({x}.square())", "torch.erf({x})",
    "torch.tanh({x}).pow(3)", "functional.mish({x})", "functional.logsigmoid({x})", "{x}.clone()", "{x}.detach() * {x}",
)  # fmt: skip
# Where the operand is not near these points.
_KINKED = (
    ("functional.relu({x})", 0), ("{x}.abs()", 0), ("functional.leaky_relu({x}, 0.1)", 0), ("functional.elu({x})", 0),
    ("{x}.clamp(min=0.5)", 0.5), ("{x}.sign() * {x}", 0), ("functional.relu6({x} + 6)", 0), ("functional.threshold({x}, 0.25, 2.0)", 0.25),
)  # fmt: skip
_BOTH = (
    "{x} + {y}",
    "{x} - {y}",
    "{x} * {y}",
    "{x} / ({y} * {y} + 1)",
    "torch.lerp({x}, {y}, 0.3)",
    "torch.addcmul({x}, {y}, {y}, value=0.5)",
)


def smooth(at: Builder) -> str:
    return at.one_of(_SMOOTH).format(x=at.tensor())


def kinked(at: Builder) -> str:
    (form, point), x = at.one_of(_KINKED), at.tensor()
    need(at.is_apart(f"{x} - {point}"))
    return form.format(x=x)


def _broadcast(at: Builder, shape: tuple[int, ...]) -> str:
    """A tensor of `shape`, or one or a parameter that is broadcast to it."""
    same = [name for name in at.kept if at.shape(name) == shape]
    suffix = [name for name in at.kept if 0 < len(at.shape(name)) < len(shape) and shape[-len(at.shape(name)) :] == at.shape(name)]
    if (same or suffix) and at.chance():
        return at.one_of([*suffix, *same])
    start = at.number(0, max(len(shape) - 1, 0))
    return at.parameter(*(size if at.number(0, 3) else 1 for size in shape[start:]))


def binary(at: Builder) -> str:
    x = at.tensor()
    return at.one_of(_BOTH).format(x=x, y=_broadcast(at, at.shape(x)))


def larger(at: Builder) -> str:
    x = at.tensor()
    y = _broadcast(at, at.shape(x))
    need(at.is_apart(f"{x} - {y}"))
    return f"torch.{at.one_of(('maximum', 'minimum'))}({x}, {y})"


def masked(at: Builder) -> str:
    x = at.tensor(lambda shape: len(shape) > 0)
    mask = at.mask(at.shape(x))
    need(at.evaluate(mask).dim() <= len(at.shape(x)))
    need(at.evaluate(f"{mask} & ({x} > 0)").shape == at.shape(x))
    form = at.one_of(("torch.where({m}, {x}, {y})", "torch.where({m}, {x}, 0.0)", "{x}.masked_fill({m}, {v})", "{x} * {m}"))
    return form.format(m=mask, x=x, y=_broadcast(at, at.shape(x)) if "{y}" in form else "", v=at.one_of((0.0, 1.5)))


def linear(at: Builder) -> str:
    x = at.tensor(lambda shape: len(shape) > 0)
    size, features = at.one_of(SIZES), at.shape(x)[-1]
    form = at.one_of(("functional.linear({x}, {w}, {b})", "functional.linear({x}, {w})", "{x} @ {u}", "torch.matmul({x}, {u}) + {b}"))
    return form.format(
        x=x,
        w=at.parameter(size, features) if "{w}" in form else "",
        u=at.parameter(features, size) if "{u}" in form else "",
        b=at.parameter(size) if "{b}" in form else "",
    )


def product(at: Builder) -> str:
    """Two tensors, batched where both have more dims."""
    x = at.tensor(lambda shape: len(shape) > 1)
    shape = at.shape(x)
    right = [name for name in at.kept if at.shape(name)[-2:-1] == shape[-1:] and at.shape(name)[:-2] in (shape[:-2], ())]
    turned = [
        name for name in at.kept if at.shape(name)[-1:] == shape[-1:] and len(at.shape(name)) > 1 and at.shape(name)[:-2] == shape[:-2]
    ]
    y = at.one_of([*right, *(f"{name}.transpose(-1, -2)" for name in turned)])
    return f"torch.matmul({x}, {y}) * 0.5"


def einsum(at: Builder) -> str:
    """A tensor with a parameter that has some of its dims and perhaps one more; what is left, in any order."""
    x = at.tensor(lambda shape: 0 < len(shape) < 5)
    letters = "abcde"[: len(at.shape(x))]
    sizes = dict(zip(letters, at.shape(x), strict=True))
    term = at.draw(st.lists(st.sampled_from(letters), min_size=1, max_size=2, unique=True))
    if at.chance():
        sizes["z"] = at.one_of(SIZES)
        term = at.draw(st.permutations([*term, "z"]))
    gone = {letter for letter in term if letter != "z" and at.chance()}
    gone |= {letter for letter in letters if letter not in term and at.number(0, 3) == 0}
    result = at.draw(st.permutations([letter for letter in sizes if letter not in gone]))
    return f"torch.einsum('{letters},{''.join(term)}->{''.join(result)}', {x}, {at.parameter(*(sizes[letter] for letter in term))})"


def _break(at: Builder, size: int) -> list[int]:
    """The sizes that a dim is broken into, major first: one or more."""
    divisors = [divisor for divisor in range(2, size) if size % divisor == 0]
    if not divisors or at.number(0, 2) == 0:
        return [size]
    divisor = at.one_of(divisors)
    return [divisor, size // divisor]


def view(at: Builder) -> str:
    """Neighbouring dims merged, dims broken, or both at once, with sizes of 1 put in."""
    x = at.tensor()
    shape, parts, sizes = at.shape(x), [], []
    for size in shape:
        parts = [*parts, *_break(at, size)] if at.chance() else [*parts, size]
    for size in parts:
        if sizes and at.number(0, 2) == 0:
            sizes[-1] *= size
        else:
            sizes.append(size)
    if at.number(0, 4) == 0:
        sizes.insert(at.number(0, len(sizes)), 1)
    need(tuple(sizes) != shape and len(sizes) < 6)
    return f"{x}.reshape({sizes})"


def regroup(at: Builder) -> str:
    """A dim of one size, another of another: 4 × 6 as 8 × 3."""
    x = at.tensor(lambda shape: len(shape) > 1)
    shape, dim = at.shape(x), at.number(0, len(at.shape(x)) - 2)
    whole = shape[dim] * shape[dim + 1]
    first = at.one_of([size for size in range(2, whole) if whole % size == 0])
    return f"{x}.reshape({[*shape[:dim], first, whole // first, *shape[dim + 2 :]]})"


def permute(at: Builder) -> str:
    x = at.tensor(lambda shape: len(shape) > 1)
    order = at.draw(st.permutations(range(len(at.shape(x)))))
    return f"{x}.permute({list(order)})"


def expand(at: Builder) -> str:
    x, size = at.tensor(lambda shape: len(shape) < 4), at.one_of(SIZES)
    dim = at.number(0, len(at.shape(x)))
    shape = [*at.shape(x)[:dim], size, *at.shape(x)[dim:]]
    return at.one_of(
        (f"{x}.unsqueeze({dim}).expand({shape})", f"{x}.unsqueeze({dim}).repeat({[size if i == dim else 1 for i in range(len(shape))]})")
    )


def piece(at: Builder) -> str:
    """Part of a dim, or its elements in another order."""
    x = at.tensor(lambda shape: any(size > 1 for size in shape))
    dim = at.dim(x)
    size = at.shape(x)[dim]
    start = at.number(0, size - 1)
    stop, step = at.number(start + 1, size), at.one_of((1, 1, 2))
    before = ":, " * dim
    return at.one_of(
        (
            f"{x}[{before}{start}:{stop}:{step}]", f"{x}[{before}{start}]", f"{x}.flip({dim})", f"torch.roll({x}, {start}, {dim})",
            f"{x}.narrow({dim}, {start}, {stop - start})", f"{x}.repeat_interleave(2, {dim})",
        )
    )  # fmt: skip


def join(at: Builder) -> str:
    x = at.tensor(lambda shape: len(shape) > 0)
    y = at.one_of([name for name in at.kept if at.shape(name) == at.shape(x)])
    dim = at.number(0, len(at.shape(x)) - 1)
    return at.one_of((f"torch.cat([{x}, {y} * 2], {dim})", f"torch.stack([{x}, {y} * 2], {dim})", f"torch.cat([{y}, {x}[:1], {x}])"))


def chunks(at: Builder) -> str:
    """Parts of a dim, equal or not, used unequally."""
    x = at.tensor(lambda shape: any(size % 2 == 0 for size in shape))
    dim = at.dim(x, lambda size: size % 2 == 0)
    half = at.shape(x)[dim] // 2
    return at.one_of(
        (
            f"functional.glu({x}, {dim})",
            f"(lambda a, b: a * torch.tanh(b))(*{x}.chunk(2, {dim}))",
            f"torch.cat({x}.split([{half}, {half}], {dim})[::-1], {dim})",
            f"torch.cat([part * (i + 1) for i, part in enumerate({x}.split([1, {2 * half - 1}], {dim}))], {dim})",
            f"torch.stack([part * (i + 1) for i, part in enumerate({x}.unbind({dim}))], {dim})",
        )
    )


def pad(at: Builder) -> str:
    x = at.tensor(lambda shape: len(shape) > 0)
    pads = [at.one_of((0, 1, 2)) for _ in range(2 * at.number(1, min(2, len(at.shape(x)))))]
    return f"functional.pad({x}, {pads}, value={at.one_of((0.0, 0.0, -0.5))})"


def reduction(at: Builder) -> str:
    x = at.tensor(lambda shape: len(shape) > 0)
    dims = at.draw(st.lists(st.integers(0, len(at.shape(x)) - 1), min_size=1, max_size=2, unique=True))
    name = at.one_of(("sum", "mean", "logsumexp", "var"))
    need(name != "var" or math.prod(at.shape(x)[dim] for dim in dims) > 2)
    return f"torch.{name}({x}, {dims}, keepdim={at.chance()})"


def extreme(at: Builder) -> str:
    x = at.tensor(lambda shape: any(size > 1 for size in shape), ordered=True)
    dim = at.dim(x)
    need(at.are_distinct(x, dim))
    size = at.shape(x)[dim]
    return at.one_of(
        (
            f"{x}.amax({dim})", f"{x}.amin({dim}, keepdim=True)", f"{x}.max({dim}).values", f"{x}.sort({dim}).values",
            f"{x}.sort({dim}, descending=True).values", f"torch.topk({x}, {at.number(1, size)}, {dim}).values",
            f"{x}.gather({dim}, torch.topk(-{x}, {at.number(1, size)}, {dim}).indices)", f"{x}.cummax({dim}).values",
            f"{x}.take_along_dim({x}.argsort({dim}), {dim})", f"{x} * ({x} == {x}.amax({dim}, keepdim=True))",
        )
    )  # fmt: skip


def along(at: Builder) -> str:
    """What runs along one dim."""
    x = at.tensor(lambda shape: len(shape) > 0)
    dim = at.number(0, len(at.shape(x)) - 1)
    forms = (
        f"torch.softmax({x}, {dim})", f"torch.log_softmax({x}, {dim})", f"{x}.cumsum({dim})", f"torch.tanh({x}).cumprod({dim})",
        f"torch.logcumsumexp({x}, {dim})", f"functional.normalize({x}, dim={dim}, eps=0.1)",
    )  # fmt: skip
    return at.one_of(forms)


def norm(at: Builder) -> str:
    x = at.tensor(lambda shape: len(shape) > 0 and shape[-1] > 1)
    shape = at.shape(x)
    count = at.number(1, min(2, len(shape)))
    normalized = list(shape[-count:])
    weight = at.parameter(*normalized)
    forms = [
        f"functional.layer_norm({x}, {normalized}, {weight}, {at.parameter(*normalized)}, 0.1)",
        f"functional.layer_norm({x}, {normalized}, eps=0.1)",
        f"functional.rms_norm({x}, {normalized}, {weight}, 0.1)",
    ]
    if len(shape) > 2:
        groups = at.one_of([size for size in range(1, shape[1] + 1) if shape[1] % size == 0])
        forms.append(f"functional.group_norm({x}, {groups}, {at.parameter(shape[1])}, {at.parameter(shape[1])}, 0.1)")
    return at.one_of(forms)


def lookup(at: Builder) -> str:
    """A table by ids: a parameter's rows, or those of a dim of a tensor."""
    x = at.tensor(lambda shape: any(size > 1 for size in shape))
    dim, shape = at.dim(x), at.shape(x)
    size = shape[dim]
    chosen = tuple(at.one_of(SIZES) if i == dim else length for i, length in enumerate(shape))
    forms: tuple[Call, ...] = (
        lambda at: _embedding(at),
        lambda at: f"{x}.gather({dim}, {at.whole_numbers(chosen, size)})",
        lambda at: f"{x}[{':, ' * dim}{at.whole_numbers((at.one_of(SIZES),), size)}]",
        lambda at: f"{x}.index_select({dim}, {at.whole_numbers((at.one_of(SIZES),), size)})",
        lambda at: f"torch.zeros({list(shape)}, dtype=torch.float64).scatter_add({dim}, {at.whole_numbers(shape, size)}, {x})",
        lambda at: f"torch.zeros({list(shape)}, dtype=torch.float64).index_add({dim}, {at.whole_numbers((size,), size)}, {x})",
        lambda at: f"{x}.scatter_add({dim}, {at.whole_numbers(shape, size)}, {x} * 0.5)",
    )
    return at.one_of(forms)(at)


def _embedding(at: Builder) -> str:
    rows, width = at.one_of(SIZES), at.one_of(SIZES)
    shape = (at.batch, *(at.one_of(SIZES) for _ in range(at.number(0, 2))))
    padding = at.one_of((None, None, 1))
    return f"functional.embedding({at.input(shape, rows)}, {at.parameter(rows, width)}, padding_idx={padding})"


def convolution(at: Builder) -> str:
    """Over one or two dims, in groups, with padding and stride."""
    x = at.tensor(lambda shape: len(shape) in (3, 4) and all(size > 1 for size in shape[2:]))
    shape = at.shape(x)
    groups = at.one_of([size for size in range(1, shape[1] + 1) if shape[1] % size == 0])
    outer = groups * at.number(1, 3)
    weight = at.parameter(outer, shape[1] // groups, *(at.number(1, 2) for _ in shape[2:]))
    bias = f", {at.parameter(outer)}" if at.chance() else ""
    return f"functional.conv{len(shape) - 2}d({x}, {weight}{bias}, stride={at.number(1, 2)}, padding={at.number(0, 1)}, groups={groups})"


def dropout(at: Builder) -> str:
    need(not at.drawn)  # one is enough: its draws are thirty ops
    return f"functional.dropout({at.tensor()}, {at.one_of((0.1, 0.5))}, self.training)"


def attention(at: Builder) -> str:
    """Over [batch, heads, length, size], with fewer key heads than query heads, a mask, causal, or neither."""
    x = at.tensor(lambda shape: len(shape) == 4)
    batch, heads, length, size = at.shape(x)
    key_heads = at.one_of([count for count in range(1, heads + 1) if heads % count == 0])
    key = f"{x}[:, :{key_heads}]"
    value = f"torch.einsum('bhtd,de->bhte', {key}, {at.parameter(size, at.one_of((size, 2)))})"
    how = at.one_of(
        (
            "",
            ", is_causal=True",
            f", attn_mask=(torch.arange({length})[:, None] >= torch.arange({length}))",
            *(() if at.drawn else (", dropout_p=0.25",)),
        )
    )
    grouped = ", enable_gqa=True" if key_heads < heads else ""
    return f"functional.scaled_dot_product_attention({x}, {key} * {at.parameter(1, key_heads, 1, size)}, {value}{how}{grouped})"


def loss(at: Builder) -> str:
    """A loss with labels, some of them ignored."""
    x = at.tensor(lambda shape: len(shape) > 1 and shape[0] == at.batch and shape[1] > 1)
    shape = at.shape(x)
    labels = at.input((shape[0], *shape[2:]), shape[1])
    how = at.one_of(("", ", ignore_index=0", ", reduction='sum'", ", label_smoothing=0.1"))
    return at.one_of((f"functional.cross_entropy({x}, {labels}{how})", f"functional.mse_loss({x}, torch.zeros_like({x}))"))


CALLS: tuple[Call, ...] = (
    smooth, kinked, binary, larger, masked, linear, product, einsum, view, regroup, permute, expand, piece, join, chunks, pad, reduction,
    extreme, along, norm, lookup, convolution, dropout, attention, loss,
)  # fmt: skip
# The calls that need a certain number of dims, or sizes, are drawn as often as others only if they are tried more often.
_OFTEN = (*CALLS, linear, linear, einsum, view, view, permute, convolution, attention, attention, product)


@st.composite
def random_graphs(draw: st.DrawFn, max_calls: int = MAX_CALLS) -> RandomGraph:
    """A model of three to `max_calls` calls. It begins with a float input, or with ids."""
    at = Builder(draw, random.Random(draw(st.integers(0, 2**32))), draw(st.sampled_from(BATCHES)))
    if at.number(0, 3) == 0:
        at.keep(_embedding(at))
    else:
        at.kept.append(at.input((at.batch, *(at.one_of(SIZES) for _ in range(at.number(1, 3)))), 0))
        at.keep(linear(at))
    num_calls = draw(st.integers(MIN_CALLS, max_calls))
    for _ in range(3 * num_calls):
        if len(at.lines) < num_calls:
            _grow(at)
    assume(len(at.lines) >= MIN_CALLS)
    return at.finish()


def _grow(at: Builder) -> None:
    """Add one call of those that can be drawn here."""
    choice = at.one_of(_OFTEN)
    before = dict(at.shapes), dict(at.tied), dict(at.inputs), dict(at.names)
    try:
        fits = at.keep(choice(at)) is not None
    except Unfit:
        fits = False
    if not fits:
        at.shapes, at.tied, at.inputs, at.names = before
