"""Weights that torch.distributed.checkpoint wrote are read by consent, under the names that people give them; without it nothing is run."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import autopar
from autopar import CheckpointError
from tests.support.checkpoints import parallel_on
from tests.support.models.trained import SmallGpt, small_gpt


def other_gpt() -> SmallGpt:
    """With other values than `small_gpt()`."""
    model = small_gpt()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1 + number, parameter.numel(), dtype=parameter.dtype).view_as(parameter))
    return model


def are_equal(parallel: autopar.ParallelModule, model: nn.Module) -> bool:
    mine, theirs = parallel.full_state_dict(), model.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], value) for name, value in theirs.items())


def saved(folder: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture(scope="module")
def parallel() -> autopar.ParallelModule:
    return parallel_on({"tp": 2})


@pytest.fixture(autouse=True)
def fresh(parallel: autopar.ParallelModule) -> None:
    parallel.load_state_dict(small_gpt().state_dict())


@pytest.mark.parametrize("style", ["nested", "flat", "compiled", "checkpointed"])
def test_names_are_found_as_people_write_them(tmp_path: Path, parallel: autopar.ParallelModule, style: str) -> None:
    model = other_gpt()
    weights, step = model.state_dict(), torch.tensor(3)
    optimizer = {f"state.{name}.exp_avg": torch.zeros_like(value) for name, value in weights.items()}
    state = {
        "nested": {"model": weights, "optimizer": optimizer, "step": step},  # of FSDP2 scripts
        "flat": {**weights, "optimizer": optimizer, "train_state": {"step": step}},  # of torchtitan
        "compiled": {"app": {"model": {f"_orig_mod.{name}": value for name, value in weights.items()}, "optim": optimizer}},
        "checkpointed": {
            "model": {name.replace("blocks.0.", "blocks.0._checkpoint_wrapped_module."): value for name, value in weights.items()}
        },
    }[style]
    autopar.import_dcp(saved(tmp_path, state), parallel, allow_pickle=True)
    assert are_equal(parallel, model)


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_without_consent_nothing_is_unpickled(tmp_path: Path, parallel: autopar.ParallelModule) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Malicious(tmp_path / "ran")))
    with pytest.raises(
        CheckpointError, match="is a pickle, and reading it can run any code that its writer put there: pass allow_pickle=True"
    ):
        autopar.import_dcp(tmp_path, parallel)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(CheckpointError, match="cannot be read"):  # by consent it is run, and is no metadata
        autopar.import_dcp(tmp_path, parallel, allow_pickle=True)
    assert (tmp_path / "ran").exists() and are_equal(parallel, small_gpt())
    with pytest.raises(CheckpointError, match="has no .metadata: it is no folder of torch.distributed.checkpoint"):
        autopar.import_dcp(tmp_path / "nowhere", parallel, allow_pickle=True)


def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path: Path, parallel: autopar.ParallelModule) -> None:
    weights = other_gpt().state_dict()

    def refused(name: str, state: dict[str, Any], message: str, **options: Any) -> None:
        with pytest.raises(CheckpointError, match=message):
            autopar.import_dcp(saved(tmp_path / name, state), parallel, allow_pickle=True, **options)
        assert are_equal(parallel, small_gpt())

    refused("less", {name: value for name, value in weights.items() if name != "norm.bias"}, "'norm.bias' is not there, nor 0 others")
    refused("more", {"model": {**weights, "blocks.7.w": torch.zeros(2)}}, "'blocks.7.w'")
    refused(
        "shape", {**weights, "norm.bias": torch.zeros(3, dtype=torch.float64)}, r"'norm.bias' is float64\[3\] there and float64\[16\] here"
    )
    refused("dtype", {name: value.float() for name, value in weights.items()}, r"float32\[.*cast=True")
    both = {"model": weights, "ema": {name: value + 1 for name, value in weights.items()}}
    refused("two", both, "has several tensors called '.*', behind 'ema.', 'model.': say which by prefix=")
    autopar.import_dcp(tmp_path / "two", parallel, allow_pickle=True, prefix="ema.")
    assert torch.equal(parallel.full_state_dict()["norm.bias"], weights["norm.bias"] + 1)
    autopar.import_dcp(tmp_path / "dtype", parallel, allow_pickle=True, cast=True)
    assert torch.equal(parallel.full_state_dict()["norm.bias"], weights["norm.bias"].float().double())


@pytest.mark.parametrize("number", [0.3, 0.9])
def test_a_file_that_ends_early_is_found_before_anything_changes(tmp_path: Path, parallel: autopar.ParallelModule, number: float) -> None:
    (file,) = saved(tmp_path, {"model": other_gpt().state_dict()}).glob("*.distcp")
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * number)])
    with pytest.raises(CheckpointError, match="cannot be read"):
        autopar.import_dcp(tmp_path, parallel, allow_pickle=True)
    assert are_equal(parallel, small_gpt())


def on_ranks(folder: str) -> bool:
    """FSDP2 on four ranks writes, dp2 × tp2 reads."""
    model = other_gpt()
    fully_shard(model, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)))
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    dist.barrier()
    parallel = parallel_on({"dp": 2, "tp": 2}, real=True)
    autopar.import_dcp(folder, parallel, allow_pickle=True)
    return are_equal(parallel, other_gpt())


def test_what_fsdp2_writes_is_read_on_another_mesh(gloo_ranks: Any, tmp_path: Path) -> None:
    assert gloo_ranks.run(on_ranks, str(tmp_path)) == [True] * 4


def test_a_tensor_that_was_saved_in_part_is_refused(tmp_path: Path, parallel: autopar.ParallelModule) -> None:
    """DCP itself leaves what is missing as it was in memory."""
    folder = saved(tmp_path / "part", {"model": other_gpt().state_dict()})
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    name = next(iter(metadata.state_dict_metadata))
    metadata.state_dict_metadata[name].chunks.clear()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=f"'{name}' of shape .* is not whole: nothing of it was saved"):
        autopar.import_dcp(folder, parallel, allow_pickle=True)
    assert are_equal(parallel, small_gpt())
