"""Ways in which people write rotary embeddings, one small module each, and the near misses.

Every form turns heads [2, 4, 5, 8] by angles [1, 5, 8] of the positions, unless it says other shapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.support.forms.suite import Catalogue, Form, Shape

B, H, S, D, R = 2, 4, 5, 8, 4


ROTATIONS = Catalogue()


def form(
    name: str, finds: str = "", *, angles: Shape = (1, S, D), reason: str = "", **shapes: Shape
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the function as a form, or, with a reason, as a near miss."""
    says, tables = re.escape(reason or finds), {"angles": drawn(angles)}
    return ROTATIONS.adds(name, {"x": (B, H, S, D)} | shapes, (says,), bool(reason), tables=tables, derive=of_angles)


def turning(compute: Callable[..., Any], shapes: dict[str, Shape]) -> Form:
    """One more, by angles [1, 5, 8], that is not in the table."""
    return Form("", compute, shapes, tables={"angles": drawn((1, S, D))}, derive=of_angles)


def drawn(shape: Shape) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def of_angles(m: Any) -> None:
    m.cos, m.sin = m.angles.cos(), m.angles.sin()


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rotate_pairs(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


HALVES, PAIRS = f"halves of {D} elements", f"pairs of {D} elements"


@form("halves, angles for all heads", f"{HALVES}; heads before positions")
def _(m: Any) -> Tensor:
    cos, sin = m.cos.unsqueeze(1), m.sin.unsqueeze(1)
    return (m.x * cos) + (rotate_half(m.x) * sin)


@form("positions before heads", f"{HALVES}; positions before heads", x=(B, S, H, D))
def _(m: Any) -> Tensor:
    cos, sin = m.cos.unsqueeze(2), m.sin.unsqueeze(2)
    return rotate_half(m.x) * sin + m.x * cos


@form("transposed after a projection", f"{HALVES}; heads before positions", x=(B, S, H * D))
def _(m: Any) -> Tensor:
    x = m.x.view(B, S, H, D).transpose(1, 2)
    return (x * m.cos[:, None] + rotate_half(x) * m.sin[:, None]).transpose(1, 2).reshape(B, S, H * D)


@form("chunks", HALVES)
def _(m: Any) -> Tensor:
    first, second = m.x.chunk(2, -1)
    return m.x * m.cos + torch.cat((-second, first), -1) * m.sin


@form("halves by a view", HALVES)
def _(m: Any) -> Tensor:
    first, second = m.x.reshape(B, H, S, 2, D // 2).unbind(-2)
    return m.x * m.cos + torch.cat([-second, first], dim=-1) * m.sin


@form("halves rolled", HALVES)
def _(m: Any) -> Tensor:
    first, second = m.x.roll(D // 2, -1).chunk(2, -1)
    return m.x * m.cos - torch.cat((first, second.neg()), -1) * m.sin


@form("halves written out", HALVES, angles=(1, S, D // 2))
def _(m: Any) -> Tensor:
    first, second = torch.chunk(m.x, 2, dim=-1)
    return torch.cat((first * m.cos - second * m.sin, second * m.cos + first * m.sin), dim=-1)


@form("positions of each sequence", HALVES, angles=(B, 1, S, D))
def _(m: Any) -> Tensor:
    return m.x * m.cos + rotate_half(m.x) * m.sin


@form("angles of one row a position", HALVES, angles=(S, D))
def _(m: Any) -> Tensor:
    return m.x * m.cos + rotate_half(m.x) * m.sin


@form("part of a head", f"halves of {R} elements of {D}", angles=(1, S, R))
def _(m: Any) -> Tensor:
    turning, passed = m.x[..., :R], m.x[..., R:]
    turned = turning * m.cos + rotate_half(turning) * m.sin
    return torch.cat((turned, passed), dim=-1)


@form("pairs", PAIRS)
def _(m: Any) -> Tensor:
    return m.x * m.cos + rotate_pairs(m.x) * m.sin


@form(
    "part of a head by pairs, positions first",
    f"pairs of {R} elements of {D}; positions before heads",
    angles=(B, S, R // 2),
    x=(B, S, H, D),
)
def _(m: Any) -> Tensor:
    cos, sin = (torch.repeat_interleave(each[:, :, None, :], 2, 3) for each in (m.cos, m.sin))
    turning, passed = m.x[:, :, :, :R], m.x[:, :, :, R:]
    return torch.cat([turning * cos + rotate_pairs(turning) * sin, passed], -1).permute(0, 2, 1, 3)


@form("pairs written out", PAIRS, angles=(S, 1, D // 2), x=(B, S, H, D))
def _(m: Any) -> Tensor:
    pairs = m.x.reshape(B, S, H, -1, 2)
    turned = (pairs[..., 0] * m.cos - pairs[..., 1] * m.sin, pairs[..., 1] * m.cos + pairs[..., 0] * m.sin)
    return torch.stack(turned, -1).flatten(3)


@form("pairs times angles of pairs", PAIRS, angles=(S, 1, D // 2, 1), x=(B, S, H, D))
def _(m: Any) -> Tensor:
    pairs = m.x.view(B, S, H, D // 2, 2)
    first, second = pairs.unbind(-1)
    return (pairs * m.cos + torch.stack((-second, first), -1) * m.sin).view(B, S, H, D)


@form("complex numbers", f"{PAIRS}; positions before heads", angles=(1, S, 1, D // 2), x=(B, S, H, D))
def _(m: Any) -> Tensor:
    angles = torch.polar(torch.ones_like(m.angles).float(), m.angles.float())
    pairs = torch.view_as_complex(m.x.float().reshape(B, S, H, -1, 2))
    return torch.view_as_real(pairs * angles).flatten(3).type_as(m.x)


@form("complex numbers, heads first", PAIRS, angles=(S, D // 2))
def _(m: Any) -> Tensor:
    angles = torch.complex(m.angles.float().cos(), m.angles.float().sin())
    pairs = torch.view_as_complex(m.x.float().view(B, H, S, D // 2, 2))
    return torch.view_as_real(angles * pairs).reshape(B, H, S, D).type_as(m.x)


@form("float32 inside", HALVES)
def _(m: Any) -> Tensor:
    x, cos, sin = m.x.float(), m.cos.float(), m.sin.float()
    return (x * cos + rotate_half(x) * sin).to(m.x.dtype)


@form("by negative angles", f"{HALVES}; by negative angles")
def _(m: Any) -> Tensor:
    half = D // 2
    turned = torch.cat((m.x[..., half:], -m.x[..., :half]), -1)
    return m.x * m.cos + turned * m.sin


@form("a scaled sum is turned", HALVES, y=(B, H, S, D))
def _(m: Any) -> Tensor:
    x = (m.x + m.y) * 0.5
    return x * m.cos + rotate_half(x) * m.sin


@form("without batches", HALVES, x=(H, S, D), angles=(S, D))
def _(m: Any) -> Tensor:
    return m.x * m.cos + rotate_half(m.x) * m.sin


@form("without batches, positions first", f"{HALVES}; positions before heads", x=(S, H, D), angles=(S, 1, D))
def _(m: Any) -> Tensor:
    return m.x * m.cos + rotate_half(m.x) * m.sin


@form("in place", HALVES)
def _(m: Any) -> Tensor:
    turned = rotate_half(m.x) * m.sin
    turned += m.x * m.cos
    return turned


@form("angles that are halves of a longer table", HALVES, angles=(1, S, 3 * D))
def _(m: Any) -> Tensor:
    return m.x * m.cos[..., D : 2 * D] + rotate_half(m.x) * m.sin[..., :D]


@form("a half negated in place", HALVES)
def _(m: Any) -> Tensor:
    first, second = m.x.chunk(2, -1)
    return m.x * m.cos + torch.cat((second.clone().neg_(), first), -1) * m.sin


@form("in the shape of x", PAIRS)
def _(m: Any) -> Tensor:
    first, second = m.x.view(B, H, S, D // 2, 2).unbind(-1)
    return m.x * m.cos + torch.stack((-second, first), -1).view_as(m.x) * m.sin


@form("in the shape of something else", HALVES, y=(B, H, S, 2, D // 2))
def _(m: Any) -> Tensor:
    first, second = m.x.reshape_as(m.y).unbind(-2)
    return m.x * m.cos + torch.cat((-second, first), -1) * m.sin


@form("a dim of one element squeezed", HALVES)
def _(m: Any) -> Tensor:
    return m.x * m.cos + rotate_half(m.x.unsqueeze(-2)).squeeze((-2,)) * m.sin


@form("halves subtracted by name", HALVES, angles=(1, S, D // 2))
def _(m: Any) -> Tensor:
    first, second = torch.chunk(m.x, 2, dim=-1)
    return torch.cat((torch.subtract(first * m.cos, second * m.sin), second * m.cos + first * m.sin), dim=-1)


# Near misses.


@form("two values", reason="what is turned and what is scaled by the cosines are two values", y=(B, H, S, D))
def _(m: Any) -> Tensor:
    return m.x * m.cos + rotate_half(m.y) * m.sin


@form("trained angles", reason="its cosines or sines need gradients", more=(1, S, D))
def _(m: Any) -> Tensor:
    angles = m.angles * m.more
    return m.x * angles.cos() + rotate_half(m.x) * angles.sin()


@form("trained complex angles", reason="its cosines or sines need gradients", more=(S, D // 2))
def _(m: Any) -> Tensor:
    angles = m.angles[0, :, : D // 2] * m.more
    turned = torch.view_as_complex(m.x.reshape(B, H, S, -1, 2)) * torch.complex(angles.cos(), angles.sin())
    return torch.view_as_real(turned).flatten(3)


@form("unequal shapes", reason="unequal shapes, [2, 1, 5] and [1, 1, 5]", angles=(B, 1, S, D))
def _(m: Any) -> Tensor:
    return m.x * m.cos + rotate_half(m.x) * m.sin[:1]


@form("no sign", reason="the signs of its terms make no rotation")
def _(m: Any) -> Tensor:
    return m.x * m.cos + torch.cat((m.x[..., D // 2 :], m.x[..., : D // 2]), -1) * m.sin


@form("the cosine's part is negative", reason="the signs of its terms make no rotation")
def _(m: Any) -> Tensor:
    return rotate_half(m.x) * m.sin - m.x * m.cos


@form("quarters", reason="which makes neither halves nor pairs")
def _(m: Any) -> Tensor:
    turned = torch.cat([torch.cat((-part[..., 2:], part[..., :2]), -1) for part in m.x.chunk(2, -1)], -1)
    return m.x * m.cos + turned * m.sin


@form("five dims", reason="it has 5 dims", x=(B, 2, H, S, D))
def _(m: Any) -> Tensor:
    return m.x * m.cos + rotate_half(m.x) * m.sin


@form("a part is used elsewhere", reason="a part of it is used elsewhere")
def _(m: Any) -> tuple[Tensor, Tensor]:
    turned = rotate_half(m.x)
    return m.x * m.cos + turned * m.sin, turned.exp()


@form("cosines of two tables", reason="its cosines come from several values", angles=(1, S, D // 2))
def _(m: Any) -> Tensor:
    first, second = m.x.chunk(2, -1)
    return torch.cat((first * m.cos - second * m.sin, second * m.angles.tan() + first * m.sin), -1)


@form("angles in another order", reason="neither one for each element nor one for each pair", angles=(S, D // 2))
def _(m: Any) -> Tensor:
    cos, sin = (each.view(S, 2, 1, 2) for each in (m.cos, m.sin))
    x, turned = (each.view(B, H, S, 2, 2, 2) for each in (m.x, rotate_half(m.x)))
    return (x * cos + turned * sin).view(B, H, S, D)


@form("overwritten between", reason="writes into an operand in place")
def _(m: Any) -> Tensor:
    kept, turned = m.x * m.cos, rotate_half(m.x) * m.sin
    m.x.add_(1)
    return kept + turned + m.x


@form("a half of x negated in place", reason="neg_.default writes in place into a value that is read elsewhere, too")
def _(m: Any) -> Tensor:
    first, second = m.x[..., : D // 2], m.x[..., D // 2 :]
    return torch.cat((second.neg_(), first), -1) * m.sin + m.x * m.cos


@form("overwritten between, in another shape", reason="writes into an operand in place")
def _(m: Any) -> Tensor:
    kept, turned = m.x * m.cos, rotate_half(m.x) * m.sin
    m.x.flatten().view_as(m.x).add_(1)
    return kept + turned + m.x


@form("overwritten between, squeezed", reason="writes into an operand in place")
def _(m: Any) -> Tensor:
    kept, turned = m.x * m.cos, rotate_half(m.x.unsqueeze(-2)).squeeze((-2,)) * m.sin
    m.x.unsqueeze(-2).squeeze((-2,)).add_(1)
    return kept + turned + m.x


@form("halves subtracted by name, both", reason="the signs of its terms make no rotation", angles=(1, S, D // 2))
def _(m: Any) -> Tensor:
    first, second = torch.chunk(m.x, 2, dim=-1)
    return torch.cat((torch.subtract(first * m.cos, second * m.sin), torch.subtract(second * m.cos, first * m.sin)), dim=-1)
