"""Tensors that forward keeps in plain attributes from call to call are warned of; what it makes once, or nobody reads, is not."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.frontend.capture import capture
from tests.support.models.layer import MESH, X


class Remembering(nn.Module):
    def __init__(self, compute: Callable[[Remembering, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.compute, self.calls = nn.Linear(4, 4), compute, 0
        self.memory, self.made, self.rows = torch.zeros(4), None, list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.compute(self, self.linear(x)).sum()


def averaged(model: Remembering, h: Tensor) -> Tensor:
    h = torch.tanh(h + model.memory)
    model.memory = 0.9 * model.memory + 0.1 * h.detach().mean(0)
    return h


def made_then_read(model: Remembering, h: Tensor) -> Tensor:
    known = h if model.made is None else h + model.made
    model.made = h.detach()
    return known


def listed(model: Remembering, h: Tensor) -> Tensor:
    model.rows.append(h.detach().mean(0))
    model.rows = model.rows[-2:]
    return h + torch.stack(model.rows).mean(0)


@pytest.mark.parametrize(("compute", "name"), [(averaged, "memory"), (made_then_read, "made"), (listed, "rows")])
@pytest.mark.parametrize("is_warm", [False, True])
def test_what_is_read_and_assigned_is_named(
    compute: Callable[[Remembering, Tensor], Tensor], name: str, is_warm: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = Remembering(compute)
    if is_warm:
        model(X)
    held = model.memory, model.made, list(model.rows)
    with caplog.at_level(logging.WARNING, "autopar"):
        capture(nn.Sequential(model), (X,), {}, MESH)
    (text,) = [each for each in caplog.messages if "plain attributes" in each]
    assert f"as they were: 0.{name}; keep" in text and f"self.{name}.copy_(...)" in text
    assert f"calls ({model.calls} → {model.calls + 1})" in caplog.text, "the run that looks is none of forward's"
    assert all(one is other for one, other in zip(held[:2], (model.memory, model.made), strict=True))
    assert list(map(id, held[2])) == list(map(id, model.rows))


def written_alone(model: Remembering, h: Tensor) -> Tensor:
    model.memory, model.made = h.detach(), h.detach().mean()
    model.rows.append(h.detach())
    return h


def made_once(model: Remembering, h: Tensor) -> Tensor:
    if model.made is None or model.made.shape[0] < h.shape[0]:
        model.made = torch.arange(h.shape[0], device=model.memory.device)[:, None].float()
    return h * model.made[: h.shape[0]] + model.memory


def failing_again(model: Remembering, h: Tensor) -> Tensor:
    if model.made is not None:
        raise ZeroDivisionError("a second call")
    model.made = h.detach()
    return h


@pytest.mark.parametrize("compute", [written_alone, made_once, failing_again])
def test_what_is_not_read_or_made_once_is_not_named(
    compute: Callable[[Remembering, Tensor], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "autopar"):
        capture(Remembering(compute), (X,), {}, MESH)
    assert "plain attributes" not in caplog.text
