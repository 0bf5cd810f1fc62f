"""Calls that go element by element, casts among them."""

from __future__ import annotations

from tests.support.random_models.builder import SIZES, Builder

_UNARY = (
    "torch.tanh({x})", "torch.sigmoid({x})", "F.gelu({x})", "{x}.sin() * 2", "F.silu({x})", "{x}.square() * 0.3", "torch.atan({x})",
    "F.softplus({x})", "{x}.abs().sqrt()", "torch.expm1({x}.tanh())", "F.hardtanh({x})", "F.hardswish({x})", "F.softshrink({x})",
    "F.selu({x})", "torch.special.erf({x})", "torch.sinc({x})", "{x}.frac()", "{x}.round() + {x}", "torch.nan_to_num({x})",
    "{x}.sign() + {x}", "torch.floor({x}) * {x}", "{x} % 1.5", "torch.fmod({x}, 0.7)", "torch.special.i0({x}.tanh())",
    "torch.lgamma({x}.abs() + 1)", "torch.heaviside({x}.detach(), torch.tensor(0.5, dtype=torch.float64)) * {x}", "torch.deg2rad({x})",
    "torch.logit({x}.sigmoid(), eps=1e-3)", "F.celu({x})", "F.rrelu({x}, training=False)", "torch.hypot({x}, {x} + 1)",
    "{x}.xlogy({x}.abs() + 1)", "torch.atan2({x}, {x}.cos())", "-{x}", "1 - {x}", "{x} / 3", "{x}.clone()", "{x}.detach() * {x}",
    "2 ** {x}.tanh()", "F.relu({x})", "F.leaky_relu({x}, 0.1)", "F.threshold({x}, 0.25, 2.0)", "F.mish({x})", "F.logsigmoid({x})",
)  # fmt: skip
_BINARY = (
    "{x} + {y}", "{x} * {y}", "{x} - {y}", "torch.minimum({x}, torch.as_tensor({y}))", "torch.maximum({x}, torch.as_tensor({y}))",
    "torch.where({x} > {y}, {x}, {y})", "{x}.clamp(min={y})", "{x}.clamp(max={y})", "{x} / (1 + torch.as_tensor({y}).abs())",
    "torch.fmax({x}, torch.as_tensor({y}))", "torch.add({x}, {y}, alpha=0.3)", "torch.rsub({x}, {y})",
    "torch.addcdiv({x}, {x}, torch.as_tensor({y}).abs() + 1, value=0.7)", "torch.lerp({x}, {x}.cos(), torch.as_tensor({y}))",
    "torch.dist({x}, torch.as_tensor({y})) + {x}",
)  # fmt: skip
_MASKED = (
    "torch.where({mask}, {x}, {y})", "torch.where({mask}, {x}, 0.0)", "{x}.masked_fill({mask}, 1.5)", "{x} * {mask}",
    "{x}.masked_scatter({mask}, {x} * 2)",
)  # fmt: skip
# Through another dtype and back.
_CASTS = (
    "({x}.float() * 1.5).double()", "({x} > 0).double() * {x}", "({x} * 3).int().double() + {x}", "{x}.float().softmax(0).double()",
    "({x}.float() @ {x}.float().transpose(-1, -2)).double()", "({x} > 0).long().cumsum(0) * {x}",
    "{x}.to(torch.float32).mean(-1, keepdim=True) + {x}", "(({x} * 4).long() % 3 == 1) * {x}",
    "({x} > 0).logical_xor({x} < 1).double() * {x}", "(({x} * 4).int() & 3).double() + {x}", "torch.where({x} > 0, {x}.float(), {x})",
    "torch.where(({x} * 5).long() > 1, 1, 0) * {x}", "(({x} * 8).long() // 3).double() + {x}",
    "({x} * 8).to(torch.int8).sum(-1).double()", "(({x} * 8).long() << 1).double() * 0.1 + {x}", "{x} + torch.arange({n})",
    "{x} * torch.linspace(0, 1, {n})", "{x} ** torch.arange({n})",
)  # fmt: skip
# With a tensor that forward makes of literals.
_MADE = (
    "{x}[..., None] * torch.meshgrid(torch.arange({n}), torch.arange(3), indexing='ij')[1]", "{x} * torch.eye({n}, dtype=torch.float64)[0]",
    "{x} * torch.tril(torch.ones({n}, {n}, dtype=torch.float64)).sum(0)", "{x} + torch.full(({n},), 0.5, dtype=torch.float64).cumsum(0)",
    "torch.block_diag({x}.reshape(-1, {n})[:2], {x}.reshape(-1, {n})[:1])", "torch.cartesian_prod({x}.flatten()[:3], {x}.flatten()[:2])",
    "torch.tril_indices({n}, {n})[0].double().sum() * {x}", "{x} * {x}.new_ones({n})", "{x} + torch.zeros_like({x}).fill_(0.5)",
)  # fmt: skip
# Of every element of one with those of another. `torch.combinations` is refused, with what to write instead.
_OUTER = (
    "{x}.unsqueeze({dim}) * {y}", "{x}[..., None] + {y}[:]",
    "torch.cdist({x}.reshape(-1, {n}), {x}.reshape(-1, {n}) + 1)", "torch.outer({x}.flatten()[:6], {y}.flatten()[:5])",
    "torch.kron({x}.flatten()[:4], {y}.flatten()[:3])", "torch.vander({x}.flatten()[:4].tanh(), 3)",
)  # fmt: skip


def unary(at: Builder) -> None:
    at.keep(at.form(_UNARY, x=at.tensor()))


def binary(at: Builder) -> None:
    x = at.tensor()
    at.keep(at.form(_BINARY, x=x, y=at.broadcast(at.shape(x))))


def masked(at: Builder) -> None:
    x = at.tensor()
    at.keep(at.form(_MASKED, x=x, y=lambda: at.broadcast(at.shape(x)), mask=lambda: at.mask(at.shape(x))))


def outer(at: Builder) -> None:
    x = at.tensor(lambda shape: 1 <= len(shape) <= 3)
    shape = at.shape(x)
    dim = at.number(0, len(shape))

    def other() -> str:
        return at.parameter(at.one_of(SIZES), *[1] * (len(shape) - dim)) if at.chance() else at.tensor(lambda shape: 1 <= len(shape) <= 2)

    at.keep(at.form(_OUTER, x=x, y=other, dim=dim, n=shape[-1]))


def cast(at: Builder) -> None:
    x = at.tensor(lambda shape: len(shape) > 0)
    at.tolerance = 1e-4  # what is computed in float32 is summed in another order
    at.keep(at.form(_CASTS, x=x, n=at.shape(x)[-1]))


def made_of_literals(at: Builder) -> None:
    x = at.tensor(lambda shape: len(shape) > 0)
    at.keep(at.form(_MADE, x=x, n=at.shape(x)[-1]))


def float_input(at: Builder) -> None:
    """One more input, by itself or scaled by a parameter."""
    shape = (at.batch, *(at.one_of((1, 2, 3, 4, 5)) for _ in range(at.number(0, 3))))
    name = at.input(shape)
    if name not in at.kept:
        at.kept.append(name)
    if at.chance():
        at.keep(f"{name} * {at.parameter(*shape[1:])}")


SMOOTH = (unary, binary, float_input)
FAMILIES = (unary, binary, masked, outer, cast, made_of_literals, float_input)
