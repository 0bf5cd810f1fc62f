"""What one rank finds alone is raised by all of them: the others hear of it where they next compare notes, and nobody waits for it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from autopar.errors import AutoparError, PeerError

T = TypeVar("T")


class Gathering(Protocol):
    """What is needed of a world."""

    ranks: tuple[int, ...]
    is_virtual: bool

    def gather(self, value: Any, what: str = "") -> list[Any]: ...


@dataclass(frozen=True)
class Refusal:
    """What a rank gives to `gather` in place of its value, since it raised on the way there."""

    error: AutoparError


def accepted(values: list[Any]) -> list[Any]:
    """The values of all ranks. Where some refused, all raise what the first of them did; where all did, each goes on with its own."""
    refused = [rank for rank, each in enumerate(values) if isinstance(each, Refusal)]
    if not refused or len(refused) == len(values):
        return values
    error = values[refused[0]].error
    told = copy.copy(error)
    told.args = (f"rank {refused[0]}: {error}",)
    told.is_told = True
    raise told


@contextmanager
def telling(world: Gathering, what: str) -> Generator[None]:
    """All ranks raise what is raised in here on one of them. Those that come through hear of it at their next `gather`, which must be the
    next collective of all; `what` that is stands in the error when a rank does not answer."""
    try:
        yield
    except Exception as error:  # whatever it is, the peers must hear of it
        if world.is_virtual or (isinstance(error, AutoparError) and error.is_told):
            raise
        told = error if isinstance(error, AutoparError) else AutoparError(f"{type(error).__name__}: {error}")
        try:
            world.gather(Refusal(told), what)
        except PeerError as unheard:  # this rank's error is what matters
            error.add_note(f"nor could the other ranks be told: {unheard}")
        raise


def agreed(world: Gathering, make: Callable[[], T], what: str) -> T:
    """What `make` gives on each rank, once it has given something on all. Collective. Raises on all ranks what it raises on one."""
    with telling(world, what):
        made = make()
    if not world.is_virtual:
        world.gather(None, what)
    return made


def from_first(world: Gathering, make: Callable[[], T]) -> T:
    """What `make` gives on rank 0, on every rank; it is called there alone. Collective. Raises rank 0's error on all ranks."""
    made: T | None = None
    error = None
    if 0 in world.ranks:
        try:
            made = make()
        except Exception as caught:  # whatever it is, the others wait for this rank's answer
            error = caught
    found: Sequence[tuple[T, AutoparError | None]] = world.gather((made, error and _from_first(error)), "the plan of rank 0")
    value, told = found[0]
    if error is not None:
        raise error
    if told is not None:
        raise told
    return value


def _from_first(error: Exception) -> AutoparError:
    """What other ranks raise for an error of rank 0: of the same class where it is one of ours, with what else it holds."""
    if not isinstance(error, AutoparError):
        return AutoparError(f"rank 0 failed: {type(error).__name__}: {error}")  # no plan of another kind is tried then
    told = copy.copy(error)
    told.args = (f"rank 0 found no plan: {error}",)
    return told
