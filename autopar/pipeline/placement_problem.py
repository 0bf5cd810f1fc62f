"""What the placement of pipeline stages is decided on: units of work in a line, what goes between them, what stages run on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.errors import PlanError


@dataclass(frozen=True)
class Unit:
    """A node (or a few) of the forward graph with its backward: one microbatch, on a device of speed 1."""

    name: str
    forward_seconds: float
    backward_seconds: float
    # Parameters, gradients and optimizer state that no other unit needs; see `Shared`.
    held_bytes: float = 0.0
    # What its forward keeps for the backward, per microbatch.
    saved_bytes: float = 0.0
    # What it needs besides while it runs.
    working_bytes: float = 0.0


class Value(NamedTuple):
    """What unit `producer` makes and later units read: so many bytes per microbatch. Its gradient is as large."""

    producer: int
    readers: tuple[int, ...]
    bytes: float
    has_gradient: bool = True


class Shared(NamedTuple):
    """A parameter that several units read (tied embeddings): every stage with one of them holds all its `bytes`."""

    units: tuple[int, ...]
    bytes: float


@dataclass(frozen=True)
class Line:
    """Units in an order that the forward can run in, the values between them, the parameters they share."""

    units: tuple[Unit, ...]
    values: tuple[Value, ...] = ()
    shared: tuple[Shared, ...] = ()

    def __post_init__(self) -> None:
        last = len(self.units) - 1
        for value in self.values:
            assert value.readers and 0 <= value.producer < min(value.readers) and max(value.readers) <= last, value
        for shared in self.shared:
            assert shared.units and 0 <= min(shared.units) and max(shared.units) <= last, shared


@dataclass(frozen=True)
class Devices:
    """What each stage runs on, and what a send between two stages costs.

    `speeds[s]` is 1.0 where units take as long as they were priced; `capacity_bytes[s]` is infinite where nobody set a limit.
    """

    speeds: tuple[float, ...]
    capacity_bytes: tuple[float, ...]
    seconds_per_byte: float = 0.0
    latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        assert len(self.speeds) == len(self.capacity_bytes) > 0 and min(self.speeds) > 0, self

    @staticmethod
    def equal(
        num_stages: int, capacity_bytes: float = float("inf"), seconds_per_byte: float = 0.0, latency_seconds: float = 0.0
    ) -> Devices:
        """The same device for every stage."""
        return Devices((1.0,) * num_stages, (capacity_bytes,) * num_stages, seconds_per_byte, latency_seconds)

    @property
    def num_stages(self) -> int:
        return len(self.speeds)

    def transfer_seconds(self, value: Value) -> float:
        """Of one value between two stages, and of its gradient back."""
        return (1 + value.has_gradient) * (self.latency_seconds + self.seconds_per_byte * value.bytes)


def check_sizes(line: Line, devices: Devices, live_microbatches: Sequence[int]) -> None:
    """Raise `PlanError` where there are fewer units than stages."""
    assert len(live_microbatches) == devices.num_stages, (len(live_microbatches), devices.num_stages)
    count = len(line.units)
    if count < devices.num_stages:
        units, stages = ("unit", "one stage") if count == 1 else ("units", f"{count} stages or fewer")
        raise PlanError(
            f"{devices.num_stages} pipeline stages, but only {count} {units} of work to place on them: every stage needs one at least; "
            f"use {stages}"
        )
