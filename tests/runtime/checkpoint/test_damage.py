"""Checkpoints that are killed, damaged or forged: what loads is whole and unchanged, everything else is refused, and nothing is run."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar import CheckpointError
from autopar.runtime.checkpoint.folders import checkpoints
from autopar.runtime.checkpoint.held import Held
from autopar.runtime.checkpoint.index import Index
from autopar.runtime.checkpoint.plan import assign
from autopar.runtime.checkpoint.ranks import Ranks
from autopar.runtime.checkpoint.reading import Reading
from autopar.runtime.checkpoint.save import Snapshot, write_out
from autopar.runtime.checkpoint.slices import whole
from autopar.runtime.checkpoint.tensor_file import write
from tests.support.checkpoints import all_of, are_equal, parallel_on
from tests.support.models.trained import batch

ALONE = Ranks(0, 1, lambda value, _: [value])
SHAPE = (512, 256)


def content(number: int) -> Snapshot:
    """Half a megabyte each of three kinds, all equal to the note."""
    tensors = {kind: {"a": torch.full(SHAPE, float(number))} for kind in ("model", "optimizer", "ema")}
    parts = [Held(each["a"], SHAPE, whole(SHAPE)).part(kind, "a") for kind, each in tensors.items()]
    training = {"seed": 0, "step": number, "num_calls": number, "loss_scale": None, "scaler": None}
    files = {f"{kind}-00000.safetensors": each for kind, each in tensors.items()}
    return Snapshot(Index(assign([parts]), training=training, note=number), files)


def saves_for_ever(folder: Path, told: int) -> None:
    for number in range(1, 10_000):
        write_out(folder, content(number), 2, ALONE)
        os.write(told, number.to_bytes(4, "big"))


def killed_while_saving(folder: Path, seconds: float, midway: bool) -> int:
    """The number of the last save that had returned, of a process that was killed after so many seconds of saving, or at the next moment
    at which it is seen `midway` through a save."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.close(reads)
        try:
            saves_for_ever(folder, writes)
        finally:
            os._exit(1)
    os.close(writes)
    first = os.read(reads, 4)
    time.sleep(seconds)
    end = time.monotonic() + 60
    while midway and not is_midway(child, folder) and time.monotonic() < end:
        os.kill(child, signal.SIGCONT)
        time.sleep(seconds / 100)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    later = b"".join(iter(lambda: os.read(reads, 4096), b""))
    os.close(reads)
    return int.from_bytes((first + later)[-4:], "big")


def is_midway(child: int, folder: Path) -> bool:
    """Whether the process, which is stopped to be looked at, has a save half done."""
    os.kill(child, signal.SIGSTOP)
    _, status = os.waitpid(child, os.WUNTRACED)
    assert os.WIFSTOPPED(status), "it has ended by itself"
    return any(each.name.startswith(".writing-") for each in folder.iterdir())


@pytest.mark.parametrize("number", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_a_save_that_is_killed_leaves_a_checkpoint(tmp_path: Path, number: int) -> None:
    """At any moment: of the last save that returned, or of the one after it."""
    chance, midway = random.Random(0), 0
    for trial in range(number):
        folder = tmp_path / str(trial)
        last = killed_while_saving(folder, chance.uniform(0, 0.3), midway=trial % 2 == 0)
        reading = Reading(checkpoints(folder)[-1])
        reading.check(0, 1)
        assert reading.index.note in (last, last + 1)
        for kind, name, stored in reading.index.stored():
            value = torch.empty(SHAPE)
            reading.read(name, stored, whole(SHAPE), value)
            assert (value == reading.index.note).all(), kind
        midway += any(each.name.startswith(".writing-") for each in folder.iterdir())
        write_out(folder, content(0), 2, ALONE)
        assert not any(each.name.startswith((".writing-", ".removing-")) for each in folder.iterdir())
        shutil.rmtree(folder)
    assert midway >= number / 2, "no save was seen half done"


@pytest.fixture(scope="module")
def trained() -> autopar.ParallelModule:
    parallel = parallel_on({"dp": 2})
    parallel.train_step(**batch(0))
    return parallel


@pytest.fixture(scope="module")
def good(trained: autopar.ParallelModule, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the next step, which the module has left behind: whatever is loaded of it shows."""
    folder = tmp_path_factory.mktemp("good")
    before = autopar.save(folder, trained)
    trained.train_step(**batch(1))
    path = autopar.save(folder, trained, note="good")
    autopar.load(before, trained)
    return path


@pytest.fixture
def bad(good: Path, tmp_path: Path) -> Path:
    return shutil.copytree(good, tmp_path / "run" / good.name)


def refused(path: Path, parallel: autopar.ParallelModule, *parts: str) -> None:
    """Loading it is refused by a text with these parts, and neither the module nor the disk around it is changed."""
    before, files = all_of(parallel), sorted(path.parent.parent.rglob("*"))
    with pytest.raises(autopar.AutoparError) as error:
        autopar.load(path, parallel)
    assert all(part in str(error.value) for part in parts) and len(str(error.value)) < 1500, error.value
    assert are_equal(before, all_of(parallel)) and sorted(path.parent.parent.rglob("*")) == files


@pytest.mark.parametrize("number", [25, pytest.param(200, marks=pytest.mark.slow)])
def test_every_flipped_bit_is_found(trained: autopar.ParallelModule, bad: Path, number: int) -> None:
    chance = random.Random(0)
    files = sorted(bad.iterdir())
    assert len(files) == 5
    trained.train_step(**batch(2))
    before = all_of(trained)
    for trial in range(number):
        file = files[trial % len(files)]
        content = file.read_bytes()
        changed, place = bytearray(content), chance.randrange(8 * len(content))
        changed[place // 8] ^= 1 << place % 8
        file.write_bytes(changed)
        with pytest.raises(CheckpointError) as error:
            autopar.load(bad, trained)
        assert file.name in str(error.value), f"bit {place} of {file.name}: {error.value}"
        file.write_bytes(content)
    assert are_equal(before, all_of(trained))
    assert autopar.load(bad, trained) == "good" and not are_equal(before, all_of(trained))


def test_files_that_are_cut_or_missing_are_found(trained: autopar.ParallelModule, bad: Path) -> None:
    for file in sorted(bad.iterdir()):
        content = file.read_bytes()
        for length in (0, 7, len(content) // 2, len(content) - 1):
            file.write_bytes(content[:length])
            with pytest.raises(CheckpointError, match=file.name):
                autopar.load(bad, trained)
        file.write_bytes(content + b" ")
        with pytest.raises(CheckpointError, match=file.name):
            autopar.load(bad, trained)
        file.unlink()
        refused(bad, trained, file.name)
        file.symlink_to("/etc/passwd")
        refused(bad, trained, file.name)
        file.unlink()
        file.write_bytes(content)


@pytest.mark.parametrize("name", ["SHA256SUMS", "index.json", "model-00000.safetensors"])
@pytest.mark.parametrize("length", [None, 100, -1], ids=["missing", "cut", "changed"])
def test_a_damaged_file_is_named_with_the_checkpoints_beside_it(
    trained: autopar.ParallelModule, tmp_path: Path, name: str, length: int | None
) -> None:
    run = tmp_path / "runs" / "run"
    paths = [autopar.save(run, trained, keep=3) for _ in range(3)]
    file = paths[-1] / name
    content = file.read_bytes()
    file.unlink()
    if length is not None:
        file.write_bytes(content[:length] + b"x" * (length < 0))
    refused(run, trained, name, f". Beside it are the checkpoints {paths[0].name}, {paths[1].name}: load one by its own path")
    autopar.load(paths[1], trained)


def test_an_index_of_another_checkpoint_is_found(trained: autopar.ParallelModule, bad: Path, tmp_path: Path) -> None:
    other = autopar.save(tmp_path / "other", trained, note="other")
    shutil.copy(other / "index.json", bad / "index.json")
    refused(bad, trained, "index.json is damaged: its SHA-256")
    shutil.copy(other / "SHA256SUMS", bad / "SHA256SUMS")
    trained.train_step(**batch(3))
    third = autopar.save(tmp_path / "other", trained)
    shutil.copy(third / "index.json", bad / "index.json")
    shutil.copy(third / "SHA256SUMS", bad / "SHA256SUMS")
    refused(bad, trained, "safetensors is damaged: its SHA-256")


class Evil:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


def forge(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the index, and let its sums be right."""
    index = json.loads((path / "index.json").read_text())
    change(index)
    (path / "index.json").write_text(json.dumps(index))
    sign(path)


def sign(path: Path) -> None:
    files = (each for each in sorted(path.iterdir()) if each.name != "SHA256SUMS")
    (path / "SHA256SUMS").write_text("".join(f"{hashlib.sha256(each.read_bytes()).hexdigest()}  {each.name}\n" for each in files))


def entry(index: dict[str, Any]) -> dict[str, Any]:
    return index["tensors"]["model"]["embedding.weight"]


def piece(index: dict[str, Any]) -> dict[str, Any]:
    return entry(index)["pieces"][0]


def of_state(index: dict[str, Any]) -> dict[str, Any]:
    return index["optimizer"]["state"]


FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a path upwards": (lambda index: piece(index).update(file="../../../etc/passwd"), "a piece that is none"),
    "a path upwards with the right end": (lambda index: piece(index).update(file="../x.safetensors"), "a piece that is none"),
    "an absolute path": (lambda index: piece(index).update(file="/etc/x.safetensors"), "a piece that is none"),
    "a hidden file": (lambda index: piece(index).update(file=".x.safetensors"), "a piece that is none"),
    "a file without a sum": (lambda index: piece(index).update(file="x.safetensors"), "which is not in SHA256SUMS"),
    "a number for a file": (lambda index: piece(index).update(file=3), "a piece that is none"),
    "overlapping pieces": (lambda index: entry(index)["pieces"].append(piece(index)), "pieces overlap"),
    "too few elements": (lambda index: piece(index).update(slices=[[[0, 31]], [[0, 16]]]), "elements are in no piece"),
    "elements beyond the end": (lambda index: piece(index).update(slices=[[[1, 33]], [[0, 16]]]), "do not ascend within a dim of 32"),
    "elements before the start": (lambda index: piece(index).update(slices=[[[-1, 31]], [[0, 16]]]), "a piece that is none"),
    "runs that overlap": (lambda index: piece(index).update(slices=[[[0, 20], [12, 24]], [[0, 16]]]), "do not ascend"),
    "text for a number": (lambda index: piece(index).update(slices=[[["0", 32]], [[0, 16]]]), "a piece that is none"),
    "another shape": (lambda index: entry(index).update(shape=[16, 32]), "do not ascend"),
    "an immense shape": (lambda index: entry(index).update(shape=[2**40, 2**40]), "is wrong"),
    "an immense number": (lambda index: entry(index).update(shape=[10**4000]), "is wrong"),
    "a shape that is none": (lambda index: entry(index).update(shape="32"), "is wrong"),
    "another dtype": (lambda index: entry(index).update(dtype="int64"), "and the index int64"),
    "a dtype that is none": (lambda index: entry(index).update(dtype="__class__"), "is wrong"),
    "no pieces": (lambda index: entry(index).update(pieces=[]), "is wrong"),
    "a name less": (lambda index: index["tensors"]["model"].pop("norm.bias"), "for 'norm.bias', and the index nothing"),
    "a name more": (lambda index: index["tensors"]["model"].update({"more": entry(index)}), "nothing for 'more'"),
    "another version": (lambda index: index.update(version=2), "is of version 2 of the format"),
    "another format": (lambda index: index.update(format="x"), "is no index"),
    "an extra state": (lambda index: index["extra"].update({"__class__._extra_state": 3}), "is an extra state there and missing here"),
    "a tie": (lambda index: index["ties"].update({"a": "norm.bias"}), "is tied to 'norm.bias' there"),
    "training that is none": (lambda index: index.update(training={"seed": "x"}), "is no index"),
    "an optimizer that is none": (lambda index: index.update(optimizer={"class": "AdamW"}), "is no index"),
    "another optimizer": (lambda index: index["optimizer"].update({"class": "SGD"}), "has the state of the optimizer SGD"),
    "a group more": (lambda index: index["optimizer"]["groups"].append(index["optimizer"]["groups"][0]), "has 2 groups"),
    "state of nobody": (lambda index: of_state(index).update({"x": {"dict": []}}), "which is no parameter"),
    "state that is none": (lambda index: of_state(index).update({"norm.bias": {"dict": [1]}}), "where a value should stand"),
    "state without a tensor": (lambda index: of_state(index)["norm.bias"].update(dict=[["a", {"tensor": "x"}]]), "is not in the index"),
    "a pickle in the state": (lambda index: of_state(index)["norm.bias"].update(dict=[["a", {"pickle": "x"}]]), "a value should stand"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_index_is_refused(trained: autopar.ParallelModule, bad: Path, name: str) -> None:
    change, problem = FORGERIES[name]
    forge(bad, change)
    refused(bad, trained, problem, *([str(bad)] if name != "a group more" else []))


def test_pickles_are_never_read(trained: autopar.ParallelModule, bad: Path, tmp_path: Path) -> None:
    mark = tmp_path / "run" / "mark"
    for file in ("model-00000.safetensors", "index.json", "SHA256SUMS"):
        content = (bad / file).read_bytes()
        (bad / file).write_bytes(pickle.dumps(Evil(mark)))
        if file != "SHA256SUMS":
            sign(bad)
        refused(bad, trained, file)
        torch.save({"a": Evil(mark)}, bad / file)
        if file != "SHA256SUMS":
            sign(bad)
        refused(bad, trained, file)
        (bad / file).write_bytes(content)
        sign(bad)
    assert not mark.exists()


def test_forged_files_are_refused(trained: autopar.ParallelModule, bad: Path) -> None:
    file = bad / "model-00000.safetensors"
    for tensors, problem in (
        ({"embedding.weight": torch.zeros(32, 16)}, r"has float32[32, 16] for 'embedding.weight', and the index float64[32, 16]"),
        ({"embedding.weight": torch.zeros(16, 32, dtype=torch.float64)}, "has float64[16, 32] for 'embedding.weight'"),
        ({"x": torch.zeros(1)}, "for 'x', and the index nothing"),
    ):
        file.unlink()
        write(file, tensors)
        sign(bad)
        refused(bad, trained, str(file), problem)
    deep = b'{"format": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    (bad / "index.json").write_bytes(deep)
    sign(bad)
    refused(bad, trained, "index.json")


def test_folders_without_a_checkpoint_are_refused(trained: autopar.ParallelModule, tmp_path: Path) -> None:
    refused(tmp_path / "none", trained, "there is no folder")
    (tmp_path / "some" / "00000001").mkdir(parents=True)
    refused(tmp_path / "some", trained, "00000001/SHA256SUMS cannot be read: No such file")
    (tmp_path / "some" / "00000001").rmdir()
    refused(tmp_path / "some", trained, "there is no checkpoint in")
