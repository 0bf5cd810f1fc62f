"""Parameters that lie side by side, with their gradients and their state, and are stepped in large pieces.

An optimizer of torch's that goes element by element does not care where a parameter ends; a CPU does. Each op of an update takes
microseconds to begin, which is as long as it works at 10 kB; and `foreach`, which does one op to all tensors before the next, fetches each
of them from main memory once for every op. Gradients come in buckets, one behind the other: parameters and state are laid out likewise, and
pieces of them are stepped that stay in the processor's cache from the first op to the last.

What the optimizer's owner has are the tensors of before, each with a storage of its own, which is a part of a larger memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version
from torch.utils.weak import WeakIdKeyDictionary

from autopar.cost.memory_walk import BUCKET_ALIGNMENT_BYTES
from autopar.runtime._torch import is_alone, num_holders

# The state of an optimizer: by parameter its entries.
State = defaultdict[Any, dict[str, Any]]

# Of a piece. With its gradient, two entries of state and what an op makes, it takes five times that. AdamW of 5.3 million parameters took
# 18 ms as 390 tensors, 10 in pieces of 1 MiB or half of it, 12 of a quarter, and 14 where one op goes over all.
PIECE_BYTES = 1 << 20
# A run has at most so many: to lay it out takes its memory a second time.
PIECES_OF_A_RUN = 8

# By what was laid out, a parameter's stand-in or an entry of its state, the memory that it is a part of, and keeps alive. It has a storage
# of its own: whoever saves or copies one meets no other, and it begins at 0, as torch wants of what DTensors hold.
_WHOLES: WeakIdKeyDictionary = WeakIdKeyDictionary()

# How many hold the memory of a parameter that has nobody but its stand-in.
_PROBE = torch.empty(1)
_STAND_IN = _PROBE.detach()
_HOLDERS = num_holders(_PROBE)


class Member(NamedTuple):
    """A parameter of which this rank has a part.

    `number` is its place among those of the step, `group` that of its options. `part` is the DTensor's own tensor, `local` what the
    optimizer sees of it, which has the gradient and by which `state` is found. `is_laid` if it has been in a run before.
    """

    number: int
    local: torch.Tensor
    part: torch.Tensor
    group: int
    state: dict[str, Any]
    is_laid: bool

    @property
    def gradient(self) -> torch.Tensor:
        assert self.local.grad is not None
        return self.local.grad

    @property
    def can_join(self) -> bool:
        """Whether it may be in a run: its memory is one piece, and moving it is seen by nobody. Its gradient begins where buckets begin
        one: between two such neighbours that lie less than that apart there is nothing of another."""
        tensors = [(key, each) for key, each in self.state.items() if isinstance(each, torch.Tensor)]
        parts = [self.local, self.gradient, *(each for key, each in tensors if is_part(key, each, self.local))]
        begin = self.gradient.storage_offset() * self.gradient.element_size()
        return (
            self.local.ndim > 0 < self.local.numel()
            and self.gradient.dtype == self.local.dtype
            and begin % BUCKET_ALIGNMENT_BYTES == 0
            and all(each.is_contiguous() and each.device.type == "cpu" for each in parts)
            and all(is_part(key, each, self.local) or not each.ndim for key, each in tensors)
            and all(each in _WHOLES or is_alone(each) for key, each in tensors if is_part(key, each, self.local))
            and (self.is_laid or num_holders(self.part) == _HOLDERS)
        )

    def is_followed_by(self, other: Member) -> bool:
        """Whether both may be in one run. What was laid out is not moved again: two programs may have gradients in two orders."""
        distance = _distance(self.gradient, other.gradient)
        return (
            distance is not None
            and 0 <= distance - self.local.nbytes < BUCKET_ALIGNMENT_BYTES
            and (self.group, self.local.dtype, self.is_laid) == (other.group, other.local.dtype, other.is_laid)
            and (not self.is_laid or _is_behind(self.local, other.local, distance))
            and _have_equal_scalars(self, other)
        )


class Run:
    """Members one behind the other, as their gradients lie, at `_offsets`, in elements. `pieces` are what is stepped."""

    def __init__(self, members: Sequence[Member], inner: State) -> None:
        """The state of members leaves `inner`, and that of the pieces takes its place."""
        self.members = members
        self._locals = [each.local for each in members]
        begin = members[0].gradient.storage_offset()
        self._offsets = [int(each.gradient.storage_offset() - begin) for each in members]
        self._size = self._offsets[-1] + members[-1].local.numel()
        self._entries: list[dict[str, Any]] = [inner.pop(each.local, {}) for each in members]
        # Without state it is one piece: that of several would have to be put together.
        self._piece_size = PIECE_BYTES // self._locals[0].element_size() if self._entries[0] else self._size
        self.pieces = list(self._laid(self._locals, [each.part for each in members]).split(self._piece_size))
        self._scalars: dict[str, torch.Tensor] = {}
        self._addresses: list[int] = []
        self._take_state(inner)
        self._states = [inner[piece] for piece in self.pieces if piece in inner]
        self._places = self._places_of_scalars()
        is_put = self.put([each.gradient for each in members])
        assert is_put, "its members were chosen by where their gradients lie"
        for each in self._locals:
            each.grad = None  # a bucket is used again once nobody looks at it

    def is_as_it_was(self) -> bool:
        """Whether nobody has written a step count, or another number, or put it elsewhere, since it was handed out."""
        are_equal = all(bool((numbers == self._states[0][key]).all()) for key, numbers in self._scalars.items())
        return are_equal and self._places_of_scalars() == self._places

    def put(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Give the pieces these gradients of the members; False, and nothing is done, where they do not lie as the members do."""
        first, dtype = gradients[0], self.members[0].local.dtype
        if not all(each.is_contiguous() and each.dtype is dtype for each in gradients):
            return False
        addresses, size = [each.data_ptr() for each in gradients], first.element_size()
        if addresses != self._addresses and [each - addresses[0] for each in addresses] != [each * size for each in self._offsets]:
            return False
        # Addresses that are in the memory of the first are of this memory.
        if (first.storage_offset() + self._size) * size > first.untyped_storage().nbytes():
            return False
        self._addresses = addresses
        whole = first.as_strided((self._size,), (1,), first.storage_offset())
        for piece, gradient in zip(self.pieces, whole.split(self._piece_size), strict=True):
            piece.grad = gradient
        # They are about to be written, in which autograd sees one of their memory alone.
        increment_version(self._locals)
        return True

    def end_step(self) -> None:
        """Members have the numbers that the pieces have; gradients are dropped."""
        for key, scalars in self._scalars.items():
            scalars.copy_(self._states[0][key])
        self.drop_gradients()

    def drop_gradients(self) -> None:
        for piece in self.pieces:
            piece.grad = None

    def dissolve(self, inner: State) -> None:
        """The state of pieces leaves `inner`, and that of members, which are views of it, takes its place."""
        states = [inner.pop(piece) for piece in self.pieces if piece in inner]
        self.drop_gradients()
        if not states:
            return
        for key, value in list(states[0].items()):
            if is_part(key, value, self.pieces[0]):
                values = [state.pop(key) for state in states]
                if not self._holds(key, values):
                    whole = values[0] if len(values) == 1 else torch.cat(values)
                    self._entries_are(key, self._parts_of(whole))
                    _WHOLES.update({entries[key]: whole for entries in self._entries})
                del values
            elif isinstance(value, torch.Tensor):
                if key in self._scalars:
                    self._scalars[key].copy_(value)
                else:
                    self._entries_are(key, self._numbers(key, value))
            else:
                self._entries_are(key, [value] * len(self.members))
        inner.update({each.local: entries for each, entries in zip(self.members, self._entries, strict=True)})

    def _take_state(self, inner: State) -> None:
        states: list[dict[str, Any]] = [{} for _ in self.pieces]
        for key, value in self._entries[0].items():
            if is_part(key, value, self.members[0].local):
                values = self._laid([entries[key] for entries in self._entries]).split(self._piece_size)
            elif isinstance(value, torch.Tensor):
                for entries, number in zip(self._entries, self._numbers(key, value), strict=True):
                    entries[key].data = number
                values = [value.clone() for _ in self.pieces]
            else:
                values = [value] * len(self.pieces)
            for state, each in zip(states, values, strict=True):
                state[key] = each
        if self._entries[0]:
            inner.update(zip(self.pieces, states, strict=True))

    def _laid(self, tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        """The memory in which `tensors` lie as the gradients do, where they are moved if they are elsewhere; `others` are theirs, too."""
        first, size = tensors[0], tensors[0].element_size()
        if all(_is_behind(first, each, offset * size) for each, offset in zip(tensors, self._offsets, strict=True)):
            whole: torch.Tensor = _WHOLES[first]
            begin = (first.data_ptr() - whole.data_ptr()) // size
            return whole[begin : begin + self._size]
        if len(tensors) == 1:
            return first.view(-1)
        whole = first.new_zeros(self._size)
        for each, part, other in zip(tensors, self._parts_of(whole), others or tensors, strict=True):
            each.data = other.data = part.copy_(each)
            _WHOLES[each] = whole
        return whole

    def _parts_of(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Of each member, in the memory of `whole`. The storage that `from_numpy` makes of a slice begins and ends with it, as no view's
        does, and keeps the memory alive."""
        memory, size = whole.view(torch.uint8).numpy(), whole.element_size()
        places = zip(self._locals, self._offsets, strict=True)
        flat = [torch.from_numpy(memory[offset * size : (offset + each.numel()) * size]).view(whole.dtype) for each, offset in places]
        return [part.view(each.shape) for part, each in zip(flat, self._locals, strict=True)]

    def _numbers(self, key: str, value: torch.Tensor) -> list[torch.Tensor]:
        """A number of each member, all `value`, which are written at once from now on; with a storage of its own, as members have."""
        self._scalars[key] = whole = value.repeat(len(self.members))
        memory, size = whole.view(torch.uint8).numpy(), whole.element_size()
        begins = range(0, whole.nbytes, size)
        return [torch.from_numpy(memory[begin : begin + size]).view(whole.dtype).view(()) for begin in begins]

    def _holds(self, key: str, values: Sequence[torch.Tensor]) -> bool:
        """Whether pieces still have what members gave them."""
        held, nbytes = self._entries[0].get(key), self._piece_size * values[0].element_size()
        return held is not None and [each.data_ptr() - held.data_ptr() for each in values] == [
            nbytes * number for number in range(len(values))
        ]

    def _entries_are(self, key: str, values: Sequence[Any]) -> None:
        for entries, value in zip(self._entries, values, strict=True):
            entries[key] = value

    def _places_of_scalars(self) -> list[int]:
        return [entries[key].data_ptr() for key in self._scalars for entries in self._entries]


def runs_of(members: Iterable[Member]) -> list[list[Member]]:
    """Those that lie one behind the other, and large ones, which are stepped in pieces once they have state; what is left stands alone."""
    found: list[list[Member]] = []
    ready = sorted((each for each in members if each.can_join), key=lambda each: each.gradient.data_ptr())
    for each in ready:
        run = found[-1] if found else []
        fits = sum(member.local.nbytes for member in run) + each.local.nbytes <= PIECES_OF_A_RUN * PIECE_BYTES
        if run and fits and run[-1].is_followed_by(each):
            run.append(each)
        else:
            found.append([each])
    return [each for each in found if len(each) > 1 or (is_large(each[0].local) and each[0].state)]


def is_large(local: torch.Tensor) -> bool:
    """Whether a parameter is more than a piece, and lies where there is a use of pieces."""
    return local.device.type == "cpu" and local.nbytes > PIECE_BYTES


def is_part(key: str, value: Any, tensor: torch.Tensor) -> bool:
    """Whether an entry of the state of `tensor` has a number for each of its elements."""
    return key != "step" and isinstance(value, torch.Tensor) and value.shape == tensor.shape


def _distance(one: torch.Tensor, other: torch.Tensor) -> int | None:
    """In bytes; None where they are not of one memory."""
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return None
    return other.data_ptr() - one.data_ptr()


def _is_behind(one: torch.Tensor, other: torch.Tensor, distance: int) -> bool:
    """Whether both were laid out in one memory, and lie there, so many bytes apart."""
    whole, begin, end = _WHOLES.get(one), one.data_ptr(), other.data_ptr() + other.nbytes
    if whole is None or _WHOLES.get(other) is not whole or other.data_ptr() - begin != distance:
        return False
    return whole.data_ptr() <= begin and end <= whole.data_ptr() + whole.nbytes


def _have_equal_scalars(one: Member, other: Member) -> bool:
    if list(one.state) != list(other.state):
        return False
    for key, value in one.state.items():
        theirs, has_each = other.state[key], is_part(key, value, one.local)
        if has_each != is_part(key, theirs, other.local):
            return False
        if isinstance(value, torch.Tensor) and isinstance(theirs, torch.Tensor):
            if value.dtype != theirs.dtype or (not has_each and not torch.equal(value, theirs)):
                return False
        elif value is not theirs and value != theirs:
            return False
    return True
