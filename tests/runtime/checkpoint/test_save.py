"""What a checkpoint's folder looks like, what is refused, and that nothing but a whole checkpoint is ever there."""

from __future__ import annotations

import fcntl
import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import autopar
from autopar import CheckpointError, TrainStep
from autopar.runtime.checkpoint import folders, tensor_file
from tests.support.checkpoints import all_of, are_equal, parallel_on, share
from tests.support.models.trained import batch, small_gpt


@pytest.fixture(scope="module")
def trained() -> autopar.ParallelModule:
    parallel = parallel_on({"dp": 2})
    parallel.train_step(**batch(0))
    return parallel


def names_in(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir() if each.name != ".lock")


def test_its_files_are_what_other_tools_read(trained: autopar.ParallelModule, tmp_path: Path) -> None:
    path = autopar.save(tmp_path, trained)
    assert names_in(path) == ["SHA256SUMS", "ema-00000.safetensors", "index.json", "model-00000.safetensors", "optimizer-00000.safetensors"]
    checked = subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=path, capture_output=True, text=True, check=True)
    assert checked.stdout.count(": OK") == 4
    assert are_equal(safetensors.torch.load_file(path / "model-00000.safetensors"), dict(trained.full_state_dict()))
    assert json.loads((path / "index.json").read_text())["note"] is None


def test_the_latest_stay_and_what_was_left_behind_goes(trained: autopar.ParallelModule, tmp_path: Path) -> None:
    for _ in range(2):
        autopar.save(tmp_path, trained)
    (tmp_path / ".writing-00000003").mkdir()
    (tmp_path / ".writing-00000003" / "model-00000.safetensors").write_bytes(b"half of it")
    (tmp_path / "mine").mkdir()
    outside = tmp_path / "mine" / "kept"
    outside.write_text("x")
    (tmp_path / ".removing-00000001").symlink_to(tmp_path / "mine")
    autopar.save(tmp_path, trained, note="third")
    assert names_in(tmp_path) == ["00000001", "00000002", "00000003", "mine"] and outside.exists()
    autopar.save(tmp_path, trained, keep=2)
    assert names_in(tmp_path) == ["00000003", "00000004", "mine"]
    assert autopar.load(tmp_path / "00000003", trained) == "third"
    with pytest.raises(CheckpointError, match="keep=0 would leave no checkpoint"):
        autopar.save(tmp_path, trained, keep=0)


@pytest.mark.parametrize("note", [{"a": (1, 2)}, {1: "a"}, math.nan, object(), torch.zeros(1)])
def test_a_note_is_json(trained: autopar.ParallelModule, tmp_path: Path, note: object) -> None:
    with pytest.raises(CheckpointError, match="note="):
        autopar.save(tmp_path, trained, note=note)
    assert names_in(tmp_path) == []


def test_a_failure_leaves_no_trace(trained: autopar.ParallelModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    autopar.save(tmp_path, trained)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensor_file, "_write_all", full)
    with pytest.raises(CheckpointError, match=r"cannot be written: No space left on device; it takes [\d,]+ bytes, [\d,]+ are free"):
        autopar.save(tmp_path, trained)
    monkeypatch.undo()
    assert names_in(tmp_path) == ["00000001"]
    assert autopar.save(tmp_path, trained).name == "00000002"


def test_one_process_saves_to_a_folder_at_a_time(trained: autopar.ParallelModule, tmp_path: Path) -> None:
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="another process is saving"):
            autopar.save(tmp_path, trained)
    autopar.save(tmp_path, trained)


def test_what_is_forked_meanwhile_holds_no_lock(trained: autopar.ParallelModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, lock = list[int](), fcntl.flock

    def forking(file: int, how: int) -> None:
        lock(file, how)
        held.append(os.dup(file))  # the same open file, as in a forked process

    def fails(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", forking)
    autopar.save(tmp_path, trained)
    with monkeypatch.context() as broken, pytest.raises(OSError, match="Input/output error"):
        broken.setattr(folders, "checkpoints", fails)
        autopar.save(tmp_path, trained)
    assert autopar.save(tmp_path, trained).name == "00000002" and held
    for each in held:
        os.close(each)


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    midway = parallel_on({"dp": 2}, train_step=TrainStep(accumulate=2))
    midway.train_step(**batch(0))
    with pytest.raises(autopar.AutoparError, match="1 of the 2 calls that make an update are done"):
        autopar.save(tmp_path, midway)
    strange = torch.optim.SGD([nn.Parameter(torch.zeros(3))])
    plain = parallel_on({"dp": 2}, optimizer=None, train_step=None)
    with pytest.raises(CheckpointError, match=r"a parameter of shape \[3\] that is none of the model's"):
        autopar.save(tmp_path, plain, strange)
    with pytest.raises(CheckpointError, match="has an optimizer of its own"):
        autopar.save(tmp_path, midway, strange)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain_optimizer.param_groups[0]["mine"] = object()
    with pytest.raises(CheckpointError, match="'group 0/mine' is a object"):
        autopar.save(tmp_path, plain, plain_optimizer)
    assert names_in(tmp_path) == []


class WithBuffers(nn.Module):
    """A buffer, one that is not persistent, a tie, and a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        self.count = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(self.first(x))).square().mean()

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


def test_buffers_ties_and_extra_state_are_in_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    one, other = (autopar.compile(WithBuffers(), autopar.virtual_mesh(dp=2), backend="eager") for _ in range(2))
    one.count = 5
    one(torch.randn(8, 4))
    path = autopar.save(tmp_path, one)
    assert autopar.load(tmp_path, other) is None
    assert other.count == 5 and torch.equal(one.norm.running_mean, other.norm.running_mean) and other.norm.num_batches_tracked == 1
    assert torch.equal(one.first.weight, other.second.weight) and other.first.weight is other.second.weight
    index = json.loads((path / "index.json").read_text())
    assert index["ties"] == {"second.weight": "first.weight"} and "passing" not in index["tensors"]["model"]
    untied = WithBuffers()
    untied.second = nn.Linear(4, 4, bias=False)
    with pytest.raises(CheckpointError, match="'second.weight' is tied to 'first.weight' there and float32"):
        autopar.load(tmp_path, autopar.compile(untied, autopar.virtual_mesh(dp=2), backend="eager"))


def saves(folder: str) -> list[str]:
    axes = {"dp": 2, "tp": 2}
    parallel = parallel_on(axes, small_gpt(num_blocks=1), real=True)
    parallel.train_step(**share(batch(0), axes))
    told = []
    for note in (torch.distributed.get_rank(), object() if torch.distributed.get_rank() == 2 else None):
        with pytest.raises(CheckpointError) as error:
            autopar.save(folder, parallel, note=note)
        told.append(str(error.value))
    autopar.save(folder, parallel, note="same")
    return told


def test_all_ranks_refuse_together(gloo_ranks: Any, tmp_path: Path) -> None:
    answers = gloo_ranks.run(saves, str(tmp_path))
    assert [notes for notes, _ in answers[1:]] == [
        f"ranks {rank} and 0 pass different notes, {rank} and 0: there is one for all. Gather what they have first "
        "(torch.distributed.all_gather_object)"
        for rank in (1, 2, 3)
    ]
    assert "is no JSON" in answers[2][1] and answers[0][1].startswith("rank 2 failed to tell what is to be saved: note= is no")
    assert names_in(tmp_path) == ["00000001"]
    whole = parallel_on({"tp": 2})
    assert autopar.load(tmp_path, whole) == "same" and all_of(whole)
