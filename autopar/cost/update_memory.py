"""What an optimizer takes within a step, beside parameters, gradients and its state."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from autopar.cost.memories import Memories
from autopar.cost.memory import OptimizerKind

_ROWS, _COLUMNS = 64, 32


def update_bytes(kind: OptimizerKind, sizes: Sequence[float], device: str = "cpu") -> float:
    """The most that an update takes of parameters of which a rank holds `sizes` bytes: so much of the largest where the optimizer takes
    them one by one, as on a CPU, or of all where it takes them together, as on a GPU; of the device, nothing where the host updates. Found
    by steps over small parameters."""
    if kind.away is not None:
        return 0.0
    of_largest, of_all = _copies(kind, device)
    return of_largest * max(sizes, default=0.0) + of_all * sum(sizes)


def gathered_update_bytes(kind: OptimizerKind, whole: float, parts: float, device: str = "cpu", over_gloo: bool = False) -> float:
    """The most that an update takes that gathers a parameter and its gradient, of `whole` bytes each: the `parts` that all ranks send of
    one are there while it is put together, and the other then. Gloo copies the parts for itself while it gathers them."""
    gathering = 2 * parts if over_gloo else parts
    return whole + max(gathering, parts + whole, whole + update_bytes(kind, [whole], device))


@cache
def _copies(kind: OptimizerKind, device: str) -> tuple[float, float]:
    two, four = _within(kind, device, 2), _within(kind, device, 4)
    of_all = (four - two) / 2
    return two - 2 * of_all, of_all


def _within(kind: OptimizerKind, device: str, number: int) -> float:
    parameters = [torch.zeros(_ROWS, _COLUMNS) for _ in range(number)]
    for each in parameters:
        each.grad = torch.ones(_ROWS, _COLUMNS)
    optimizer = _made(kind, list(parameters), device)
    if optimizer is None:
        return float(number)  # of an optimizer that cannot be tried: a copy of each
    optimizer.step()  # makes its state
    with Memories() as memories, torch.no_grad():
        optimizer.step()
    return memories.peak_bytes / (_ROWS * _COLUMNS * 4)


def _made(kind: OptimizerKind, parameters: list[torch.Tensor], device: str) -> torch.optim.Optimizer | None:
    if kind.make is not None:
        return kind.make(parameters)
    name = "sgd" if kind.name == "momentum" else kind.name
    found = next((each for each in vars(torch.optim).values() if getattr(each, "__name__", "").lower() == name), None)
    if found is None:
        return None
    options = {"momentum": 0.9} if kind.name == "momentum" else {}
    return found(parameters, foreach=device != "cpu", lr=1e-3, **options)
