"""Files of the cache: whole or not there."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from autopar.cache.folder import CacheFolder


@pytest.fixture
def folder(tmp_path: Path) -> CacheFolder:
    folder = CacheFolder(tmp_path / "a" / "cache")
    folder.write("key", b"a program")
    return folder


def test_what_was_written_is_read(folder: CacheFolder) -> None:
    assert folder.read("key") == b"a program"
    assert folder.read("another key") is None
    assert [each.name for each in folder.path.iterdir()] == ["key"], "no temporary file is left"


def test_the_folder_is_its_owners_alone(folder: CacheFolder) -> None:
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert (folder.path / "key").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("content", [b"", b"autopar compiled", b"another file", b"autopar compiled call 1\n" + bytes(32) + b"a program"])
def test_another_file_is_none(folder: CacheFolder, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (folder.path / "key").write_bytes(content)
    assert folder.read("key") is None
    assert "broken, or none of ours" in caplog.text


@pytest.mark.parametrize("number", [1, 5, 30])
def test_a_file_that_was_cut_off_is_none(folder: CacheFolder, number: int) -> None:
    content = (folder.path / "key").read_bytes()
    (folder.path / "key").write_bytes(content[:-number])
    assert folder.read("key") is None


def test_a_changed_byte_is_found(folder: CacheFolder) -> None:
    content = bytearray((folder.path / "key").read_bytes())
    content[-1] ^= 1
    (folder.path / "key").write_bytes(content)
    assert folder.read("key") is None


@pytest.mark.parametrize("of_folder", [True, False])
def test_what_others_may_write_is_not_read(folder: CacheFolder, of_folder: bool, caplog: pytest.LogCaptureFixture) -> None:
    (folder.path if of_folder else folder.path / "key").chmod(0o777)
    assert folder.read("key") is None
    assert "others may write" in caplog.text


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no folder")
    with caplog.at_level(logging.WARNING, "autopar"):
        CacheFolder(tmp_path / "file").write("key", b"a program")
    assert "is not kept" in caplog.text
