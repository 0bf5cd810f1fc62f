"""Every memory that ops make while it is looked, from the op that makes it until nobody holds a tensor of it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from autopar._torch import OpOverload, TorchDispatchMode, pytree
from autopar.cost.op_temporaries import temporary_bytes
from autopar.ir.keys import Source


class Value(NamedTuple):
    """Memory that a call of a fragment takes: the call's name, its op, the user's line, and bytes."""

    name: str
    op: str
    source: Source
    bytes: int


@dataclass
class Memories(TorchDispatchMode):
    """Counts the memory of all tensors that ops make while it is entered; what they are given of other memory is `known`.

    `call` is written beside what follows. `at_peak` is what there was when it was most, `peak_call` what made it so.
    """

    known: set[StorageWeakRef] = field(default_factory=set[StorageWeakRef])
    live: dict[StorageWeakRef, Value] = field(default_factory=dict[StorageWeakRef, Value])
    call: Value = Value("", "", Source(), 0)
    bytes: int = 0
    peak_bytes: int = 0
    peak_call: Value = Value("", "", Source(), 0)
    at_peak: tuple[Value, ...] = ()

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        given = {StorageWeakRef(each.untyped_storage()) for each in _tensors((args, kwargs))}
        self.known |= given - self.live.keys()
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self.note(tensor)
        self.look(temporary_bytes(func, args))
        return result

    def note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        memory = StorageWeakRef(storage)
        if memory in self.live or memory in self.known:
            return
        self.live[memory] = self.call._replace(bytes=storage.nbytes())
        self.bytes += storage.nbytes()
        weakref.finalize(storage, self.drop, memory)

    def drop(self, memory: StorageWeakRef) -> None:
        self.bytes -= self.live.pop(memory).bytes

    def look(self, inside: int) -> None:
        if self.bytes + inside > self.peak_bytes:
            self.peak_bytes, self.peak_call = self.bytes + inside, self.call
            own = (self.call._replace(op=f"inside {self.call.op}", bytes=inside),) if inside else ()
            self.at_peak = (*self.live.values(), *own)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (each for each in pytree.tree_leaves(tree) if isinstance(each, torch.Tensor))
