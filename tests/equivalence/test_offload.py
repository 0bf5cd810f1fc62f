"""Steps of which some things lie in host memory or in files: the same losses and gradients, and less on the device."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.driver.train_step import TrainStep
from autopar.errors import MemoryBudgetError, OffloadError
from autopar.ir.instructions import Copy
from autopar.plans.plan import Offloaded
from autopar.runtime.execute.world import local_of
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.offload.copier import _COPIERS, Copier
from tests.support.forks import in_a_fork
from tests.support.models.vision import resnet
from tests.support.models.zoo import Case, gpt2, llama

ALL = {"smallest_bytes": 0}


def compiled(case: Case, mesh: Any, offload: autopar.Offload | str | None, **options: Any) -> ParallelModule:
    torch.manual_seed(0)
    return autopar.compile(case.model, mesh, example_inputs=case.batch, offload=offload, **{"backend": "eager"} | options)


def copies(parallel: ParallelModule) -> list[Copy]:
    return [each for schedule in parallel.compiled.schedules for each in schedule.instructions if isinstance(each, Copy)]


CASES: dict[str, tuple[Callable[..., Case], dict[str, int], dict[str, Any]]] = {
    "tp": (llama, {"tp": 2}, {}),
    "pp with microbatches": (gpt2, {"pp": 2}, {"num_microbatches": 4}),
    "recompute": (gpt2, {"dp": 2}, {"recompute": "selective"}),
    "zero": (llama, {"dp": 2}, {"zero": 3}),
    "conv": (resnet, {"dp": 2}, {}),
}


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("tp", "host"), ("pp with microbatches", "file"), ("recompute", "host"), ("zero", "host"),
        *(pytest.param(*each, marks=SLOW) for each in [("tp", "file"), ("pp with microbatches", "host"), ("recompute", "file"),
                                                      ("zero", "file"), ("conv", "host"), ("conv", "file")]),
    ],
)  # fmt: skip
def test_activations_are_exact(name: str, place: Any, tmp_path: Path) -> None:
    model, axes, options = CASES[name]
    case = model(4 if "recompute" in options else 1 if model is resnet else 2, dropout=0.1)
    offload = autopar.Offload(activations=place, folder=str(tmp_path) if place == "file" else None, **ALL)
    parallel = compiled(case, autopar.virtual_mesh(**axes), offload, **options)
    assert {each.memory for each in copies(parallel)} == {place, "device"}
    report = parallel.verify(**case.batch)
    assert report, report
    assert not list(tmp_path.iterdir())


class Phases(nn.Module):
    """The backward reads conjugates."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(8, 2), nn.Tanh(), nn.Linear(2, 8))
        self.after = nn.Sequential(nn.Linear(8, 2), nn.Tanh(), nn.Linear(2, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.before(x)
        z = torch.complex(h, h.cos())
        w = z.conj() * z.exp()
        return (self.after(w.imag).square() * z.conj().imag * w.real).mean()


@pytest.mark.parametrize("promote", [False, True])
def test_conjugates_are_exact(promote: bool) -> None:
    torch.manual_seed(0)
    case = Case(Phases(), {"x": torch.randn(32, 8)})
    plan = compiled(case, autopar.virtual_mesh(tp=2), None).plan
    plan = replace(plan, offloaded=Offloaded("host", (("_conj_physical_default", "exp_default"),)))
    parallel = compiled(case, autopar.virtual_mesh(tp=2), None, plan=plan)
    assert {"_conj_physical_default", "exp_default"} <= {name for each in copies(parallel) for name in each.sources}
    report = parallel.verify(**case.batch, promote=promote)
    assert report and (not promote or report.worst <= 1e-9), report
    assert parallel.memory().peak_bytes > 0


@pytest.mark.parametrize(("axes", "options"), [({"tp": 2}, {}), ({"pp": 2}, {"num_microbatches": 4})])
def test_the_peak_falls_by_what_is_moved_and_is_what_was_predicted(axes: dict[str, int], options: dict[str, Any]) -> None:
    found = {}
    for offload in (None, autopar.Offload(activations="host", **ALL)):
        case = gpt2(4).to(torch.float32)
        parallel = compiled(case, autopar.virtual_mesh(**axes), offload, **options)
        found[offload is not None] = parallel.memory(measure=case.batch)
        for predicted, tracked, at in found[offload is not None].measured.values():
            assert predicted == pytest.approx(tracked, rel=1e-3), at
    plain, away = found[False], found[True]
    for rank, (_, tracked, _) in away.measured.items():
        assert tracked < plain.measured[rank].tracked_bytes
    assert any(each.parked_bytes["host"] > 0 for each in away.places if each.parked_bytes)
    assert "besides, away from the device" in str(away) and "in host memory" in str(away)
    assert "away from the device" not in str(plain)


def test_a_training_step_with_updates_is_the_same() -> None:
    weights = []
    for offload in (None, autopar.Offload(activations="host", **ALL)):
        torch.manual_seed(0)
        case = gpt2(2)
        parallel = compiled(case, autopar.virtual_mesh(tp=2), offload, optimizer=(torch.optim.AdamW, {"lr": 1e-2}))
        for _ in range(2):
            parallel.train_step(**case.batch)
        weights.append(torch.cat([each.detach().flatten() for each in parallel.parameters()]))
    assert copies(parallel)
    assert torch.equal(*weights)


def test_under_a_budget_as_little_as_it_takes() -> None:
    mesh, options = autopar.virtual_mesh(tp=2), {"recompute": "none", "cluster": "cpu"}
    plain = compiled(gpt2(2), mesh, None, **options).memory().peak_bytes
    budgets: list[float | None] = [plain, 0.93 * plain, None]
    found = [compiled(gpt2(2), mesh, autopar.Offload("host", **ALL), memory_budget=budget, **options) for budget in budgets]
    fitting, some, everything = found
    assert not copies(fitting) and "nothing is moved, it fits" in fitting.explain(detail="offload")
    assert some.memory().fits and 0 < some.memory().places[0].parked_bytes["host"] < everything.memory().places[0].parked_bytes["host"]
    assert some.verify(**gpt2(2).batch)
    text = r"too much, .*Offload\(activations='host'\) moves all that is away long enough\nways out:\n  memory_budget='\d+ B'"
    with pytest.raises(MemoryBudgetError, match=f"(?s){text}"):
        compiled(gpt2(2), mesh, autopar.Offload("host", **ALL), memory_budget=0.3 * plain, **options)


@SLOW
def test_the_default_backend() -> None:
    case = gpt2(1)
    parallel = compiled(case, autopar.virtual_mesh(tp=2), autopar.Offload(activations="host", **ALL), backend="inductor")
    assert copies(parallel)
    report = parallel.verify(**case.batch)
    assert report, report


def test_what_it_says() -> None:
    case = gpt2(2)
    parallel = compiled(case, autopar.virtual_mesh(pp=2), autopar.Offload(activations="host", **ALL), cluster="cpu")
    text = parallel.explain(detail="offload")
    assert "pp = 0, activations: " in text and "to host memory and back; at most" in text and "of a step on paper" in text
    assert "COPY host (" in str(parallel.compiled.schedule) and "COPY device (" in str(parallel.compiled.schedule)


def no_drive(*args: Any) -> int:
    raise OSError(5, "no drive")


def forked_and_failed(folder: Path) -> tuple[weakref.ref[Copier], int]:
    """A module that goes on after a fork and after errors; its copier and file."""
    case = gpt2(1)
    parallel = compiled(case, autopar.virtual_mesh(tp=2), autopar.Offload(activations="file", folder=str(folder), **ALL))

    def total() -> float:
        return float(sum(each.grad.abs().sum() for each in parallel.parameters()))

    def step() -> float:
        parallel.zero_grad()
        parallel(**case.batch).loss.backward()
        return total()

    def in_the_child() -> str:
        with pytest.raises(OffloadError, match="forked off in the middle of a step"):
            loss.backward()
        return str(step())

    wanted = step()
    (copier,) = _COPIERS[parallel._world].values()
    most = copier.file.taken_bytes
    parallel.zero_grad()
    loss = parallel(**case.batch).loss
    if torch.version.cuda is None:  # With torch's builds for GPUs no fork of a process that has traced a backward runs one.
        assert in_a_fork(in_the_child) == str(wanted)
    loss.backward()
    assert total() == wanted
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            with patch.object(os, "preadv", no_drive), pytest.raises(OffloadError, match="no drive"):
                step()
            copier._worker.submit("nothing", int).result()  # behind what is under way
            assert copier.file.used_bytes == 0
    finally:
        gc.enable()
    assert step() == wanted and copier.file.taken_bytes == most
    return weakref.ref(copier), copier.file._file


def test_forks_errors_and_the_end(tmp_path: Path) -> None:
    copier, file = forked_and_failed(tmp_path)
    gc.collect()
    assert copier() is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def on_a_process() -> tuple[bool, float, float, int]:
    case = gpt2(2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    parallel = compiled(case, mesh, autopar.Offload(activations="host", **ALL), timeout=120, num_microbatches=2)
    (measured, *_) = [parallel.memory(measure=case.batch).measured[dist.get_rank()]]
    return bool(parallel.verify(**case.batch)), measured.predicted_bytes, measured.tracked_bytes, len(copies(parallel))


def test_processes(gloo_ranks: Any) -> None:
    for is_exact, predicted, tracked, number in gloo_ranks.run(on_a_process):
        assert is_exact and number
        assert 0.95 * tracked <= predicted <= 1.10 * tracked


# ---- the optimizer on the host

STEPS: dict[str, tuple[Any, dict[str, int], dict[str, Any], TrainStep]] = {
    "tp": ("host", {"tp": 2}, {}, TrainStep()),
    "pp": ("file", {"pp": 2}, {"num_microbatches": 4}, TrainStep(ema=0.9, accumulate=2)),
    "zero": ("file", {"dp": 2}, {"zero": 3, "recompute": "full"}, TrainStep(clip_grad_norm=0.1)),
}
ADAM = (torch.optim.AdamW, {"lr": 1e-2})


def trained(case: Case, mesh: Any, offload: Any, number: int = 4, **options: Any) -> ParallelModule:
    parallel = compiled(case, mesh, offload, optimizer=ADAM, **options)
    parallel.seed = 3
    for _ in range(number):
        parallel.train_step(**case.batch)
    return parallel


@pytest.mark.parametrize("name", STEPS)
def test_updates_on_the_host_are_the_same(name: str, tmp_path: Path) -> None:
    where, axes, options, step = STEPS[name]
    states = []
    for offload in (None, autopar.Offload(optimizer=where, activations=where, folder=str(tmp_path), **ALL)):
        torch.manual_seed(0)
        parallel = trained(gpt2(2), autopar.virtual_mesh(**axes), offload, train_step=step, **options)
        states.append((parallel.state_dict(), parallel.train_state_dict()))
        memory = parallel.memory()
        assert all((each.kinds.get("optimizer", 0) == 0) == (offload is not None) for each in memory.places)
        assert all((each.parked_bytes.get(where, 0) > 0) == (offload is not None) for each in memory.places)
        assert not list(tmp_path.iterdir())
        told = f"of state a rank in {'files' if where == 'file' else 'host memory'}"
        assert (told in parallel.explain(detail="offload")) == (offload is not None)
    (one, with_one), (two, with_two) = states
    assert all(torch.equal(one[key], two[key]) for key in one)
    for key, state in with_one["optimizer"]["state"].items():
        for what, value in state.items():
            assert torch.equal(value, with_two["optimizer"]["state"][key][what])
    parallel.load_train_state_dict(with_one)  # into what is sealed
    parallel.train_step(**gpt2(2).batch)


def a_step_on_a_process(folder: Path) -> tuple[bool, bool]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for offload in (None, autopar.Offload(optimizer="file", folder=str(folder))):
        torch.manual_seed(0)
        case = gpt2(1)
        case = Case(case.model, {key: value.chunk(2)[dist.get_rank() // 2] for key, value in case.batch.items()})
        parallel = trained(case, mesh, offload, timeout=120, zero=2)
        if offload:
            autopar.save(folder / "kept", parallel, parallel.optimizer)
            autopar.load(folder / "kept", parallel, parallel.optimizer)
        parallel.train_step(**case.batch)
        found.append(parallel.full_state_dict())
    held = [local_of(value) for of in parallel.optimizer.state.values() for value in of.values() if value.ndim]
    return all(torch.equal(found[0][key], found[1][key]) for key in found[0]), bool(held)


def test_processes_update_on_the_host(gloo_ranks: Any, tmp_path: Path) -> None:
    assert gloo_ranks.run(a_step_on_a_process, tmp_path) == [(True, True)] * 4
