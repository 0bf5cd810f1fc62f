"""The clock of a finished program: what its fragments and collectives take, by the formulas that priced the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.cost.hardware.cluster import Cluster, Host
from autopar.cost.model import CostModel
from autopar.ir.instructions import Add, Launch, Run, Send, Wait
from autopar.pipeline.fragment_prices import fragment_seconds, host_seconds, on_paper
from autopar.pipeline.report import StepOnPaper
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.pipeline.simulate import simulate
from autopar.runtime.module.parallel_module import ParallelModule
from tests.support.captures import compiled


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().sum()


def parallel(axes: dict[str, int], **options: object) -> ParallelModule:
    return compiled(Mlp(), axes, {"x": torch.randn(64, 64)}, cluster="8xh100", **options)


def test_a_step_takes_its_fragments_and_what_of_its_collectives_is_exposed() -> None:
    found = parallel({"dp": 2}).compiled
    assert found.cost is not None
    program, seconds = found.schedule, fragment_seconds(found.schedule, found.cost)
    (schedule,) = program.places
    launches = [each for each in schedule.instructions if isinstance(each, Launch)]
    compute = sum(seconds(each) for each in schedule.instructions if isinstance(each, Run))
    assert launches and compute > 0

    def priced(factor: float) -> float:
        return simulate(program, lambda each: factor * seconds(each) if isinstance(each, Launch) else seconds(each)).step_seconds

    assert priced(0.0) == pytest.approx(compute)
    slow = simulate(program, lambda each: 1.0 if isinstance(each, Launch) else seconds(each))
    waited = [
        over - before
        for each, before, over in zip(schedule.instructions[1:], slow.instruction_seconds[0], slow.instruction_seconds[0][1:], strict=False)
        if isinstance(each, Wait)
    ]
    assert slow.step_seconds == pytest.approx(compute + sum(waited)) and sum(waited) > 0.9
    assert priced(1.0) <= compute + sum(map(seconds, launches))


def test_communication_that_the_same_core_does_slows_a_step_down() -> None:
    found = parallel({"dp": 2}).compiled
    cluster = Cluster.named("8xh100")

    def of(busy: float) -> float:
        slow = replace(cluster, inner=replace(cluster.inner, latency_seconds=1e-3, busy=busy))
        return on_paper(found.schedule, CostModel(slow, found.local.mesh)).step_seconds

    assert of(0.0) < of(0.5) < of(0.9)


def test_fragments_split_over_ranks_take_less() -> None:
    def of(axes: dict[str, int]) -> float:
        found = parallel(axes).compiled
        seconds = fragment_seconds(found.schedule, CostModel(Cluster.named("8xh100"), found.local.mesh))
        return sum(seconds(each) for each in found.schedule.places[0].instructions if isinstance(each, Run))

    assert of({"dp": 4}) < of({"dp": 1})


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_a_pipeline_written_out_takes_what_its_grid_takes(schedule: str) -> None:
    found = parallel({"pp": 2}, num_microbatches=4, schedule=schedule).compiled
    assert found.cost is not None
    grid = StepOnPaper(found.program, found.cost, found.order).simulation
    seconds = fragment_seconds(found.schedule, found.cost)

    def but_results(each: Run | Send | Launch) -> float:
        """The grid knows nothing of the loss that goes to the other ranks at the end."""
        return 0.0 if isinstance(each, Send) and each.transfer.startswith("results") else seconds(each)

    written = simulate(found.schedule, but_results)
    assert simulate(found.schedule, seconds).step_seconds > written.step_seconds
    assert written.step_seconds == pytest.approx(grid.step_seconds, rel=1e-3)
    assert written.busy_seconds == pytest.approx(grid.busy_seconds, rel=1e-3)
    assert written.peak_live_microbatches == grid.peak_live_microbatches


def test_a_send_and_a_collective_cost_their_bytes() -> None:
    found = parallel({"pp": 2, "dp": 2}, num_microbatches=2).compiled
    assert found.cost is not None
    program: ScheduleProgram = found.schedule
    schedule, seconds = program.places[0], fragment_seconds(program, found.cost)
    send = next(each for each in schedule.instructions if isinstance(each, Send) and each.transfer.startswith("0F"))
    latency, per_byte = found.cost.send()
    assert seconds(send) == pytest.approx(latency * len(send.buffers) + per_byte * sum(schedule.bytes_of(name) for name in send.buffers))
    launch = next(each for each in schedule.instructions if isinstance(each, Launch))
    size = float(sum(schedule.bytes_of(name) for name in launch.sources))
    assert seconds(launch) == found.cost.collective(launch.collective, launch.axes, size, size).seconds > 0


def test_the_host_is_on_paper_where_the_cluster_says_what_it_takes() -> None:
    found = parallel({"pp": 2}, num_microbatches=4).compiled
    assert found.cost is not None
    program, cluster = found.schedule, Cluster.named("8xh100")
    assert host_seconds(program, found.cost)(program.places[0].instructions[0]) == 0.0, "of a GPU nothing is said"

    def priced(**numbers: float) -> CostModel:
        return CostModel(replace(cluster, device=replace(cluster.device, host=Host(**numbers))), found.local.mesh)

    seconds = host_seconds(program, priced(instruction_seconds=1e-3, launch_seconds=1.0))
    instructions = program.places[0].instructions
    send = next(each for each in instructions if isinstance(each, Send))
    added = next(each for each in instructions if isinstance(each, Add))
    assert seconds(send) == pytest.approx(1e-3 + len(send.buffers))
    assert seconds(added) == pytest.approx(1e-3 + 3 * found.cost.memory_seconds(program.places[0].bytes_of(added.source)))
    bare, slow = (on_paper(program, cost).step_seconds for cost in (found.cost, priced(instruction_seconds=1e-3)))
    assert slow - bare >= 1e-3 * min(len(schedule.instructions) - 1 for schedule in program.places)
