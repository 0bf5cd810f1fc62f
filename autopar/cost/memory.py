"""What a rank holds: parameters, gradients and optimizer state, and the budget that they and the activations share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from autopar.errors import AutoparError
from autopar.ir.instructions import Memory
from autopar.ir.offload import Offload
from autopar.ir.program import Input
from autopar.ir.units import BYTES, parse_quantity

# Copies of a parameter that an optimizer of torch.optim keeps, and the bytes of its step count, a float32 for each parameter.
_COPIES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2, "nadam": 2, "radam": 2, "adamax": 2, "adagrad": 1, "adadelta": 2, "rmsprop": 1}
_UNCOUNTED = ("sgd", "momentum")
_STEP_BYTES = 4


@dataclass(frozen=True)
class OptimizerKind:
    """How much state an optimizer keeps for a trainable parameter: so many copies of its own dtype, and a step count. Its gradient is of
    that dtype, too, or held in `gradient_dtype`."""

    name: str = "adam"
    num_copies: int = 2
    step_bytes: int = _STEP_BYTES
    # One like it, of the parameters that it is called with: where its class is none of torch.optim.
    make: Callable[[list[torch.Tensor]], torch.optim.Optimizer] | None = field(default=None, compare=False, repr=False)
    gradient_dtype: torch.dtype | None = None
    # Where state lies, if not on the device: parameters are updated on the host then.
    away: Memory | None = None
    # Where parameters lie, if not on the device, which has copies of few of them at a time.
    parameters: Memory | None = None
    # The split parameters that an update on processes gathers, and whose state it keeps whole: those that no DTensor describes, or all.
    gathers: Literal["none", "irregular", "split"] = "none"

    @staticmethod
    def of(optimizer: Any) -> OptimizerKind:
        """From a name ("adamw", "sgd", "momentum", …), a class of torch.optim, or an instance. Raises `AutoparError` for another.

        Of an instance of an unknown class a second one is made, and a step of it looked at.
        """
        kind = optimizer if isinstance(optimizer, type) else type(optimizer)
        name = (optimizer if isinstance(optimizer, str) else kind.__name__).lower()
        if name == "sgd" and any(group.get("momentum") for group in getattr(optimizer, "param_groups", ())):
            name = "momentum"
        if name not in _COPIES and isinstance(optimizer, torch.optim.Optimizer):
            return _tried(optimizer, name)
        if name not in _COPIES:
            raise AutoparError(f"optimizer={optimizer!r} is unknown; use one of {', '.join(sorted(_COPIES))}, or its class of torch.optim")
        return OptimizerKind(name, _COPIES[name], 0 if name in _UNCOUNTED else _STEP_BYTES)

    @staticmethod
    def known(optimizer: Any) -> OptimizerKind:
        """As `of`, and as Adam where that is not known."""
        try:
            return OptimizerKind() if optimizer is None else OptimizerKind.of(optimizer)
        except AutoparError:
            return OptimizerKind()

    def state_bytes(self, item: Input, local_bytes: float) -> float:
        """Bytes of state on the device for `item`, of which a rank holds `local_bytes`."""
        return self._kept_bytes(item, local_bytes) if self.away is None else 0.0

    def away_bytes(self, item: Input, local_bytes: float) -> float:
        """Bytes of state elsewhere than on the device."""
        return 0.0 if self.away is None else self._kept_bytes(item, local_bytes)

    def _kept_bytes(self, item: Input, local_bytes: float) -> float:
        return self.num_copies * local_bytes + self.step_bytes if item.kind == "parameter" and item.requires_grad else 0.0

    def is_gathered(self, item: Input) -> bool:
        """Whether an update on processes sees the parameter whole. Split within a dim, or by several axes, it may be irregular."""
        if item.kind != "parameter" or self.gathers == "none" or self.away is not None or item.sharding is None or not item.sharding.axes:
            return False
        splits, first = iter(item.sharding.splits), True
        for dim in item.dims:
            for place, axes in zip(range(len(dim)), splits, strict=False):
                first = first and len(axes) <= (place == 0)
        return self.gathers == "split" or item.padding is not None or not first

    def gradient_bytes(self, item: Input, local_bytes: float) -> float:
        """Bytes of the gradient of `item`, of which a rank holds `local_bytes`."""
        if item.kind != "parameter" or not item.requires_grad:
            return 0.0
        dtype = self.gradient_dtype if self.gradient_dtype is not None and item.dtype == torch.float32 else item.dtype
        return local_bytes * dtype.itemsize / item.dtype.itemsize

    def held_bytes(self, item: Input, local_bytes: float) -> float:
        """Bytes of an input with all that belongs to it, on the device: a trainable parameter has a gradient and optimizer state."""
        own_bytes = local_bytes if item.kind != "parameter" or self.parameters is None else 0.0
        return own_bytes + self.gradient_bytes(item, local_bytes) + self.state_bytes(item, local_bytes)


def _tried(optimizer: torch.optim.Optimizer, name: str) -> OptimizerKind:
    """What a step over a small matrix allocates; statistics that are smaller than their parameter count as they are here."""
    parameter = torch.nn.Parameter(torch.zeros(8, 4))
    parameter.grad = torch.ones(8, 4)
    try:
        twin = type(optimizer)([parameter], **optimizer.defaults)
        twin.step()
    except Exception as error:  # whatever its class wants
        raise AutoparError(
            f"how much state optimizer={type(optimizer).__name__} holds cannot be tried ({error}): its class must be made of parameters "
            "and its own defaults, and step without a closure; without memory_budget nobody asks"
        ) from error
    tensors = [value for value in twin.state[parameter].values() if isinstance(value, torch.Tensor)]
    copies = [value for value in tensors if value.shape == parameter.shape]
    step_bytes = sum(value.nbytes for value in tensors) - sum(value.nbytes for value in copies)
    return OptimizerKind(name, len(copies), step_bytes, lambda parameters: type(optimizer)(parameters, **optimizer.defaults))


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes that a rank may hold; infinite where nobody set a limit.

    `reserved_bytes` of what was asked for are left out of `capacity_bytes`: what passes that decide do not count, and a step takes.
    Where ranks are processes that speak `over_gloo`, gathers and reduce-scatters take memory besides.
    """

    capacity_bytes: float = float("inf")
    optimizer: OptimizerKind = field(default_factory=OptimizerKind)
    reserved_bytes: float = 0.0
    over_gloo: bool = False

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.capacity_bytes)

    @property
    def asked_bytes(self) -> float:
        """What the user allows."""
        return self.capacity_bytes + self.reserved_bytes

    def reserving(self, num_bytes: float) -> MemoryBudget:
        """The same that was asked for, with so much of it left out."""
        return replace(self, capacity_bytes=self.asked_bytes - num_bytes, reserved_bytes=num_bytes)

    def times(self, number: int) -> MemoryBudget:
        """That of so many ranks together."""
        return replace(self, capacity_bytes=self.capacity_bytes * number, reserved_bytes=self.reserved_bytes * number)

    def holding(self, gradients: torch.dtype) -> MemoryBudget:
        """Where gradients wait for their update in this dtype."""
        return replace(self, optimizer=replace(self.optimizer, gradient_dtype=gradients))

    def with_away(self, offload: Offload | None) -> MemoryBudget:
        """Where the state of the optimizer, or parameters, lie elsewhere than on the device, and the host updates."""
        if offload is None:
            return self
        return replace(self, optimizer=replace(self.optimizer, away=offload.state, parameters=offload.parameters))

    def gathering(self, which: Literal["none", "irregular", "split"]) -> MemoryBudget:
        """Where updates on processes see these parameters whole."""
        return replace(self, optimizer=replace(self.optimizer, gathers=which))

    @staticmethod
    def of(budget: str | float | None, optimizer: Any = None) -> MemoryBudget:
        """From "40GiB", "80 GB" or a number of bytes. Raises `AutoparError` for what is neither."""
        is_asked = optimizer is not None and (budget is not None or isinstance(optimizer, str))
        kind = OptimizerKind.of(optimizer) if is_asked else OptimizerKind.known(optimizer)
        return MemoryBudget(bytes_of(budget) if budget is not None else float("inf"), kind)


def bytes_of(size: str | float, what: str = "memory_budget") -> float:
    """`"40GiB"`, `"80 GB"`, `42949672960` → bytes. Raises `AutoparError` for another text, and for sizes that are not positive."""
    try:
        value = parse_quantity(str(size), BYTES)
    except ValueError as error:
        raise AutoparError(f"{what} {error}") from None
    if value <= 0:
        raise AutoparError(f"{what} must be more than 0, got {size!r}")
    return value
