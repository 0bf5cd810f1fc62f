"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import gc
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.errors import CheckpointError
from autopar.runtime.checkpoint import tensor_file
from autopar.runtime.checkpoint.background import _BACKGROUNDS, Saving, wait_for_saving
from tests.support.checkpoints import all_of, are_equal, parallel_on, share
from tests.support.models.trained import batch


def test_what_is_saved_is_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = parallel_on({"dp": 2})
    parallel.train_step(**batch(0))
    before = all_of(parallel)
    saving = autopar.save(tmp_path, parallel, note=1, blocking=False)
    parallel.train_step(**batch(1))
    again = autopar.save(tmp_path, parallel, note=2, blocking=False)  # waits for the first
    assert saving.done() and saving.result() == tmp_path / "00000001"
    assert autopar.load(tmp_path, parallel) == 2 and again.done()
    assert autopar.load(tmp_path / "00000001", parallel) == 1 and are_equal(before, all_of(parallel))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensor_file, "_write_all", full)
    failed = autopar.save(tmp_path, parallel, blocking=False)
    with pytest.raises(CheckpointError, match="No space left"):
        failed.result()
    unasked = autopar.save(tmp_path, parallel, blocking=False)  # whoever was told of one goes on
    deadline = time.monotonic() + 60
    while not unasked.done() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not unasked.cancel()
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="No space left"):  # whoever did not ask is told at the next
        autopar.save(tmp_path, parallel)
    assert autopar.save(tmp_path, parallel).name == "00000003"


def test_a_failure_that_nobody_asks_for_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parallel = parallel_on({"dp": 2})
    (tmp_path / "file").touch()
    autopar.save(tmp_path / "file", parallel, blocking=False)
    with pytest.raises(FileExistsError):
        wait_for_saving(parallel._world)
    autopar.save(tmp_path, parallel, blocking=False).result()  # by the same thread, so that it is through with the one before
    (said,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert said.getMessage().startswith(f"a checkpoint of {tmp_path / 'file'} is not written: FileExistsError: ")


def test_an_interrupted_wait_is_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a copy is written to again only when it is on the disk."""
    parallel, may_write, write_all = parallel_on({"dp": 2}), threading.Event(), tensor_file._write_all
    parallel.train_step(**batch(0))
    before = all_of(parallel)

    def late(*of: Any) -> None:
        assert may_write.wait(60)
        write_all(*of)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tensor_file, "_write_all", late)
    saving = autopar.save(tmp_path, parallel, blocking=False)
    parallel.train_step(**batch(1))
    with monkeypatch.context() as during, pytest.raises(KeyboardInterrupt):
        during.setattr(Saving, "finish", interrupted)
        autopar.save(tmp_path, parallel, blocking=False)
    threading.Timer(0.5, may_write.set).start()
    again = autopar.save(tmp_path, parallel, blocking=False)
    assert saving.done() and again.result() == tmp_path / "00000002"
    autopar.load(saving.result(), parallel)
    assert are_equal(before, all_of(parallel))


def trains_meanwhile(folder: str) -> bool:
    axes = {"pp": 2, "dp": 2}
    parallel = parallel_on(axes, real=True)
    parallel.train_step(**share(batch(0), axes))
    before = all_of(parallel)
    for number in range(1, 4):
        saving = autopar.save(folder, parallel, note=number, blocking=False)
        for step in range(2):
            parallel.train_step(**share(batch(step), axes))
    assert saving.result().name == "00000003"
    first = Path(folder) / "00000001"
    is_same = autopar.load(first, parallel) == 1 and are_equal(before, all_of(parallel))
    del parallel, saving
    gc.collect()
    return is_same and not _BACKGROUNDS  # with the module go the thread and the memory of copies


def test_ranks_agree_beside_their_training(gloo_ranks: Any, tmp_path: Path) -> None:
    assert gloo_ranks.run(trains_meanwhile, str(tmp_path)) == [True] * 4
