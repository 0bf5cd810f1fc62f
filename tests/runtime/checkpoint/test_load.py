"""What is loaded is, bit by bit, what was saved, on whatever mesh; what is not of this module is refused and changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import CheckpointError, LossScale, TrainStep
from autopar.runtime.checkpoint import load
from tests.support.checkpoints import ADAMW, all_of, are_equal, parallel_on, share
from tests.support.models.trained import Sm3, batch, small_gpt

ADAFACTOR = partial(torch.optim.Adafactor, lr=1e-2)


@pytest.fixture(scope="module")
def trained() -> autopar.ParallelModule:
    parallel = parallel_on({"dp": 2, "tp": 2})
    for step in range(2):
        parallel.train_step(**batch(step))
    return parallel


@pytest.fixture(scope="module")
def other() -> autopar.ParallelModule:
    """On another mesh, of other weights."""
    model = small_gpt(num_blocks=1)
    with torch.no_grad():
        for each in model.parameters():
            each.add_(1.0)
    return parallel_on({"pp": 2}, model)


def test_all_of_it_comes_back_on_another_mesh(trained: autopar.ParallelModule, other: autopar.ParallelModule, tmp_path: Path) -> None:
    path = autopar.save(tmp_path, trained, note={"position": 7, "rates": [0.1]})
    assert path == tmp_path / "00000001" and not are_equal_models(trained, other)
    assert autopar.load(tmp_path, other) == {"position": 7, "rates": [0.1]}
    assert are_equal(all_of(trained), all_of(other))
    assert other.train_state_dict()["num_calls"] == 2 and other.step == trained.step and other.seed == trained.seed


def test_what_the_optimizer_keeps_is_written_where_it_lies(tmp_path: Path) -> None:
    """No second copy of its state; but tensors that share memory get memory of their own."""
    parallel = parallel_on({"dp": 2})
    parallel.train_step(**batch(0))
    optimizer, first = parallel.optimizer, next(parallel.parameters())
    assert optimizer is not None
    autopar.save(tmp_path, parallel)
    saved = all_of(parallel)
    parallel.train_step(**batch(1))
    optimizer.state[first]["exp_avg"] = optimizer.state[first]["exp_avg_sq"]
    before = {(id(each), key): value for each, of in optimizer.state.items() for key, value in of.items() if key != "step"}
    autopar.load(tmp_path, parallel)
    assert are_equal(saved, all_of(parallel))
    after = {(id(each), key): value for each, of in optimizer.state.items() for key, value in of.items() if key != "step"}
    moved = {key for key in before if before[key].data_ptr() != after[key].data_ptr()}
    assert moved == {(id(first), "exp_avg"), (id(first), "exp_avg_sq")}


def are_equal_models(one: autopar.ParallelModule, other: autopar.ParallelModule) -> bool:
    return are_equal(one.full_state_dict(), other.full_state_dict())


@pytest.mark.parametrize("optimizer", [ADAFACTOR, Sm3, partial(torch.optim.SGD, lr=0.1, momentum=0.9)], ids=["adafactor", "sm3", "sgd"])
def test_optimizers_keep_what_they_have(optimizer: Any, tmp_path: Path) -> None:
    """Keys that are numbers, statistics of rows, None."""
    one, other = (parallel_on({"dp": 2}, optimizer=optimizer) for _ in range(2))
    one.train_step(**batch(0))
    autopar.save(tmp_path, one)
    autopar.load(tmp_path, other)
    assert are_equal(all_of(one), all_of(other))
    for step in (1, 2):
        one.train_step(**batch(step)), other.train_step(**batch(step))
    assert are_equal(all_of(one), all_of(other))


def place_of_step(is_fused: bool) -> str:
    """Where torch's own `load_state_dict` puts the step of a parameter on meta, by the options that were saved with it."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(2, device="meta"))])
    state = optimizer.state_dict()
    state["param_groups"][0]["fused"] = is_fused
    optimizer.load_state_dict({**state, "state": {0: {"step": torch.tensor(1.0)}}})
    return next(iter(optimizer.state.values()))["step"].device.type


@pytest.mark.parametrize("is_fused", [False, True])
def test_steps_lie_where_the_saved_options_say(is_fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for parameters on meta: here all lies on the CPU."""
    one, other = (parallel_on({"dp": 2}, optimizer=partial(ADAMW, fused=each)) for each in (is_fused, not is_fused))
    one.train_step(**batch(0))
    autopar.save(tmp_path, one)
    found, device = list[str](), load._device

    def asked(key: Any, place: Any) -> torch.device:
        if key == "step":
            found.append(device(key, replace(place, parameter=nn.Parameter(place.parameter.to("meta")))).type)
        return device(key, place)

    monkeypatch.setattr(load, "_device", asked)
    autopar.load(tmp_path, other)
    assert set(found) == {place_of_step(is_fused)} == {"meta" if is_fused else "cpu"}
    for each in (one, other):
        each.train_step(**batch(1))
    assert are_equal(all_of(one), all_of(other))


def test_a_plain_loop_passes_its_optimizer(tmp_path: Path) -> None:
    pairs = []
    for _ in range(2):
        parallel = parallel_on({"tp": 2}, optimizer=None, train_step=None)
        pairs.append((parallel, ADAMW(parallel.parameters()), parallel.scaler(LossScale(initial=4.0, growth_interval=1))))
    (one, ours, scaler), (other, theirs, also) = pairs
    scaler.scale(one(**batch(0))).backward()
    scaler.step(ours), scaler.update()
    autopar.save(tmp_path, one, ours)
    autopar.load(tmp_path, other, theirs)
    assert are_equal_models(one, other) and also.get_scale() == 8.0
    for mine, his in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours.state[mine]["exp_avg"], theirs.state[his]["exp_avg"])
    with pytest.raises(CheckpointError, match="has the state of the optimizer AdamW, and here there is no optimizer: pass optimizer="):
        autopar.load(tmp_path, other)


def test_the_model_alone_is_loaded_where_that_is_asked(
    trained: autopar.ParallelModule, other: autopar.ParallelModule, tmp_path: Path
) -> None:
    autopar.save(tmp_path, trained)
    plain = parallel_on({"dp": 2}, optimizer=None, train_step=None)
    with pytest.raises(CheckpointError, match="and here there is no optimizer"):
        autopar.load(tmp_path, plain)
    autopar.load(tmp_path, plain, model_only=True)
    assert are_equal_models(trained, plain) and plain.step == 0


def test_another_model_is_refused_and_nothing_changes(trained: autopar.ParallelModule, tmp_path: Path) -> None:
    autopar.save(tmp_path, trained)
    larger = parallel_on({"dp": 2}, small_gpt(num_blocks=2))
    before = all_of(larger)
    with pytest.raises(
        CheckpointError, match=r"is of another model: 'blocks.1.norm.weight' is missing there and float64\[16\] here; .* and 5 more"
    ):
        autopar.load(tmp_path, larger)
    half = parallel_on({"dp": 2}, small_gpt(torch.float32, num_blocks=1))
    with pytest.raises(
        CheckpointError, match=r"'embedding.weight' is float64\[32, 16\] there and float32\[32, 16\] here \(cast=True takes it\)"
    ):
        autopar.load(tmp_path, half)
    assert are_equal(before, all_of(larger)) and not half.optimizer.state
    autopar.load(tmp_path, half, cast=True)
    assert half.embedding.weight.dtype == torch.float32
    assert torch.equal(half.embedding.weight, trained.embedding.weight.float())
    moments = half.optimizer.state[half.embedding.weight]
    assert moments["exp_avg"].dtype == torch.float32 and moments["step"] == 2
    half.train_step(**batch(2))


def test_other_options_are_refused(trained: autopar.ParallelModule, tmp_path: Path) -> None:
    autopar.save(tmp_path, trained)
    with pytest.raises(CheckpointError, match="has the state of the optimizer AdamW, and here there is the optimizer SGD"):
        autopar.load(tmp_path, parallel_on({"dp": 2}, optimizer=torch.optim.SGD))
    with pytest.raises(autopar.AutoparError, match=r"averages \(ema=\) are in the saved state alone"):
        autopar.load(tmp_path, parallel_on({"dp": 2}, train_step=TrainStep()))
    fewer = parallel_on({"dp": 2})
    fewer.optimizer.param_groups[0]["params"].pop()
    with pytest.raises(autopar.AutoparError, match="'norm.bias' is in the saved optimizer's alone"):
        autopar.load(tmp_path, fewer)
    assert not fewer.optimizer.state


def goes_on(one: Mapping[str, int], other: Mapping[str, int], folder: str, optimizer: Any, zero: tuple[int, int]) -> tuple[bool, float]:
    """On gloo ranks: whether the state is equal after load on another mesh, and how far later steps then part."""
    first = parallel_on(one, real=True, optimizer=optimizer, zero=zero[0] or None)
    for step in range(2):
        first.train_step(**share(batch(step), one))
    autopar.save(folder, first, note={"at": 2})
    second = parallel_on(other, real=True, optimizer=optimizer, zero=zero[1] or None)
    assert autopar.load(folder, second) == {"at": 2}
    is_equal = are_equal(all_of(first), all_of(second))
    for step in range(2, 4):
        first.train_step(**share(batch(step), one))
        second.train_step(**share(batch(step), other))
    ended, also = all_of(first), all_of(second)
    return is_equal, max(float((ended[name] - also[name]).abs().max()) for name in ended)


DP_TP, PP_DP, TP, DP = {"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}, {"dp": 1, "tp": 4}, {"dp": 4}


@pytest.mark.parametrize(
    ("one", "other", "optimizer", "zero"),
    [
        (DP, PP_DP, ADAMW, (3, 1)),
        pytest.param(DP, DP_TP, ADAMW, (0, 3), marks=pytest.mark.slow),
        pytest.param(DP_TP, PP_DP, ADAMW, (3, 1), marks=pytest.mark.slow),
        pytest.param(PP_DP, TP, ADAFACTOR, (0, 0), marks=pytest.mark.slow),
        pytest.param(DP_TP, TP, Sm3, (0, 0), marks=pytest.mark.slow),
    ],
)
def test_processes_go_on_on_another_mesh(
    gloo_ranks: Any, tmp_path: Path, one: Mapping[str, int], other: Mapping[str, int], optimizer: Any, zero: tuple[int, int]
) -> None:
    for is_equal, difference in gloo_ranks.run(goes_on, one, other, str(tmp_path), optimizer, zero):
        assert is_equal and difference <= 1e-12, difference
    files = sorted(each.name for each in (tmp_path / "00000001").iterdir() if each.name.startswith("model"))
    assert len(files) == 4  # of a model that ranks hold alike, too, each writes a share
