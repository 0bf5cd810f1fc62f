"""What a prediction says, and how it prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.ir.units import in_bytes, in_seconds


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one rank at a place along `pp`, at its peak."""

    parameters: float
    gradients: float
    optimizer_state: float
    activations: float
    # What is made again and dropped while it runs.
    working: float = 0.0
    # In the host's memory, not on the device.
    host: float = 0.0

    @property
    def total(self) -> float:
        """On the device."""
        return self.parameters + self.gradients + self.optimizer_state + self.activations + self.working

    @property
    def on_device(self) -> dict[str, float]:
        """By kind, and in total."""
        return {name: value for name, value in vars(self).items() if name != "host"} | {"total": self.total}


def kinds_text(held: Mapping[str, float]) -> str:
    """What a device holds, kind by kind."""
    return ", ".join(f"{name.replace('_', ' ')} {in_bytes(value)}" for name, value in held.items() if name != "total" and value)


@dataclass(frozen=True)
class StageSeconds:
    """What a stage takes for one microbatch on the rank at `rank` along pp, sending to the next stage included, and bytes that it keeps for
    the backward. What is recomputed is a part of the input gradient; an undivided `backward` may take less than both gradients."""

    rank: int
    forward: float
    input_gradient: float
    weight_gradient: float
    backward: float
    send: float
    saved_bytes: float


@dataclass(frozen=True)
class Prediction:
    """One step of a plan on a cluster.

    seconds   by part: products, memory (traffic of all other kernels, and their launch), tensor_parallel (collectives in a microbatch),
              launches (what the CPU takes longer than the device), copies (to the host and back, that nothing hides), bubble, gradients
              (their sum over dp that nothing hides), update, nodes (what all wait for the slowest one)
    memory    by place along pp, bytes of a rank
    stages    seconds of a microbatch on each: with the schedule they are all that the clock of the pipeline knows
    flops     of the model's products in a step on all ranks, recomputation left out
    """

    mesh: Mapping[str, int]
    schedule: str
    num_microbatches: int
    seconds: Mapping[str, float]
    memory: tuple[StageMemory, ...]
    capacity_bytes: float
    flops: float
    samples: int
    peak_flops: float
    stages: tuple[StageSeconds, ...] = ()

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def peak_bytes(self) -> float:
        """Of the rank that holds most."""
        return max(each.total for each in self.memory)

    @property
    def host_bytes(self) -> float:
        """Of the rank that has most in the host's memory."""
        return max(each.host for each in self.memory)

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.capacity_bytes

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.step_seconds

    @property
    def mfu(self) -> float:
        """The share of the devices' peak that the model's products take, recomputation left out."""
        ranks = 1
        for size in self.mesh.values():
            ranks *= size
        return self.flops / self.step_seconds / (ranks * self.peak_flops) if self.peak_flops else 0.0

    def to_dict(self) -> dict[str, Any]:
        """As it goes to JSON."""
        return {
            "mesh": dict(self.mesh),
            "schedule": self.schedule,
            "num_microbatches": self.num_microbatches,
            "step_seconds": self.step_seconds,
            "seconds": dict(self.seconds),
            "memory_bytes": [each.on_device for each in self.memory],
            "host_bytes": self.host_bytes,
            "capacity_bytes": self.capacity_bytes,
            "fits": self.fits,
            "mfu": self.mfu,
            "samples_per_second": self.samples_per_second,
            "stages": [dict(vars(each)) for each in self.stages],
        }

    def __str__(self) -> str:
        axes = " × ".join(f"{name}{size}" for name, size in self.mesh.items())
        parts = ", ".join(f"{name} {in_seconds(value)}" for name, value in self.seconds.items() if value > 0)
        most = max(range(len(self.memory)), key=lambda place: self.memory[place].total)
        kinds = kinds_text(self.memory[most].on_device)
        fits = "fits into" if self.fits else "does not fit into"
        return "\n".join(
            [
                f"{axes}, {self.schedule}, {self.num_microbatches} microbatches: {in_seconds(self.step_seconds)} a step",
                f"  time: {parts}",
                f"  memory of stage {most}: {in_bytes(self.memory[most].total)}, {fits} {in_bytes(self.capacity_bytes)}: {kinds}",
            ]
        )
