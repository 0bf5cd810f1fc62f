"""Files of tensors in the format safetensors, which holds nothing that could be run.

    8 bytes       length of the header, little-endian
    header        JSON: {"weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}, spaces behind it up to 8 bytes
    data          the tensors' bytes, row-major, little-endian, without gaps

https://huggingface.co/docs/safetensors/index#format. A file that is read is trusted in nothing: each number is checked before it is used.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import shutil
import stat
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from autopar.errors import CheckpointError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100 << 20  # the limit of the format's own reader
_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class Written:
    """A file, and the SHA-256 of its bytes."""

    name: str
    sha256: str
    num_bytes: int


def check_dtype(dtype: torch.dtype, what: str) -> None:
    if dtype not in NAMES:
        raise CheckpointError(f"{what} is {dtype}, and files in the format safetensors have none of that: leave it out, or convert it")


def write(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> Written:
    """A new file with these tensors, of any device, which is on the disk when this returns. Raises `CheckpointError` where that has no room
    for it, or takes none."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    # The widest first: then each begins at a multiple of its item's size.
    names, offset = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize), 0
    for name in names:
        tensor = tensors[name]
        check_dtype(tensor.dtype, repr(name))
        offsets = [offset, offset + tensor.numel() * tensor.dtype.itemsize]
        header[name], offset = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}, offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    contents = (struct.pack("<Q", len(text)) + text, *(_bytes_of(tensors[name]) for name in names))
    try:
        return Written(path.name, _write_whole(path, contents), 8 + len(text) + offset)
    except OSError as error:
        free = f", {shutil.disk_usage(path.parent).free:,} are free" if error.errno == errno.ENOSPC else ""
        raise CheckpointError(f"{path} cannot be written: {error.strerror}; it takes {8 + len(text) + offset:,} bytes{free}") from error


def _write_whole(path: Path, contents: Sequence[Any]) -> str:
    """The SHA-256 of what is on the disk then."""
    with path.open("xb", buffering=0) as file:
        for content in contents:
            _write_all(file.fileno(), memoryview(content))
        # The disk needs no core meanwhile.
        with ThreadPoolExecutor(1) as thread:
            syncing = thread.submit(os.fsync, file.fileno())
            digest = hashlib.sha256()
            for content in contents:
                digest.update(content)
        syncing.result()
    return digest.hexdigest()


def _write_all(file: int, content: memoryview) -> None:
    while content:
        content = content[os.write(file, content) :]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data


@dataclass(frozen=True)
class Form:
    """A tensor of a file; its bytes are [start, stop) of the data."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def open_regular(path: Path) -> int:
    """A descriptor of a file to read. Raises `CheckpointError` for what is none: missing, a link, a folder, a pipe."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        what = "a link, which is not followed" if path.is_symlink() else error.strerror
        raise CheckpointError(f"{path} cannot be read: {what}") from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise CheckpointError(f"{path} cannot be read: it is no regular file")
    return file


class TensorFile:
    """The tensors of a file, read where they are used. Raises `CheckpointError`, naming the file, where anything is not as it must be."""

    def __init__(self, path: Path) -> None:
        self.path = path
        file = open_regular(path)
        try:
            self._size = os.fstat(file).st_size
            if self._size < 8:
                raise CheckpointError(f"{path} is cut off: {self._size} bytes")
            # Private: tensors over it may be written, which no file sees.
            self._memory = mmap.mmap(file, self._size, access=mmap.ACCESS_COPY)
        finally:
            os.close(file)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        (length,) = struct.unpack("<Q", self._memory[:8])
        if length > min(MAX_HEADER_BYTES, self._size - 8):
            raise CheckpointError(f"{path}: its header should have {length} bytes, and the file has {self._size}")
        self._begin = 8 + length
        self.forms = self._forms(self._memory[8 : self._begin])

    def _forms(self, text: bytes) -> dict[str, Form]:
        header = parse_json(text, f"the header of {self.path}")
        if not isinstance(header, dict):
            raise CheckpointError(f"the header of {self.path} is no JSON object")
        header.pop("__metadata__", None)
        forms = {name: self._form(name, entry) for name, entry in header.items()}
        end = 0
        for name, form in sorted(forms.items(), key=lambda pair: (pair[1].start, pair[1].stop)):
            if form.start != end:
                raise CheckpointError(f"{self.path}: {name!r} begins at byte {form.start} of the data, and what is before it ends at {end}")
            end = form.stop
        if end != self._size - self._begin:
            raise CheckpointError(f"{self.path}: the tensors have {end} bytes, and the file {self._size - self._begin} behind its header")
        return forms

    def _form(self, name: str, entry: Any) -> Form:
        match entry:
            case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(stop)]} if dtype in DTYPES and len(entry) == 3:
                if all(type(size) is int and size >= 0 for size in shape) and prod(shape) * DTYPES[dtype].itemsize == stop - start >= 0:
                    return Form(DTYPES[dtype], tuple(shape), start, stop)
            case _:
                pass
        raise CheckpointError(f"the header of {self.path} is wrong about {name!r}: {str(entry)[:200]}")

    def sha256(self) -> str:
        digest = hashlib.sha256()
        for start in range(0, self._size, _CHUNK_BYTES):
            digest.update(memoryview(self._memory)[start : start + _CHUNK_BYTES])
        return digest.hexdigest()

    def tensor(self, name: str) -> torch.Tensor:
        """A view of the file's memory on the CPU, of the shape and dtype of its `forms`."""
        form = self.forms[name]
        content = self._bytes[self._begin + form.start : self._begin + form.stop]
        if form.dtype is torch.bool and content.numel() and int(content.max()) > 1:
            raise CheckpointError(f"{self.path}: {name!r} is to be of bools, and has bytes other than 0 and 1")
        if (self._begin + form.start) % form.dtype.itemsize:
            content = content.clone()  # of foreign files, which need not be aligned
        return content.view(form.dtype).view(form.shape) if content.numel() else torch.empty(form.shape, dtype=form.dtype)


def parse_json(text: bytes, what: str) -> Any:
    """Raises `CheckpointError` for what is no JSON, or names a key twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key stands there twice")
        return found

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is no JSON")

    try:
        return json.loads(text.decode(), object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} cannot be read: {str(error)[:200]}") from error
