"""What is known of the memory of a rank: what its schedule does not say of sizes, and what a walk over it finds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from autopar.cost.buffer_kinds import Kind
from autopar.ir.instructions import Memory, Run, Update


class MemoryStep(NamedTuple):
    """Bytes while the instruction at `position` runs and after it, and microbatches (of any stage) of which values are saved then.

    `kinds` are what the bytes while it runs are made of.
    """

    position: int
    during_bytes: float
    after_bytes: float
    live_microbatches: int
    kinds: Mapping[Kind, float]


@dataclass(frozen=True)
class RankMemory:
    """The memory of one rank; a step for each instruction that makes or drops a buffer. `held_bytes` are there before the first.
    `parked_bytes` are the most that is elsewhere than on the device, by where."""

    steps: tuple[MemoryStep, ...]
    held_bytes: float
    parked_bytes: Mapping[Memory, float] = field(default_factory=dict[Memory, float])

    @property
    def peak_bytes(self) -> float:
        return max((step.during_bytes for step in self.steps), default=self.held_bytes)

    @property
    def peak_live_microbatches(self) -> int:
        """A microbatch counts once for each of the rank's stages, while a buffer of the role "saved" is there that its backward reads."""
        return max((step.live_microbatches for step in self.steps), default=0)


@dataclass(frozen=True)
class Sizes:
    """What a schedule itself does not say.

    buffer_bytes   of a buffer with memory of its own, where no fragment says it
    working_bytes  what a RUN or an UPDATE needs besides its buffers while it runs
    held_bytes     what is there all the time and is no buffer: what an optimizer holds
    given_bytes    likewise, what the caller passes, and the model's buffers: a call has copies, so that the caller may write meanwhile
    taken_bytes    results as the caller gets them at PAUSE, copies for the same reason
    parked_bytes   what an optimizer holds elsewhere than on the device
    arrival        when a receive or a collective takes its memory: at its launch, as on processes, or at its WAIT, as on virtual ranks
    over_gloo      whether gathers and reduce-scatters take memory besides, as gloo does
    """

    buffer_bytes: Callable[[str], float]
    working_bytes: Callable[[Run | Update], float] = lambda run: 0
    held_bytes: float = 0
    given_bytes: float = 0
    taken_bytes: float = 0
    arrival: Literal["launch", "wait"] = "wait"
    over_gloo: bool = False
    parked_bytes: Mapping[Memory, float] = field(default_factory=dict[Memory, float])
