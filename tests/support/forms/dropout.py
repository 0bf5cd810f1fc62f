"""Ways in which people add what they drop out, one small module each, and the near misses.

Every form adds dropout of `x` to `residual`, both [2, 5, 8], unless it says other shapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.forms.suite import Catalogue, Shape

B, S, N = 2, 5, 8
P = 0.25


DROPOUTS = Catalogue()


def form(name: str, *finds: str, reason: str = "", **shapes: Shape) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the function as a form, with what is said of each dropout of it, or, with a reason, as a near miss."""
    says = (f"{re.escape(reason)}$",) if reason else finds or ("p = 0.25",)
    return DROPOUTS.adds(name, {"x": (B, S, N), "residual": (B, S, N)} | shapes, says, bool(reason))


@form("residual first")
def _(m: Any) -> Tensor:
    return m.residual + F.dropout(m.x, P)


@form("residual last")
def _(m: Any) -> Tensor:
    return F.dropout(m.x, P) + m.residual


@form("half of it", "p = 0.5")
def _(m: Any) -> Tensor:
    return torch.add(F.dropout(m.x, 0.5), m.residual)


@form("dropped in place", "p = 0.25; in place")
def _(m: Any) -> Tensor:
    return m.residual + F.dropout(m.x * 2, P, inplace=True)


@form("added in place", "p = 0.25; in place")
def _(m: Any) -> Tensor:
    hidden = m.residual * 2
    hidden += F.dropout(m.x, P)
    return hidden


@form("added in place to what is dropped", "p = 0.25; in place")
def _(m: Any) -> Tensor:
    hidden = F.dropout(m.x, P)
    hidden += m.residual
    return hidden * 2


@form("tokens in rows", "through a view", x=(B * S, N))
def _(m: Any) -> Tensor:
    return m.residual + F.dropout(m.x, P).view(B, S, N)


@form("heads merged", "through a view", x=(B, S, 2, N // 2))
def _(m: Any) -> Tensor:
    return F.dropout(m.x, P).flatten(-2) + m.residual


@form("one more dim", "through a view", residual=(B, 1, S, N))
def _(m: Any) -> Tensor:
    return F.dropout(m.x, P).unsqueeze(1) + m.residual


@form("wider afterwards", "p = 0.25; through a cast")
def _(m: Any) -> Tensor:
    return F.dropout(m.x.bfloat16(), P).float() + m.residual.float()


@form("a wider residual")
def _(m: Any) -> Tensor:
    return F.dropout(m.x.bfloat16(), P) + m.residual.double()


@form("a narrower residual")
def _(m: Any) -> Tensor:
    return F.dropout(m.x.double(), P) + m.residual.bfloat16()


@form("wider between", "through a cast")
def _(m: Any) -> Tensor:
    return F.dropout(m.x.bfloat16(), P).float() + m.residual.bfloat16()


@form("narrower afterwards", "through a cast")
def _(m: Any) -> Tensor:
    return F.dropout(m.x.float(), P).to(m.residual.dtype) + m.residual


@form("view and cast", "through a view; through a cast", x=(B * S, N))
def _(m: Any) -> Tensor:
    return m.residual + F.dropout(m.x.double(), P).reshape(B, S, N).type_as(m.residual)


@form("with its mask, unread")
def _(m: Any) -> Tensor:
    return torch.native_dropout(m.x, P, True)[0] + m.residual


@form("both dropped")
def _(m: Any) -> Tensor:
    return F.dropout(m.residual, 0.5) + F.dropout(m.x, P)


@form("its own residual")
def _(m: Any) -> Tensor:
    return m.x + F.dropout(m.x, P)


@form("a row", x=(N,), residual=(N,))
def _(m: Any) -> Tensor:
    return m.residual + F.dropout(m.x, P)


@form("dims of one element", x=(1, S, 1, N), residual=(1, S, 1, N))
def _(m: Any) -> Tensor:
    return m.residual + F.dropout(m.x, P)


@form("transposed", x=(S, B, N))
def _(m: Any) -> Tensor:
    return m.residual + F.dropout(m.x.transpose(0, 1), P)


@form("a transposed residual", residual=(N, S, B))
def _(m: Any) -> Tensor:
    return m.residual.permute(2, 1, 0) + F.dropout(m.x, P)


@form("one after another", "p = 0.25", "p = 0.5", "p = 0.25")
def _(m: Any) -> Tensor:
    first = m.residual + F.dropout(m.x, P)
    second = first + F.dropout(first.tanh(), 0.5)
    return second + F.dropout(second.tanh(), P)


@form("in the shape of the residual", "through a view", x=(B * S, N))
def _(m: Any) -> Tensor:
    return m.residual + F.dropout(m.x, P).view_as(m.residual)


@form("reshaped as the residual", "through a view", x=(B, S, 2, N // 2))
def _(m: Any) -> Tensor:
    return F.dropout(m.x, P).reshape_as(m.residual) + m.residual


@form("by another name of its own", "through a view")
def _(m: Any) -> Tensor:
    return m.residual + torch.ops.aten.alias.default(F.dropout(m.x, P))


@form("dropped and read", reason="the dropped value is read elsewhere, too")
def _(m: Any) -> Tensor:
    dropped = F.dropout(m.x, P)
    return m.residual + dropped + dropped.tanh()


@form("dropped, viewed and read", reason="the dropped value is read elsewhere, too", x=(B * S, N))
def _(m: Any) -> tuple[Tensor, Tensor]:
    dropped = F.dropout(m.x, P)
    return m.residual + dropped.view(B, S, N), dropped


@form("twice itself", reason="the dropped value is read elsewhere, too")
def _(m: Any) -> Tensor:
    dropped = F.dropout(m.x, P)
    return dropped + dropped


@form("a residual for every channel", reason="one is broadcast: the residual is [8], what is dropped [2, 5, 8]", residual=(N,))
def _(m: Any) -> Tensor:
    return m.residual + F.dropout(m.x, P)


@form("dropped and broadcast", reason="one is broadcast: the residual is [2, 5, 8], what is dropped [5, 8]", x=(S, N))
def _(m: Any) -> Tensor:
    return m.residual + F.dropout(m.x, P)


@form("a share of it", reason="the sum has a factor, alpha=0.5")
def _(m: Any) -> Tensor:
    return torch.add(m.residual, F.dropout(m.x, P), alpha=0.5)


@form("channels", reason="it drops whole channels: its mask is [2, 5, 1]")
def _(m: Any) -> Tensor:
    return m.residual + F.dropout1d(m.x, P)


@form("columns of one element", reason="its last dim has one element: [2, 5, 1]", x=(B, S, 1), residual=(B, S, 1))
def _(m: Any) -> Tensor:
    return m.residual + F.dropout(m.x, P)


@form("all of it", reason="it drops everything, p = 1")
def _(m: Any) -> Tensor:
    return m.residual + F.dropout(m.x, 1.0)


@form("its mask, read", reason="its mask is read elsewhere, too")
def _(m: Any) -> Tensor:
    dropped, mask = torch.native_dropout(m.x, P, True)
    return (dropped + m.residual) * mask


@form("dropped in place and read", reason="it is dropped in place, in a value that is read elsewhere, too")
def _(m: Any) -> Tensor:
    hidden = m.x * 2
    row = hidden[0]
    return (m.residual + F.dropout(hidden, P, inplace=True)) * row.sum()


@form("dropped in place, seen in another value", reason="it is dropped in place, in a value that is read elsewhere, too", more=(3, S, N))
def _(m: Any) -> Tensor:
    hidden = m.more * 2
    return m.residual + F.dropout(hidden[:B], P, inplace=True) + hidden.sum()


@form("added in place and read", reason="it is added in place, to a value that is read elsewhere, too")
def _(m: Any) -> Tensor:
    hidden = m.residual * 2
    row = hidden[0]
    hidden += F.dropout(m.x, P)
    return row.sum() * hidden


@form("overwritten before it is added", reason="aten.mul_.Tensor writes into an operand in place, in front of the sum")
def _(m: Any) -> Tensor:
    hidden = m.x.tanh()
    dropped = F.dropout(hidden, P)
    hidden *= 2
    return (m.residual + dropped) * hidden


@form("in the shape of the residual, and read", reason="the dropped value is read elsewhere, too", x=(B * S, N))
def _(m: Any) -> tuple[Tensor, Tensor]:
    dropped = F.dropout(m.x, P).view_as(m.residual)
    return m.residual + dropped, dropped.exp()


@form("by another name, and overwritten", reason="aten.mul_.Tensor writes into an operand in place, in front of the sum")
def _(m: Any) -> Tensor:
    dropped = F.dropout(m.x, P)
    torch.ops.aten.alias.default(m.residual).mul_(2.0)
    return m.residual + dropped
