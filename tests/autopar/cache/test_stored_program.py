"""What is read of a file is checked before it is used: a file that fits nothing is a warning, and runs no code."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.cache.folder import Folder
from tests.autopar.cache.test_compiles import Returns, call_of, is_read, kept


def test_a_damaged_file_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Returns()
    kept(tmp_path, call_of(model))
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    for damaged in (content[:-100], b"", content.replace(b"aten.", b"aten_", 1), b"\x80\x04\x95 a pickle"):
        file.write_bytes(damaged)
        caplog.clear()
        assert not is_read(tmp_path, call_of(model)) and str(file) in caplog.text
    kept(tmp_path, call_of(model))
    assert is_read(tmp_path, call_of(model))


def test_what_fits_no_program_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Files whose sum is right: of somebody who writes them."""
    model, folder = Returns(), Folder(tmp_path)
    kept(tmp_path, call_of(model))
    (name,) = folder.names("")
    entry = folder.read(name)
    call = next(node for node in entry["program"]["nodes"] if node[0] == "call_function")
    for change in (
        lambda: call.__setitem__(2, "os.system"),
        lambda: call.__setitem__(2, "aten.no_such_op.default"),
        lambda: call.__setitem__(3, ["t", ["n", 10_000]]),
        lambda: call.__setitem__(3, ["t", ["R", "builtins.eval"]]),
        lambda: entry["program"].pop("nodes"),
        lambda: entry.pop("recorded"),
    ):
        change()
        folder.write(name, entry)
        caplog.clear()
        assert not is_read(tmp_path, call_of(model)) and str(folder.file(name)) in caplog.text
