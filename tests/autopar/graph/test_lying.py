"""Tensors of a model that lie otherwise than row by row: what views, copies and addresses of them give is what it is in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar

Held = Callable[[Tensor, Tensor], Tensor]


class Holder(nn.Module):
    def __init__(self, held: Tensor, combine: Held, trains: bool) -> None:
        super().__init__()
        self.linear, self.combine = nn.Linear(8, 8), combine
        if trains:
            self.held = nn.Parameter(held)
        else:
            self.register_buffer("held", held)

    def forward(self, x: Tensor) -> Tensor:
        return self.combine(self.held, self.linear(x)).square().mean()


def transposed() -> Tensor:
    return torch.randn(8, 4).t()


def channels_last() -> Tensor:
    return torch.randn(2, 4, 2, 2).contiguous(memory_format=torch.channels_last)


READ: dict[str, tuple[Callable[[], Tensor], Held]] = {
    "view": (transposed, lambda held, h: held.t().view(-1)[:8] * h),
    "view as": (transposed, lambda held, h: held.t().view_as(h.new_zeros(4, 8)) * h),
    "copy that was none": (transposed, lambda held, h: held.t().contiguous().view(-1)[:8] * h),
    "view behind an op": (transposed, lambda held, h: torch.zeros_like(held * 2).t().view(-1)[:8] + (held * 2).t().view(4, 8) * h),
    "neighbours": (transposed, lambda held, h: h * torch.view_as_real(torch.view_as_complex(held.t().unflatten(1, (2, 2))).sum(1)).sum(1)),
    "addresses": (transposed, lambda held, h: held.as_strided((4, 8), (8, 1)) * h),
    "addresses behind an offset": (transposed, lambda held, h: torch.as_strided(held, (2, 4), (4, 1), 8).flatten() * h),
    "addresses of a part": (transposed, lambda held, h: held.t()[2:].as_strided((8,), (2,)) * h),
    "channels last": (channels_last, lambda held, h: held.permute(0, 2, 3, 1).view(8, 4).view(4, 8) * h),
    "addresses of channels last": (channels_last, lambda held, h: held.as_strided((4, 8), (8, 1)) * h),
    "expanded": (lambda: torch.randn(1, 8).expand(4, 8), lambda held, h: held.view(4, 2, 4).reshape(4, 8) * h),
}


def written(held: Tensor, h: Tensor, view: Tensor) -> Tensor:
    view.add_(1)
    return h * view.reshape(4, 8) + held


WRITTEN: dict[str, Held] = {
    "contiguous": lambda held, h: written(held, h, held.contiguous()),
    "reshape": lambda held, h: written(held, h, held.reshape(-1)),
    "flatten": lambda held, h: written(held, h, held.flatten()),
    "copy that was none": lambda held, h: written(held, h, held.t().contiguous()),
    "copy": lambda held, h: written(held, h, held.t().clone().view(-1)),
    "to": lambda held, h: written(held, h, held.to(memory_format=torch.contiguous_format)),
}

LOST: dict[str, Held] = {
    "view": lambda held, h: written(held, h, held.t().view(-1)),
    "reshape": lambda held, h: written(held, h, held.t().reshape(-1)),
    "addresses": lambda held, h: written(held, h, held.as_strided((4, 8), (8, 1))),
    "of a value": lambda held, h: written(twice := held * 2, h, twice.t().view(-1)),
}


def check(model: nn.Module, axes: dict[str, int], backend: str = "eager") -> None:
    x, plain = torch.randn(4, 8), copy.deepcopy(model)
    parallel = autopar.compile(model, autopar.virtual_mesh(**axes), backend=backend)
    loss, expected = parallel(x), plain(x)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-6)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    for mine, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("trains", [False, True], ids=["buffer", "parameter"])
def test_what_is_read_is_that_of_plain_torch(name: str, trains: bool) -> None:
    torch.manual_seed(0)
    held, combine = READ[name]
    model = Holder(held(), combine, trains)
    check(model, {"dp": 2} if trains else {"tp": 2})


@pytest.mark.parametrize("name", ["view", "addresses"])
def test_so_it_is_where_it_is_compiled(name: str) -> None:
    torch.manual_seed(0)
    held, combine = READ[name]
    check(Holder(held(), combine, trains=True), {"dp": 2}, "inductor")


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_into_a_copy_is_not_seen_elsewhere(name: str) -> None:
    torch.manual_seed(0)
    check(Holder(transposed(), WRITTEN[name], trains=False), {"dp": 2})


@pytest.mark.parametrize("name", LOST)
def test_what_would_be_lost_is_refused(name: str) -> None:
    model = Holder(transposed(), LOST[name], trains=False)
    with pytest.raises(autopar.CaptureError, match="lies otherwise than row by row"):
        autopar.compile(model, autopar.virtual_mesh(dp=2), example_inputs={"x": torch.randn(4, 8)}, backend="eager")


def test_memory_that_is_shown_in_part_has_no_addresses() -> None:
    model = Holder(torch.randn(4, 16)[:, :8], lambda held, h: held.as_strided((4, 8), (8, 1)) * h, trains=False)
    with pytest.raises(autopar.CaptureError, match=r"strides \(16, 1\), which shows it in part"):
        autopar.compile(model, autopar.virtual_mesh(dp=2), example_inputs={"x": torch.randn(4, 8)}, backend="eager")
