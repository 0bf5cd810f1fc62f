"""Pickles of what means nothing in another process as it is: ops and keys go by their names, fake tensors by what describes them."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from autopar._torch import OpOverload, fake_mode, is_fake
from autopar.ir import keys

_KEYS = {key.name: key for key in vars(keys).values() if isinstance(key, keys.Key)}
# Stands, while pickling, for the unpickler that will read.
READER = object()
_OF_READER = "reader"


class Pickler(pickle.Pickler):
    """Writes for an `Unpickler`."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._storages: dict[StorageWeakRef, int] = {}

    def persistent_id(self, value: Any) -> Any:
        return _OF_READER if value is READER else None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, OpOverload):
            return _op, (str(value),)
        if isinstance(value, keys.Key):
            return _key, (value.name,)
        if isinstance(value, (torch.memory_format, torch.layout)):  # torch gives them names that pickle does not find
            return _of_torch, (str(value).removeprefix("torch."),)
        if isinstance(value, torch.Tensor) and is_fake(value):
            return _fake, (READER, *self._fake(value))
        return NotImplemented

    def _fake(self, value: torch.Tensor) -> tuple[Any, ...]:
        storage = value.untyped_storage()
        number = self._storages.setdefault(StorageWeakRef(storage), len(self._storages))
        place = tuple(value.shape), value.stride(), value.storage_offset()
        return number, storage.nbytes(), *place, value.dtype, value.device, value.requires_grad


class Unpickler(pickle.Unpickler):
    """The fake tensors that it reads share a mode, and their memory as it was shared."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self.mode, self.storages = fake_mode(), dict[int, torch.Tensor]()

    def persistent_load(self, pid: Any) -> Any:
        if pid != _OF_READER:
            raise pickle.UnpicklingError(f"a reference to {pid!r}")
        return self


def _fake(
    reader: Unpickler,
    number: int,
    num_bytes: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool,
) -> torch.Tensor:
    with reader.mode, torch.no_grad():
        if number not in reader.storages:
            reader.storages[number] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        whole = reader.storages[number].untyped_storage()
        found = torch.empty(0, dtype=dtype, device=device).set_(whole, offset, size, stride)
    return found.requires_grad_(requires_grad)


def _op(name: str) -> Any:
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _of_torch(name: str) -> Any:
    return getattr(torch, name)


def _key(name: str) -> keys.Key[Any]:
    return _KEYS[name]
