"""Files of the cache: whole or not at all, the oldest removed, and never a reason for a compile to fail."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from autopar.cache import folder
from autopar.cache.folder import Folder


def test_what_is_written_is_read(tmp_path: Path) -> None:
    store = Folder(tmp_path / "new" / "folder")
    assert store.names("") == [] and store.read("a-1") is None
    assert store.write("a-1", {"x": [1, 2.5, None]}) == store.file("a-1")
    assert store.write("a-2", "second") is not None
    assert store.read("a-1") == {"x": [1, 2.5, None]} and store.read("a-2") == "second"
    assert sorted(store.names("a")) == ["a-1", "a-2"] and store.names("b") == []


def test_where_nothing_can_be_written_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert Folder(tmp_path / "file").write("name", 1) is None and "is not kept" in caplog.text

    def full(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert Folder(tmp_path).write("name", 1) is None and "No space left" in caplog.text
    assert [each.name for each in tmp_path.iterdir()] == ["file"], "nothing is left half written"


def test_the_oldest_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Folder(tmp_path)
    for number in range(4):
        store.write(f"n{number}", "x" * 1000)
        os.utime(store.file(f"n{number}"), (number, number))
    store.read("n0")  # used now
    monkeypatch.setattr(folder, "MOST_BYTES", 3500)
    store.write("new", "x" * 1000)
    assert sorted(store.names("")) == ["n0", "n3", "new"]


def test_what_a_killed_process_left_is_no_content_and_goes(tmp_path: Path) -> None:
    store = Folder(tmp_path)
    left = tmp_path / ".name.1.abc"
    left.write_bytes(b'{"autopar": ')
    assert store.names("") == [] and store.write("name", 1) is not None and left.exists()
    before = time.time() - 10_000
    os.utime(left, (before, before))
    store.write("other", 1)
    assert not left.exists()


def _write(path: Path) -> None:
    for number in range(30):
        Folder(path).write("name", [number] * 2000)


def test_two_processes_write_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writers = [multiprocessing.get_context("fork").Process(target=_write, args=(tmp_path,)) for _ in range(2)]
    for each in writers:
        each.start()
    while any(each.is_alive() for each in writers):
        found = Folder(tmp_path).read("name")
        assert found is None or len(found) == 2000
    assert all(each.exitcode == 0 for each in writers) and "is not read" not in caplog.text
    assert len(list(tmp_path.iterdir())) == 1
