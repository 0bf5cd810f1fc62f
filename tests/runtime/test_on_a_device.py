"""Steps on ranks whose device is not the host's: all tensors are made there, and the host looks at none of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.runtime.execute import distributed
from autopar.runtime.execute.distributed import DistributedTransport
from tests.support.played_device import CopiesToDevice, played_mesh


class Reader(nn.Module):
    """Makes tensors of every kind: positions, a mask, a constant, draws, and the labels of a rank's part of the symbols."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.positions = nn.Embedding(32, 16), nn.Embedding(8, 16)
        self.mlp_in, self.mlp_out, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 32)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.symbols(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = x * torch.tensor([0.5, 2.0] * 8, device=tokens.device)
        x = x + F.dropout(self.mlp_out(F.gelu(self.mlp_in(x))), 0.1, self.training)
        before = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)[:, 0]
        return F.cross_entropy(self.head(before).flatten(0, 1), labels.flatten())


def batch() -> dict[str, Tensor]:
    return {name: torch.zeros(4, 8, dtype=torch.int64, device="meta") for name in ("tokens", "labels")}


def compiled(mesh: Any, **options: Any) -> autopar.ParallelModule:
    options = {"backend": "eager", "cluster": "8xH100", **options}
    return autopar.compile(Reader(), mesh, example_inputs=batch(), **options)


def test_a_plain_step(monkeypatch: pytest.MonkeyPatch) -> None:
    # In this order a group's ranks do not stand in that of its axes.
    with played_mesh(monkeypatch, tp=2, dp=2) as mesh:
        parallel = compiled(mesh)
        optimizer, found = torch.optim.AdamW(parallel.parameters()), list[list[str]]()
        for _ in range(2):
            with CopiesToDevice() as copies:
                loss = parallel(**batch())
                loss.backward()
                assert loss.device.type == parallel.clip_grad_norm_(1.0).device.type == "meta"
            assert all(each.grad is not None and each.grad.device.type == "meta" for each in parallel.parameters())
            optimizer.step()
            optimizer.zero_grad()
            found.append(copies.found)
    assert found[0] and not found[1], "constants are brought once"


@pytest.mark.parametrize(
    ("step", "options"),
    [
        (autopar.TrainStep(), {"zero": 3}),
        (autopar.TrainStep(clip_grad_norm=1.0, ema=0.9), {"num_microbatches": 2, "precision": "bf16"}),
    ],
    ids=["zero=3", "clipped, averaged, in bfloat16"],
)
def test_a_step_with_its_update(step: autopar.TrainStep, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with played_mesh(monkeypatch, dp=2, tp=2) as mesh:
        parallel = compiled(mesh, train_step=step, optimizer=(torch.optim.AdamW, {"foreach": True}), **options)
        for _ in range(2):
            assert parallel.train_step(**batch()).device.type == "meta"


def test_an_optimizer_that_asks_for_the_loss_is_made_at_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with played_mesh(monkeypatch, dp=2) as mesh:
        parallel = autopar.compile(Reader(), mesh, backend="eager", cluster="8xH100", optimizer=torch.optim.LBFGS)
        with pytest.raises(autopar.AutoparError, match="LBFGS joins all parameters into one vector"):
            parallel.train_step(**batch())


class Scaled(Reader):
    """With a buffer, and two names for it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((16,), 2.0))
        self.mlp_in.register_buffer("scale", self.scale, persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return super().forward(tokens, labels) * (self.scale * self.mlp_in.scale).mean()


def test_a_model_that_was_built_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its buffers come to the device as its parameters do, those that share memory as one."""
    with played_mesh(monkeypatch, dp=2, tp=2) as mesh:
        model = Scaled()
        parallel = autopar.compile(model, mesh, example_inputs=batch(), backend="eager", cluster="8xH100")
        assert {name: each.device.type for name, each in parallel.named_buffers()} == {"scale": "meta"}
        assert parallel.get_submodule("mlp_in").scale is parallel.scale
        assert parallel(**batch()).device.type == "meta"


def test_a_look_at_a_value_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this device is for."""
    wait = DistributedTransport.wait

    def looking(self: DistributedTransport, handle: distributed.Launched) -> tuple[Tensor, ...]:
        found = wait(self, handle)
        found[0].flatten()[0].item()
        return found

    monkeypatch.setattr(DistributedTransport, "wait", looking)
    with played_mesh(monkeypatch, dp=2) as mesh:
        parallel = compiled(mesh)
        with pytest.raises(RuntimeError, match="item"):
            parallel(**batch()).backward()
