"""The most that a rank takes in a step is what is predicted before it runs, by the allocator's own events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.cost import memory_walk
from autopar.ir.instructions import Launch
from autopar.reports.memory import Memory
from autopar.runtime._torch import AllocatorLog
from autopar.runtime.execute import flights
from autopar.runtime.execute.distributed import DistributedTransport
from autopar.runtime.execute.process_groups import ProcessGroups
from autopar.runtime.verify.tracked_memory import Tracker
from tests.passes.schedule.test_go_by_node import slow_inside
from tests.support.models.vision import resnet
from tests.support.models.zoo import Case, gpt2, llama
from tests.support.ranks import share

# Of ops that are neither convolutions nor unknown: scalars within ops.
CLOSE = 1e-3


def measured(case: Case, mesh: Any, batch: Any = None, **options: Any) -> Memory:
    case = case.to(torch.float32)
    parallel = autopar.compile(case.model, mesh, example_inputs=batch or case.batch, **{"backend": "eager"} | options)
    if options.get("backend") == "inductor":
        parallel(**case.batch).loss.backward()  # compiles
    return parallel.memory(measure=batch or case.batch)


@pytest.mark.parametrize(
    ("model", "axes", "most"), [(llama, {"dp": 2, "tp": 2}, CLOSE), (gpt2, {"pp": 2}, CLOSE), (resnet, {"tp": 2}, 0.1)]
)
def test_the_peak_of_every_rank_is_the_predicted_one(model: Callable[..., Case], axes: dict[str, int], most: float) -> None:
    found = measured(model(1), autopar.virtual_mesh(**axes))
    assert len(found.measured) == len(axes) * 2
    for predicted, tracked, at in found.measured.values():
        assert predicted == pytest.approx(tracked, rel=most), at


def test_temporaries_are_part_of_it() -> None:
    """A step whose widest values live inside one fragment: what lies between instructions is a small part."""

    class Wide(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight)[:, :, None].expand(-1, -1, 32).exp().sum((1, 2)).mean()

    x = torch.randn(16, 64)
    parallel = autopar.compile(Wide(), autopar.virtual_mesh(dp=2), example_inputs=(x,), backend="eager")
    (predicted, tracked, at), *_ = parallel.memory(measure=(x,)).measured.values()
    assert predicted == pytest.approx(tracked, rel=CLOSE) and at.startswith("RUN")
    assert tracked > parallel.timeline(x).peak_bytes[0] > 0


# ---- on processes


def on_a_process(axes: dict[str, int], is_paired: bool, options: dict[str, Any]) -> tuple[float, int]:
    """`is_paired`: gathers and scatters go between pairs of ranks, as they do with large tensors."""
    torch.manual_seed(0)
    case = llama(1)
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    batch = share(case.batch, mesh)
    with pytest.MonkeyPatch.context() as patch:
        if is_paired:
            patch.setattr(memory_walk, "PAIRED_BYTES", 1)
            patch.setattr(flights, "PAIRED_BYTES", 1)
        found = measured(case, mesh, batch, timeout=180, **options).measured
    assert len(found) == 4
    return found[dist.get_rank()][:2]


@pytest.mark.parametrize("is_paired", [False, True])
@pytest.mark.parametrize(
    ("axes", "options"), [({"dp": 2, "tp": 2}, {}), ({"dp": 4}, {"zero": 3}), ({"dp": 4}, {"zero": 3, "cluster": slow_inside()})]
)
def test_processes_take_what_is_predicted(gloo_ranks: Any, axes: dict[str, int], options: dict[str, Any], is_paired: bool) -> None:
    """Or a little less: products that are written into a bucket where they are made are counted beside it."""
    for predicted, tracked in gloo_ranks.run(on_a_process, axes, is_paired, options):
        assert 0.95 * tracked <= predicted <= 1.10 * tracked


def collectives_on_a_process() -> int:
    """Bytes that the allocator's log has left after many collectives whose tensors are all gone."""
    groups = ProcessGroups(init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), timeout=60)
    transport = DistributedTransport(groups, groups.mesh)
    launches = [Launch("all_reduce", "sum", ("dp",), ("a",), ("b",)), Launch("all_to_all", "copy", ("dp",), ("a",), ("b",))]
    transport.settle(True)
    with AllocatorLog() as log:
        for launch in launches * 100:
            transport.wait(transport.launch(launch, [torch.ones(4, 256)]))
    return sum(size for _, size in log.events)


def test_what_threads_of_gloo_let_go_of_late_is_not_counted_for_ever(gloo_ranks: Any) -> None:
    """Without settling, a third of them are."""
    assert gloo_ranks.run(collectives_on_a_process) == [0, 0, 0, 0]


def budgets_on_a_process() -> float:
    """A first `train_step`, which makes its state, in hardly more than it is said to take."""
    torch.manual_seed(0)
    case = gpt2(2).to(torch.float32)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    batch = {key: value.chunk(2)[dist.get_rank() // 2] for key, value in case.batch.items()}
    options = {"example_inputs": batch, "backend": "eager", "optimizer": torch.optim.AdamW, "timeout": 180, "memory_budget": "1 GB"}
    parallel = autopar.compile(case.model, mesh, **options)
    predicted = parallel.memory().peak_bytes
    (captured,) = parallel._captures.values()
    captured.compiled = replace(captured.compiled, budget=replace(captured.compiled.budget, capacity_bytes=predicted))
    parallel.train_step(**batch)
    return predicted


def test_state_that_a_first_step_makes_is_counted_once(gloo_ranks: Any) -> None:
    assert all(predicted > 0 for predicted in gloo_ranks.run(budgets_on_a_process))


def a_step_on_a_process(sizes: dict[str, int], num_samples: int) -> list[float]:
    """Of this rank, predicted and tracked, with the batch that it is given: the second `train_step`, when there is state."""
    torch.manual_seed(0)
    case = gpt2(2).to(torch.float32)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    batch = {key: value.repeat(num_samples, 1) for key, value in case.batch.items()}
    batch = {key: value.clone() for key, value in share(batch, mesh).items()}  # a view counts as all that it looks at
    parallel = autopar.compile(case.model, mesh, example_inputs=batch, backend="eager", optimizer=torch.optim.AdamW, timeout=180)
    parallel.train_step(**batch)
    call, *_ = parallel.start((), batch, updates=True)
    tracker = Tracker(call, [*parallel._held(), *batch.values()])
    with tracker:
        parallel._trainer.run(call, parallel, lambda: "")
    (trace,) = tracker.traces().values()
    return [parallel.memory().peak_bytes, trace.peak_bytes]


@pytest.mark.parametrize(("sizes", "most"), [({"dp": 2, "tp": 2}, 0.05), ({"tp": 4}, 0.0)])
def test_a_step_with_its_update_takes_what_is_predicted(gloo_ranks: Any, sizes: dict[str, int], most: float) -> None:
    """The batch and its copies included. Products that are written into a bucket where they are made are counted beside it."""
    for predicted, tracked in gloo_ranks.run(a_step_on_a_process, sizes, 2):
        assert tracked <= predicted <= (1 + most) * tracked
