"""Training goes on from what people save without `autopar.save`: `torch.save` of state dicts, read by `torch.load(weights_only=True)`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autopar
from tests.support.checkpoints import parallel_on, share
from tests.support.models.trained import batch, small_gpt

AXES = {"dp": 2, "tp": 2}


class Run:
    """A plain loop around a model, as it stands in most scripts."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)

    def go(self, steps: range, real: bool = False) -> None:
        for step in steps:
            self.model(**share(batch(step), AXES) if real else batch(step)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()

    def save(self, file: Path) -> None:
        parts = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
        torch.save({name: each.state_dict() for name, each in parts.items()}, file)

    def load(self, file: Path) -> None:
        state = torch.load(file, weights_only=True)
        for name, each in (("model", self.model), ("optimizer", self.optimizer), ("schedule", self.schedule)):
            each.load_state_dict(state[name])


def parallel(real: bool = False) -> autopar.ParallelModule:
    return parallel_on(AXES, real=real, optimizer=None, train_step=None)


def largest_difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((mine - theirs).abs().max()) for mine, theirs in pairs)


def test_state_dicts_of_virtual_ranks_go_on_here_and_in_plain_torch(tmp_path: Path) -> None:
    straight, first, second, plain = Run(parallel()), Run(parallel()), Run(parallel()), Run(small_gpt(num_blocks=1))
    straight.go(range(4))
    first.go(range(2))
    first.save(tmp_path / "state.pt")
    for other in (second, plain):
        other.load(tmp_path / "state.pt")
        other.go(range(2, 4))
    assert largest_difference(second.model, straight.model) == 0.0
    assert largest_difference(plain.model, straight.model) <= 1e-9
    plain.save(tmp_path / "plain.pt")
    back = Run(parallel())
    back.load(tmp_path / "plain.pt")
    assert largest_difference(back.model, plain.model) == 0.0


def on_ranks(folder: str) -> float:
    """Each rank saves its parts, as DTensors, in a file of its own, and goes on from them."""
    file = Path(folder) / f"rank{dist.get_rank()}.pt"
    straight, first, second = Run(parallel(True)), Run(parallel(True)), Run(parallel(True))
    straight.go(range(3), True)
    first.go(range(2), True)
    first.save(file)
    second.load(file)
    second.go(range(2, 3), True)
    assert isinstance(second.model, autopar.ParallelModule) and isinstance(straight.model, autopar.ParallelModule)
    mine, wanted = second.model.full_state_dict(), straight.model.full_state_dict()
    return max(float((mine[name] - wanted[name]).abs().max()) for name in wanted)


def test_state_dicts_of_processes_go_on(gloo_ranks: Any, tmp_path: Path) -> None:
    assert gloo_ranks.run(on_ranks, str(tmp_path)) == [0.0] * 4
