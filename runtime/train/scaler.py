"""Scaling of the loss, for gradients in float16: agreed by all ranks, for the plain loop and for `train_step`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from autopar.driver.compiled import Compiled
from autopar.driver.train_step import LossScale
from autopar.errors import AutoparError, NonFiniteError
from autopar.runtime.execute.distributed_world import DistributedWorld
from autopar.runtime.execute.world import World, local_of
from autopar.runtime.module.state import total_norm

logger = logging.getLogger("autopar")


@dataclass
class ScaleState:
    """The scale, and how many steps in a row were finite."""

    options: LossScale
    scale: float
    num_finite: int = 0

    @classmethod
    def of(cls, options: LossScale) -> ScaleState:
        return cls(options, options.initial)

    def update(self, is_finite: bool) -> None:
        options = self.options
        self.num_finite = self.num_finite + 1 if is_finite else 0
        if not is_finite:
            self.scale *= options.backoff_factor
            if self.scale < torch.finfo(torch.float32).tiny:
                raise NonFiniteError(
                    f"gradients are infinite or NaN at every loss scale, down to {self.scale:.2g}: it is not the "
                    'scale. TrainStep(non_finite="raise") says where such a value first appears in a loss; check the batch and the weights'
                )
        elif self.num_finite == options.growth_interval:
            self.scale, self.num_finite = self.scale * options.growth_factor, 0


def non_finite(gradients: Mapping[str, torch.Tensor], world: World) -> list[str]:
    """The parameters whose gradients have an infinity or NaN on some rank: the same list on all. Collective."""
    norms = [torch.linalg.vector_norm(local_of(each), torch.inf) for each in gradients.values() if local_of(each).numel()]
    names = [name for name, each in gradients.items() if local_of(each).numel()]
    # Losses and gradients that lie on the host may be on two devices.
    bad = ~torch.stack([each.to(norms[0].device) for each in norms]).isfinite() if norms else torch.zeros(0, dtype=torch.bool)
    if not isinstance(world, DistributedWorld):
        return [name for name, is_bad in zip(names, bad.tolist(), strict=True) if is_bad]
    anywhere = bad.any().view(1).to(world.groups.device, torch.float32)
    everyone = world.groups.along(world.mesh, world.mesh.names)
    with world.groups.naming_all("whether all gradients are finite"):
        dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=everyone.group)
    if not anywhere.item():
        return []
    told = world.gather([name for name, is_bad in zip(names, bad.tolist(), strict=True) if is_bad])
    return sorted(set().union(*told))


def tell_of_scale(compiled: Compiled) -> bool:
    """Say of a call in a plain loop that nobody scales its loss, where precision= needs that; whether it was said."""
    precision = compiled.facts.precision
    if precision is None or not precision.needs_scale:
        return False
    logger.warning(
        "precision= has gradients in float16, which vanish where the loss is not scaled: in a plain loop use parallel.scaler(), "
        "made before the call (torch's GradScaler where nothing is in a pipeline or in microbatches); train_step scales by itself"
    )
    return True


def unscale(gradients: Mapping[str, torch.Tensor], scale: float) -> None:
    for each in gradients.values():
        local_of(each).mul_(1 / scale)


class Scaler:
    """What torch's `GradScaler` does in a plain loop, where it cannot: in a pipeline or with several microbatches gradients are made
    within the call, so that the scale must be known before.

        scaler = parallel.scaler()
        loss = parallel(**batch).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)         where gradients are clipped
        scaler.step(optimizer)             skipped on all ranks where a gradient of some rank, stage or microbatch is not finite
        scaler.update()
    """

    def __init__(self, options: LossScale, parameters: Callable[[], Mapping[str, nn.Parameter]], world: World) -> None:
        self._state, self._parameters, self._world = ScaleState.of(options), parameters, world
        # Since the last update: by optimizer whether what it updates is finite.
        self._found: dict[int, bool] = {}

    def get_scale(self) -> float:
        return self._state.scale

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the scale: its backward hands out gradients that are as much too large."""
        return loss * self._state.scale

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of the optimizer's parameters by the scale, and find out whether they are finite, once. Collective."""
        if id(optimizer) in self._found:
            raise AutoparError("unscale_() twice since the last update(): the gradients of this optimizer are unscaled already")
        mine = {id(each) for group in optimizer.param_groups for each in group["params"]}
        pairs = self._parameters().items()
        gradients = {name: each.grad for name, each in pairs if id(each) in mine and each.grad is not None}
        unscale(gradients, self._state.scale)
        self._found[id(optimizer)] = not non_finite(gradients, self._world)

    def step(self, optimizer: Optimizer) -> None:
        """`optimizer.step()` where all gradients are finite, on all ranks; on none where one is not."""
        if id(optimizer) not in self._found:
            self.unscale_(optimizer)
        if self._found[id(optimizer)]:
            optimizer.step()

    def update(self) -> None:
        """Take the next scale."""
        if not self._found:
            raise AutoparError("update() before step(): nothing is known of this step's gradients yet")
        self._state.update(all(self._found.values()))
        self._found.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self._state.scale, "num_finite": self._state.num_finite}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state.scale, self._state.num_finite = state["scale"], state["num_finite"]


def gradient_factor(gradients: Mapping[str, torch.Tensor], world: World, scale: float, most: float | None) -> torch.Tensor | None:
    """What gradients of a loss times `scale` are multiplied by, so that their norm is at `most` what was asked for. Collective then."""
    if most is None:
        return None if scale == 1.0 else torch.tensor(1 / scale)
    norm = total_norm(gradients, world, 2.0)
    return torch.clamp(most / (norm / scale + 1e-6), max=1.0) / scale
