"""Steps whose parameters lie in host memory or in files: the same losses, gradients and weights, and less on the device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.driver.train_step import TrainStep
from autopar.errors import AutoparError, MemoryBudgetError
from autopar.ir.instructions import Copy, Free
from autopar.ir.schedule import Schedule
from autopar.runtime.execute.world import local_of
from autopar.runtime.module.parallel_module import ParallelModule
from tests.support.models.zoo import Case, gpt2, llama

ALL: dict[str, Any] = {"smallest_bytes": 0}
HOST = autopar.Offload(parameters="host", **ALL)
ADAM = (torch.optim.AdamW, {"lr": 1e-2})
SLOW = pytest.mark.slow


def compiled(case: Case, mesh: Any, offload: autopar.Offload | str | None, **options: Any) -> ParallelModule:
    torch.manual_seed(0)
    return autopar.compile(case.model, mesh, example_inputs=case.batch, offload=offload, **{"backend": "eager"} | options)


def most_here(schedule: Schedule) -> int:
    """The most that copies of parameters take of the device at a time, on their way or there."""
    now = most = 0
    for each in schedule.instructions:
        if isinstance(each, Copy) and each.memory == "device" and ".here" in each.name:
            now += sum(map(schedule.bytes_of, each.targets))
            most = max(most, now)
        elif isinstance(each, Free):
            now -= sum(schedule.bytes_of(name) for name in each.buffers if ".here" in name)
    assert now == 0
    return most


CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp, zero 0": ({"dp": 2}, {"zero": 0}),
    "dp, zero 1": ({"dp": 2}, {"zero": 1}),
    "dp, zero 2": ({"dp": 2}, {"zero": 2, "num_microbatches": 2}),
    "dp, zero 3": ({"dp": 2}, {"zero": 3}),
    "tp": ({"tp": 2}, {}),
    "pp": ({"pp": 2}, {"num_microbatches": 2}),
    "recompute": ({"dp": 2, "tp": 2}, {"recompute": "full", "zero": 3}),
    "zero bubble": ({"pp": 2}, {"num_microbatches": 4, "schedule": "zb-h1", "recompute": "selective"}),
}


@pytest.mark.parametrize(
    ("name", "model"),
    [
        *((name, model) for name in ("dp, zero 0", "dp, zero 3", "tp", "pp") for model in (gpt2, llama)),
        *(pytest.param(name, gpt2, marks=SLOW) for name in ("dp, zero 1", "dp, zero 2", "recompute", "zero bubble")),
    ],
)
def test_steps_are_exact(name: str, model: Callable[..., Case]) -> None:
    axes, options = CASES[name]
    case = model(2, dropout=0.1)
    parallel = compiled(case, autopar.virtual_mesh(**axes), HOST, **options)
    assert parallel.compiled.stored == {name for name, _ in case.model.named_parameters()}
    report = parallel.verify(**case.batch, promote=True)
    assert report and report.worst <= 1e-9, report
    assert parallel.verify(**case.batch)


@pytest.mark.parametrize(("axes", "options"), [({"dp": 2}, {"zero": 0}), ({"pp": 2}, {"num_microbatches": 2})])
def test_the_peak_is_what_was_predicted_and_falls_by_what_is_away(axes: dict[str, int], options: dict[str, Any]) -> None:
    found: list[ParallelModule] = []
    tracked: list[dict[int, int]] = []
    for offload in (None, HOST):
        case = gpt2(6).to(torch.float32)
        parallel = compiled(case, autopar.virtual_mesh(**axes), offload, **options)
        measured = parallel.memory(measure=case.batch).measured
        assert all(each.predicted_bytes == each.tracked_bytes for each in measured.values()), measured
        found.append(parallel)
        tracked.append({rank: each.tracked_bytes for rank, each in measured.items()})
    for rank in tracked[0]:
        schedule = found[1].compiled.schedule_of(rank)
        names = zip(schedule.signature.inputs, schedule.inputs, strict=True)
        moved = sum(schedule.bytes_of(name) for item, name in names if item.kind == "parameter")
        assert 0 < moved - most_here(schedule) <= tracked[0][rank] - tracked[1][rank]
    memory = found[1].memory()
    assert all(each.parked_bytes["host"] > 0 and not each.kinds.get("optimizer") for each in memory.places)


class Deep(nn.Module):
    """Without casts to float32, so that it trains alike to the last digits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(each for _ in range(4) for each in (nn.Linear(16, 16), nn.Tanh())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) - x).square().mean()


def deep() -> Case:
    torch.manual_seed(1)
    return Case(Deep(), {"x": torch.randn(8, 16)}).to(torch.float64)


def trained(parallel: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights after three steps of a plain loop."""
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        parallel(**batch).backward()
        optimizer.step()
    return {name: each.detach() for name, each in parallel.named_parameters()}


LOOPS: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "dp, zero 3": ({"dp": 2}, {"zero": 3}, {"parameters": "host"}),
    "pp, files": ({"pp": 2}, {"num_microbatches": 2}, {"parameters": "file"}),
    "tp, all": ({"tp": 2}, {"recompute": "none"}, {"parameters": "file", "optimizer": "host", "activations": "host"}),
}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("in_one_call", [False, True])
def test_three_steps_are_those_of_plain_torch(name: str, in_one_call: bool, tmp_path: Path) -> None:
    (axes, options, places), case = LOOPS[name], deep()
    wanted = trained(copy.deepcopy(case.model), case.batch)
    places = places if in_one_call else {"parameters": places["parameters"]}
    offload = autopar.Offload(folder=str(tmp_path), **places, **ALL)
    parallel = compiled(case, autopar.virtual_mesh(**axes), offload, **options, optimizer=ADAM if in_one_call else None)
    for _ in range(3 if in_one_call else 0):
        parallel.train_step(**case.batch)
    found = dict(parallel.named_parameters()) if in_one_call else trained(parallel, case.batch)
    for key, value in wanted.items():
        assert torch.allclose(found[key], value, rtol=1e-9, atol=0), key
    assert len(parallel.compiled.stored) == 8 and not list(tmp_path.iterdir())  # files have no names
    assert parallel.verify(**case.batch)


def test_what_follows_a_step_reads_what_was_written() -> None:
    """Nothing of an earlier value stays on the device: parameters are the caller's, and what is written into them counts at once."""
    case = deep()
    parallel = compiled(case, autopar.virtual_mesh(dp=2), HOST)
    before = parallel(**case.batch).item()
    for each in parallel.parameters():
        each.data.mul_(0.5)  # which leaves no trace
    after = parallel(**case.batch).item()
    assert after != before and after == pytest.approx(case.model(**case.batch).item(), rel=1e-12)
    with torch.no_grad():
        assert parallel(**case.batch).item() == pytest.approx(after, rel=1e-12)


def test_checkpoints_go_from_the_device_to_the_host_and_on(tmp_path: Path) -> None:
    states: list[dict[str, torch.Tensor]] = []
    for zero, offload in ((0, None), (3, autopar.Offload(parameters="host", **ALL))):
        case = deep()
        parallel = compiled(case, autopar.virtual_mesh(dp=2), offload, optimizer=ADAM, zero=zero)
        if offload is not None:
            autopar.load(tmp_path / "run", parallel)
        parallel.train_step(**case.batch)
        if offload is None:
            autopar.save(tmp_path / "run", parallel)
            parallel.train_step(**case.batch)
        states.append(parallel.full_state_dict())
    assert all(torch.allclose(states[0][key], states[1][key], rtol=1e-9, atol=0) for key in states[0])


class Open(nn.Module):
    """Gives parameters away, one that it computes with and one that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(4, 4), nn.Parameter(torch.randn(3, 4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).square().mean(), "weight": self.layer.weight, "turned": self.layer.weight.t(), "other": self.other}


@pytest.mark.parametrize("axes", [{"dp": 2}, {"pp": 2}])
def test_a_parameter_that_is_a_result_is_handed_out(axes: dict[str, int]) -> None:
    model, x = Open(), torch.randn(4, 4)
    parallel = compiled(Case(model, {"x": x}), autopar.virtual_mesh(**axes), HOST, outputs="all")
    found = parallel(x=x)
    found["loss"].backward()
    with torch.no_grad():
        for output in (found, parallel(x=x)):
            assert torch.equal(output["weight"], model.layer.weight) and torch.equal(output["other"], model.other)
            assert torch.equal(output["turned"], model.layer.weight.t())
    assert parallel.verify(x=x)


def on_a_process(folder: Path) -> tuple[bool, float, int, bool, bool]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    states, measured, inside = [], [], False
    for offload in (None, HOST):
        torch.manual_seed(0)
        case = gpt2(2)
        case = Case(case.model, {key: value.chunk(2)[dist.get_rank() // 2] for key, value in case.batch.items()})
        parallel = compiled(case, mesh, offload, timeout=120, zero=3, optimizer=ADAM)
        measured.append(parallel.memory(measure=case.batch).measured[dist.get_rank()])
        parallel.train_step(**case.batch)
        if offload:
            autopar.save(folder / "kept", parallel)
            autopar.load(folder / "kept", parallel)
            inside = bool(parallel.verify(**case.batch))
        plain = torch.optim.SGD(parallel.parameters(), lr=1e-2)  # goes on by a plain loop
        parallel(**case.batch).loss.backward()
        plain.step()
        states.append(parallel.full_state_dict())
    same = all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    addresses = {local_of(each).data_ptr() % 4096 for each in parallel.parameters()}
    return same, measured[1].predicted_bytes, measured[1].tracked_bytes, inside, addresses == {0}


def test_processes(gloo_ranks: Any, tmp_path: Path) -> None:
    for same, predicted, tracked, is_exact, is_mapped in gloo_ranks.run(on_a_process, tmp_path):
        assert same and is_exact and is_mapped
        assert 0.95 * tracked <= predicted <= 1.10 * tracked


def test_a_budget_counts_what_the_device_holds() -> None:
    mesh, options = autopar.virtual_mesh(dp=2), {"zero": 0, "recompute": "none", "cluster": "cpu"}
    plain, away = (compiled(deep(), mesh, offload, **options).memory().peak_bytes for offload in (None, HOST))
    assert away < 0.7 * plain
    with pytest.raises(MemoryBudgetError):
        compiled(deep(), mesh, None, memory_budget=away, **options)
    case = deep()
    parallel = compiled(case, mesh, HOST, memory_budget=away, **options)
    assert parallel.memory().fits and parallel.memory().peak_bytes <= away
    parallel(**case.batch).backward()  # which the guard watches
    assert parallel.verify(**case.batch)
    with pytest.raises(MemoryBudgetError):
        compiled(deep(), mesh, HOST, memory_budget=0.5 * away, **options)


@SLOW
def test_the_default_backend() -> None:
    case = gpt2(1)
    parallel = compiled(case, autopar.virtual_mesh(dp=2), HOST, backend="inductor", zero=3)
    report = parallel.verify(**case.batch)
    assert report, report


def test_what_it_says() -> None:
    parallel = compiled(deep(), autopar.virtual_mesh(pp=2), "parameters", cluster="cpu")
    text = parallel.explain(detail="offload")
    assert "pp = 0, parameters: " in text and "in host memory, copied to the device " in text and "of state a rank in host memory" in text
    assert "COPY device (" in str(parallel.compiled.schedule) and "COPY host (" not in str(parallel.compiled.schedule)
    assert "besides, away from the device" in str(parallel.memory())


def test_refusals() -> None:
    case = deep()
    with pytest.raises(AutoparError, match=r"leave Offload\(parameters=\) out, or weight_versions"):
        compiled(case, autopar.virtual_mesh(pp=2), HOST, optimizer=ADAM, train_step=TrainStep(weight_versions="stash"))
    parallel = compiled(case, autopar.virtual_mesh(dp=2), HOST, optimizer=torch.optim.Adafactor)
    with pytest.raises(AutoparError, match=r"Adafactor is not known to update each number .* leave Offload\(parameters=\) out"):
        parallel.train_step(**case.batch)
