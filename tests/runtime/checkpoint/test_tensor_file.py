"""Files of tensors: what the format's own library writes and reads, and what no file may claim."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from autopar.errors import CheckpointError
from autopar.runtime.checkpoint.tensor_file import DTYPES, TensorFile, open_regular, write


def some_tensors() -> dict[str, torch.Tensor]:
    found = {name: torch.randint(0, 2, (3, 5)).to(dtype) for name, dtype in DTYPES.items()}
    return found | {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3), "columns": torch.randn(4, 6).t(), "Ω/x": torch.randn(3)}


def test_a_file_that_the_disk_does_not_take_is_named_with_what_it_takes(tmp_path: Path) -> None:
    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, kept[1]))
    try:
        with pytest.raises(CheckpointError, match=r"a\.safetensors cannot be written: File too large; it takes 4,0\d\d bytes"):
            write(tmp_path / "a.safetensors", {"weight": torch.zeros(1000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


def test_the_formats_own_library_reads_what_is_written(tmp_path: Path) -> None:
    tensors = some_tensors()
    written = write(tmp_path / "a.safetensors", tensors, {"of": "us"})
    content = (tmp_path / "a.safetensors").read_bytes()
    assert (hashlib.sha256(content).hexdigest(), len(content)) == (written.sha256, written.num_bytes)
    read, mine = safetensors.torch.load_file(tmp_path / "a.safetensors"), TensorFile(tmp_path / "a.safetensors")
    assert read.keys() == tensors.keys() == mine.forms.keys() and mine.sha256() == written.sha256
    for name, tensor in tensors.items():
        for other in (read[name], mine.tensor(name)):
            assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape) and bits(other) == bits(tensor), name


def test_what_the_formats_own_library_writes_is_read(tmp_path: Path) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in some_tensors().items()}
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors")
    file = TensorFile(tmp_path / "a.safetensors")
    assert all(bits(file.tensor(name)) == bits(tensor) for name, tensor in tensors.items())


def test_tensors_that_begin_anywhere_are_read(tmp_path: Path) -> None:
    path = file_of(tmp_path, {"a": form("U8", [1], 0, 1), "b": form("F32", [1], 1, 5)}, b"\x01" + struct.pack("<f", 1.5))
    assert TensorFile(path).tensor("b").item() == 1.5


def file_of(folder: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "bad.safetensors"
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def form(dtype: str, shape: list[Any], start: Any, stop: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("header", "data", "length", "problem"),
    [
        ({}, b"", 1 << 62, "its header should have 4611686018427387904 bytes, and the file has 10"),
        (b"[" * 100_000, b"", None, "cannot be read"),
        (b"\xff\xff", b"", None, "cannot be read"),
        (b'{"a": 1, "a": 2}', b"", None, "a key stands there twice"),
        (b'{"a": NaN}', b"", None, "NaN is no JSON"),
        (b"[]", b"", None, "is no JSON object"),
        ({"a": form("F32", [2], 0, 4)}, b"1234", None, "is wrong about 'a'"),
        ({"a": form("F99", [1], 0, 4)}, b"1234", None, "is wrong about 'a'"),
        ({"a": form("F32", [-1, -1], 0, 4)}, b"1234", None, "is wrong about 'a'"),
        ({"a": form("F32", [True], 0, 4)}, b"1234", None, "is wrong about 'a'"),
        ({"a": form("F32", [10**400], 0, 4)}, b"1234", None, "is wrong about 'a'"),
        ({"a": form("F32", [1], 4, 0)}, b"1234", None, "is wrong about 'a'"),
        ({"a": form("F32", [1], 0, 4) | {"more": 1}}, b"1234", None, "is wrong about 'a'"),
        ({"a": form("F32", [1], 4, 8)}, b"12345678", None, "'a' begins at byte 4 of the data, and what is before it ends at 0"),
        ({"a": form("U8", [4], 0, 4), "b": form("U8", [4], 2, 6)}, b"123456", None, "'b' begins at byte 2"),
        ({"a": form("F32", [1], 0, 4)}, b"123", None, "the tensors have 4 bytes, and the file 3"),
        ({"a": form("F32", [1], 0, 4)}, b"12345", None, "the tensors have 4 bytes, and the file 5"),
    ],
)
def test_what_a_file_claims_is_checked(tmp_path: Path, header: Any, data: bytes, length: int | None, problem: str) -> None:
    path = file_of(tmp_path, header, data, length)
    with pytest.raises(CheckpointError, match="bad.safetensors") as error:
        TensorFile(path)
    assert problem in str(error.value) and len(str(error.value)) < 600


def test_bools_are_bools(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="bytes other than 0 and 1"):
        TensorFile(file_of(tmp_path, {"a": form("BOOL", [2], 0, 2)}, b"\x01\x02")).tensor("a")


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345678")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    for name, problem in (
        ("link", "a link, which is not followed"),
        ("pipe", "no regular file"),
        (".", "no regular file"),
        ("none", "No such file"),
    ):
        with pytest.raises(CheckpointError, match=problem):
            open_regular(tmp_path / name)
    (tmp_path / "short").write_bytes(b"123")
    with pytest.raises(CheckpointError, match="short is cut off: 3 bytes"):
        TensorFile(tmp_path / "short")


def test_dtypes_without_a_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'z' is torch.complex128"):
        write(tmp_path / "a.safetensors", {"z": torch.zeros(1, dtype=torch.complex128)})
