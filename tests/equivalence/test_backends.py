"""What a user gets who names no backend, and who names another: one training step of each model, exact, by every backend.

A backend compiles the fragments, so a name it dislikes, a layout it assumes or an op it lowers wrongly shows nowhere else. The reports are
of the module's own run, with its backend and its transport: in the model's float32, and but for Inductor (for which it would be another
compile of everything) promoted to float64 as well.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar import Cluster, ParallelModule
from autopar.runtime.verify.report import Report
from tests.support.models import language, vision, zoo
from tests.support.models.zoo import Batch, Case
from tests.support.ranks import GlooRanks, share


@dataclass(frozen=True)
class Cell:
    """A model on a mesh of four ranks. `is_drawn`: its dropout draws other numbers than eager's, so that only programs can be compared."""

    make: Callable[[], Case]
    axes: tuple[tuple[str, int], ...] = (("dp", 2), ("tp", 2))
    number: int | None = None
    is_drawn: bool = False

    @property
    def reference(self) -> str:
        return "forward program" if self.is_drawn else "original model"


CELLS = {
    "gpt2": Cell(zoo.gpt2),
    "llama": Cell(zoo.llama),
    "bert": Cell(zoo.bert),
    "vit": Cell(zoo.vit),
    "resnet": Cell(vision.resnet),
    "mixtral": Cell(language.mixtral, (("tp", 4),)),  # dp cannot split its experts yet
    "pipeline": Cell(lambda: zoo.gpt2(2), (("pp", 2), ("tp", 2)), number=4),
    "dropout": Cell(lambda: zoo.gpt2(1, 0.1), is_drawn=True),
}
BACKENDS = ("inductor", "aot_eager", "eager")


def cases(backends: Iterable[str]) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.backends, id=", ".join(case)) for case in product(backends, CELLS)]


def parallel_and_reference(name: str, backend: str, mesh: Any) -> tuple[ParallelModule, torch.nn.Module, Batch]:
    """The parallel model in float32, as users have them, a plain copy, and the global batch."""
    torch.manual_seed(0)  # one model on all ranks
    cell = CELLS[name]
    case = cell.make().to(torch.float32)
    reference = copy.deepcopy(case.model)
    options: dict[str, Any] = {} if backend == "inductor" else {"backend": backend}  # the default is what is tested
    if cell.number is not None:
        options["num_microbatches"] = cell.number
    parallel = autopar.compile(case.model, mesh, example_inputs=share(case.batch, mesh), cluster=Cluster.ideal(), **options)
    return parallel, reference, case.batch


def step(parallel: ParallelModule, reference: torch.nn.Module, batch: Batch, mine: Batch) -> float:
    """One SGD step of both; by how much the losses and the parameters held here differ."""
    loss, wanted = parallel(**mine).loss, reference(**batch).loss
    worst = abs(float(loss.detach() - wanted.detach()))
    loss.backward()
    wanted.backward()
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, parameter in parallel.named_parameters():
        ours, theirs = parameter.grad, gradients[name]
        assert ours is not None and theirs is not None, name
        worst = max(worst, float((whole(parallel, ours, name) - theirs).abs().max()))
    return worst


def whole(parallel: ParallelModule, value: Tensor, name: str) -> Tensor:
    """Put together by us, as torch cannot where a fused weight is strided on two axes; on the ranks of one stage by torch."""
    if not isinstance(value, DTensor):
        return value
    return value.full_tensor() if parallel.mesh.parts("pp") else parallel._world.full(value, name)


def reports(name: str, backend: str, parallel: ParallelModule, reference: torch.nn.Module, batch: Batch, mine: Batch) -> list[Report]:
    if not CELLS[name].is_drawn:
        worst = step(parallel, reference, batch, mine)
        assert worst <= 1e-4, f"loss or a gradient is off by {worst}"
    plain = parallel.verify(**mine)
    return [plain] if backend == "inductor" else [plain, parallel.verify(promote=True, **mine)]


def assert_exact(name: str, found: list[Report]) -> None:
    for report, tolerance in zip(found, (1e-4, 1e-9), strict=False):
        assert report and report.worst <= tolerance and report.reference == CELLS[name].reference, str(report)


@pytest.mark.parametrize(("backend", "name"), cases(BACKENDS))
def test_a_step_on_virtual_ranks(backend: str, name: str) -> None:
    parallel, reference, batch = parallel_and_reference(name, backend, autopar.virtual_mesh(**dict(CELLS[name].axes)))
    assert_exact(name, reports(name, backend, parallel, reference, batch, batch))
    assert parallel.summary()["flops_split"] >= 0.95, parallel.explain()


def on_a_rank(name: str, backend: str) -> list[Report]:
    assert dist.get_world_size() == 4
    axes = dict(CELLS[name].axes)
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    parallel, reference, batch = parallel_and_reference(name, backend, mesh)
    return reports(name, backend, parallel, reference, batch, share(batch, mesh))


@pytest.mark.parametrize(("backend", "name"), cases(reversed(BACKENDS)))  # Inductor last: by then virtual ranks have filled its cache
def test_a_step_on_processes(backend: str, name: str, gloo_ranks: GlooRanks) -> None:
    for found in gloo_ranks.run(on_a_rank, name, backend, timeout=600.0):
        assert_exact(name, found)
