"""How many microbatches a call runs in, and in which order."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import ScheduleError
from autopar.mesh import Mesh
from autopar.pipeline.actions import PipelineSchedule
from autopar.pipeline.schedules import generate


def default_number(mesh: Mesh, batch_sizes: Sequence[int]) -> int:
    """The microbatches of a call that nobody chose a number for: without a pipeline 1, else the largest divisor of a rank's
    share of the batch up to four for each stage: more would leave less of each to compute, fewer leave ranks idle."""
    num_ranks = mesh.size_of(mesh.parts("pp"))
    share = min(batch_sizes, default=1) // mesh.size_of(mesh.parts("dp"))
    return max((number for number in range(1, 4 * num_ranks + 1) if share % number == 0), default=1) if num_ranks > 1 else 1


def pipeline_order(schedule: str | PipelineSchedule, mesh: Mesh) -> PipelineSchedule:
    """The order of the actions of every rank along `pp`. Raises `ScheduleError` for one that is made for other numbers."""
    num_ranks, number = mesh.size_of(mesh.parts("pp")), mesh.num_microbatches
    if isinstance(schedule, str):
        return generate(schedule, num_ranks, number)
    if (schedule.num_ranks, schedule.num_microbatches) != (num_ranks, number):
        raise ScheduleError(
            f"the schedule {schedule.name!r} is for {schedule.num_ranks} ranks and {schedule.num_microbatches} microbatches; this call "
            f"runs on pp = {num_ranks} with {number}: pass num_microbatches={schedule.num_microbatches}, or another schedule"
        )
    return schedule
