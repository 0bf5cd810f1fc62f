"""The step of an optimizer that asks for the loss several times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from autopar.driver.train_step import TrainStep
from autopar.errors import AutoparError
from autopar.runtime.train.refusals import the_loss

# What a call gives: its output, its tensors by flat index, and what is to be differentiated of them.
Evaluated = tuple[Any, Mapping[str, torch.Tensor], Sequence[str]]


def step_by_closure(optimizer: Optimizer, asked: TrainStep, evaluate: Callable[[], Evaluated]) -> Any:
    """What the first call of `evaluate` gave as output. Raises `AutoparError` for what cannot be kept then."""
    if asked.accumulate != 1 or asked.agrees_first:
        raise AutoparError(
            f"{type(optimizer).__name__} asks for the loss several times in a step, and {asked} cannot be kept then: leave out "
            "accumulate, clip_grad_norm, loss_scale (which float16 needs) and non_finite, or train by the plain loop with a closure of "
            "your own"
        )
    outputs: list[Any] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        output, tensors, differentiated = evaluate()
        outputs.append(output)
        loss = tensors[the_loss(tuple((name, tensors[name].shape) for name in differentiated))]
        loss.backward()
        for tensor in tensors.values():
            tensor.detach_()
        return loss

    optimizer.step(closure)  # pyright: ignore[reportCallIssue, reportArgumentType]  (torch's own give and take tensors)
    optimizer.zero_grad()
    return outputs[0]
