"""With dropout on, a compiled program is compared with the captured one, on the same draws: wrong fusions show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.passes.forward.fuse_attention import FuseAttention
from autopar.passes.forward.key_captured import key_captured
from autopar.passes.fuse.attention import form
from autopar.runtime.module.parallel_module import ParallelModule
from tests.support.captures import compiled

BATCH, LENGTH, HEADS, SIZE = 4, 8, 2, 4
X = torch.randn(BATCH, LENGTH, HEADS * SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    heads = (each.transpose(1, 2) for each in (query, key, value))
    return F.scaled_dot_product_attention(*heads, dropout_p=0.2, is_causal=True).transpose(1, 2)


def by_heads(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    return (F.dropout((query @ key.transpose(-1, -2) / 2).softmax(-1), 0.2) @ value).transpose(1, 2)


def heads_first(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key, value = (each.permute(2, 0, 1, 3) for each in (query, key, value))
    return (F.dropout((query @ key.transpose(-1, -2) / 2).softmax(-1), 0.2) @ value).permute(1, 2, 0, 3)


def keys_first(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = (torch.einsum("bqhd,bkhd->bkhq", query, key) / 2).softmax(1)
    return torch.einsum("bkhq,bkhd->bqhd", F.dropout(weights, 0.2), value)


def values_dropped_in_between(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """In graph order the values' site comes between the weights' and the op that they become."""
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    weights = F.dropout((query @ key.transpose(-1, -2) / 2).softmax(-1), 0.2)
    return (weights @ F.dropout(value, 0.5)).transpose(1, 2)


FORMS = (sdpa, by_heads, heads_first, keys_first, values_dropped_in_between)


class Attending(nn.Module):
    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 24, dtype=torch.float64), nn.Linear(8, 8, dtype=torch.float64)
        self.norm, self.attend = nn.LayerNorm(8, dtype=torch.float64), attend

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.3)
        heads = (each.unflatten(-1, (HEADS, SIZE)) for each in self.into(self.norm(x)).chunk(3, -1))
        x = x + F.dropout(self.out(self.attend(*heads).flatten(2)), 0.1) + torch.randn_like(x)
        return self.norm(x).sin().square().mean()


def parallel_of(attend: Callable[..., Tensor]) -> ParallelModule:
    torch.manual_seed(0)
    return compiled(Attending(attend), {"dp": 2, "tp": 2}, (X,), kernels="triton")


@pytest.mark.parametrize("attend", FORMS)
def test_fused_ops_draw_what_was_captured(attend: Callable[..., Tensor]) -> None:
    parallel = parallel_of(attend)
    fused = next(step.decision.fused for step in parallel.compiled.steps if step.kind is FuseAttention)
    assert len(fused) == (attend is not sdpa)
    captured = key_captured(parallel.compiled.steps[0].program)
    assert not any("autopar." in str(node.target) for node in captured.graph.nodes), "nothing is fused in what is compared with"
    report = parallel.verify(X, promote=True)
    assert report and report.worst < 1e-12 and "as it was captured" in str(report)


def twice(options: dict[str, Any]) -> dict[str, Any]:
    return options | {"keep_scale": 2 * options["keep_scale"]}


def rarer(options: dict[str, Any]) -> dict[str, Any]:
    return options | {"keep_below": options["keep_below"] - 2**28}


@pytest.mark.parametrize("wrong", [twice, rarer])
def test_a_wrong_fusion_is_found_with_dropout_on(wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    right = form.dropout_options
    monkeypatch.setattr(form, "dropout_options", lambda probability: wrong(right(probability)))
    report = parallel_of(by_heads).verify(X, promote=True)
    assert not report and report.first_difference is not None and report.first_difference.made_by == FuseAttention.name, str(report)


def test_a_wrong_scale_is_found_with_dropout_on(monkeypatch: pytest.MonkeyPatch) -> None:
    right = form.Attention._scaled
    monkeypatch.setattr(
        form.Attention, "_scaled", lambda self, emit, query: emit.call(torch.ops.aten.mul.Tensor, right(self, emit, query), 1.1)
    )
    report = parallel_of(by_heads).verify(X, promote=True)
    assert not report and report.first_difference is not None and report.first_difference.made_by == FuseAttention.name, str(report)


def test_what_is_keyed_already_is_left_as_it_is() -> None:
    parallel = parallel_of(by_heads)
    assert key_captured(parallel.compiled.forward) is parallel.compiled.forward
