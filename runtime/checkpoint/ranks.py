"""The processes that save or load together: all succeed, or all raise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from autopar.errors import AutoparError, CheckpointError
from autopar.runtime.execute.distributed_world import DistributedWorld
from autopar.runtime.execute.world import World

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among those; `gather(value, what)` gives the values of all in the order of ranks, on all of them. Collective."""

    rank: int
    size: int
    gather: Callable[[Any, str], list[Any]]

    @classmethod
    def of(cls, world: World) -> Ranks:
        """Virtual ranks are one process, which has all."""
        if isinstance(world, DistributedWorld):
            return cls(world.rank, world.mesh.size, world.gather)
        return cls(0, 1, lambda value, _: [value])

    def attempt(self, what: str, make: Callable[[], T]) -> T:
        """What `make` gives here. Where it raises on a rank, all raise: that rank its error, the others one that tells it. Collective."""
        error, made = None, []
        try:
            made = [make()]
        except Exception as caught:  # whatever it is, the others wait for this rank's answer
            error = caught
        self._told(None, error, what)
        return made[0]

    def tell(self, what: str, make: Callable[[], T]) -> list[T]:
        """As `attempt`, and what `make` gives on each rank, on all of them."""
        error, made = None, None
        try:
            made = make()
        except Exception as caught:  # as above
            error = caught
        return self._told(made, error, what)

    def _told(self, value: Any, error: Exception | None, what: str) -> list[Any]:
        told = self.gather((value, error and (str(error) if isinstance(error, AutoparError) else f"{type(error).__name__}: {error}")), what)
        if error is not None:
            raise error
        for rank, (_, text) in enumerate(told):
            if text is not None:
                raise CheckpointError(f"rank {rank} failed to {what}: {text}")
        return [value for value, _ in told]
