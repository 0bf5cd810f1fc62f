"""What the program that drives a device takes of a step beside the ops, on the thread that starts them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Host:
    """Nothing where nothing is said: a device that computes beside its host hides what the host takes.

    instruction_seconds  reading one instruction of a schedule
    launch_seconds       starting a collective or one buffer of a transfer and taking what it brought, waiting apart
    parameter_seconds    handing a parameter to a step, and its gradient to the caller
    update_seconds       what one more tensor costs an optimizer, whatever its size
    update_bandwidth     bytes a second that an optimizer reads and writes; 0 where they are as quick as an op's
    """

    instruction_seconds: float = 0.0
    launch_seconds: float = 0.0
    parameter_seconds: float = 0.0
    update_seconds: float = 0.0
    update_bandwidth: float = 0.0
    source: str = field(default="", repr=False)
