"""The group by which ranks tell each other numbers and objects: of the host, so that none waits for its device to say them.

It is a group of its own. What ranks say is no part of a program, so a rank that left something out may speak while others run theirs: in
one group gloo would take its words for their tensors. Ranks also may speak of different things, one of its next call and another of a
backward, so each message is as long as any other, and begins with what it is about.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_NUMBERS = 8  # of a message, of which two tell what it is about
_TEXT = 512  # bytes, of what a rank is at
_OBJECTS = "objects"  # what all `gather` are about: an error is brought to whichever comes next


class ApartError(Exception):
    """Ranks speak of different things: `places`, of what each does, in the order of the group."""

    def __init__(self, places: Sequence[str]) -> None:
        super().__init__(places)
        self.places = places


class UnequalError(Exception):
    """Ranks were expected to have one number, and have several."""


@dataclass(frozen=True)
class _Spoken:
    """A message under way, that brings the largest of each of so many numbers; `place` is where this rank is."""

    message: torch.Tensor
    work: Any
    number: int
    what: str
    place: str


@dataclass
class HostGroup:
    """`group` takes tensors on `device`. Methods are collective, and raise `ApartError` on all ranks.

    One message at most is under way: whoever speaks has heard it before.
    """

    group: dist.ProcessGroup
    device: torch.device
    _expected: _Spoken | None = None
    _is_given_up: bool = False

    @property
    def expected(self) -> str:
        """What the message under way is about; "" where none is."""
        return "" if self._expected is None else self._expected.what

    def maxima(self, numbers: Sequence[int], what: str, place: str = "") -> list[int]:
        """Of each number the largest that a rank has, of ranks that all speak of `what`. `place` says more of it in the error."""
        self.hear()
        return self._heard(self._spoken(numbers, what, place))

    def expect(self, number: int, what: str, place: str = "") -> None:
        """Go on as if every rank had this `number`. `hear` raises where one has not; so does whatever is said next."""
        self.hear()
        self._expected, self._is_given_up = self._spoken([number, -number], what, place), False

    def hear(self) -> None:
        """Wait until it is known that all is as expected. Raises `UnequalError` on all ranks where it is not."""
        expected, self._expected = self._expected, None
        if expected is None:
            return
        most, least = self._heard(expected)
        if most != -least and not self._is_given_up:
            raise UnequalError

    def give_up(self) -> None:
        """What was expected does not matter any more: it is heard, since others tell it, and may be unequal."""
        self._is_given_up = True

    def _spoken(self, numbers: Sequence[int], what: str, place: str) -> _Spoken:
        key = int.from_bytes(hashlib.sha256(what.encode()).digest()[:7])
        told = [key, -key, *numbers]
        assert len(told) <= _NUMBERS, told
        message = torch.tensor(told + [0] * (_NUMBERS - len(told)), dtype=torch.int64, device=self.device)
        work = dist.all_reduce(message, dist.ReduceOp.MAX, group=self.group, async_op=True)
        return _Spoken(message, work, len(numbers), what, place or what)

    def _heard(self, spoken: _Spoken) -> list[int]:
        spoken.work.wait()
        most, least, *largest = spoken.message.tolist()
        if most != -least:
            raise ApartError([each.rstrip(b"\0").decode(errors="ignore") for each in self._all(spoken.place.encode()[:_TEXT], _TEXT)])
        return largest[: spoken.number]

    def gather(self, value: Any, what: str) -> list[Any]:
        """Every rank's `value`, any picklable object."""
        data = pickle.dumps(value)
        (length,) = self.maxima([len(data)], _OBJECTS, what)
        return [pickle.loads(each) for each in self._all(data, length)]  # which ends where the object does

    def _all(self, data: bytes, length: int) -> list[bytes]:
        """Every rank's `data`, filled up to `length`."""
        mine = torch.frombuffer(bytearray(data.ljust(length, b"\0")), dtype=torch.uint8).to(self.device)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(everyone, mine, group=self.group)
        return [each.cpu().numpy().tobytes() for each in everyone]


def host_group(like: dist.ProcessGroup, members: Sequence[int], device: torch.device, timeout: timedelta | None) -> HostGroup:
    """By which the ranks of `like`, those `members` of the world, speak: one of gloo that is made now, collectively over the world. Where
    there is no gloo, or the host has another backend, it is of what `like` is of, and they speak on `device` if they must."""
    backend = "gloo" if dist.is_gloo_available() and host_backend(like) in ("", "gloo") else None
    made: Any = dist.new_group(list(members), timeout=timeout, backend=backend)
    return HostGroup(made, torch.device("cpu") if backend or host_backend(like) else device)


def host_backend(group: dist.ProcessGroup) -> str:
    """What moves the tensors of the host in a group, "" where nothing does."""
    parts = (part.partition(":") for part in dist.get_backend_config(group).split(","))
    return next((backend for device, _, backend in parts if device == "cpu"), "")
