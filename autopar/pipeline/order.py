"""How many microbatches a call runs in, in which order, and how many of them are alive at once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from autopar.cost.model import CostModel
from autopar.errors import ScheduleError
from autopar.ir.actions import SINGLE, PipelineSchedule
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ir.sharding import shape_of
from autopar.pipeline.auto_schedule import auto_schedule
from autopar.pipeline.priced import price_pipeline
from autopar.pipeline.schedules import GENERATORS, generate


def default_number(mesh: Mesh, batch_sizes: Sequence[int]) -> int:
    """The microbatches of a call that nobody chose a number for: without a pipeline 1, else the largest divisor of a rank's
    share of the batch up to four for each stage: more would leave less of each to compute, fewer leave ranks idle."""
    num_ranks = mesh.size_of(mesh.parts("pp"))
    share = _share(mesh, batch_sizes)
    return max((number for number in range(1, 4 * num_ranks + 1) if share % number == 0), default=1) if num_ranks > 1 else 1


def _share(mesh: Mesh, batch_sizes: Sequence[int]) -> int:
    """What a number must divide so that it divides a rank's share of every input; 1 where none has a batch."""
    num_shares = mesh.num_shares
    return max(-(-math.gcd(*batch_sizes) // num_shares), 1)  # the largest share, to which the others are padded


def share_of(program: Program) -> int:
    """What a number of microbatches must divide, by the inputs of `program`."""
    return _share(program.mesh, batch_sizes(program))


def batch_sizes(program: Program, is_padded: bool = True) -> list[int]:
    """The samples of each input that has a batch dim, with their padding where `is_padded`."""
    inputs = [item for item in program.signature.inputs_of("batch") if item.batch_dim is not None]
    shapes = [shape_of(item.padding.after) if item.padding is not None and is_padded else item.shape for item in inputs]
    return [shape[item.batch_dim or 0] for item, shape in zip(inputs, shapes, strict=True)]


def chosen_schedule(
    schedule: str | PipelineSchedule | None,
    number: int | None,
    planned: PipelineSchedule | None,
    mesh: Mesh,
    batch_sizes: Sequence[int],
) -> tuple[str | PipelineSchedule, int]:
    """The schedule and the number of microbatches that the user asked for; else those of a plan that is for as many ranks and
    whose microbatches divide the batch; else the defaults."""
    num_ranks = mesh.size_of(mesh.parts("pp"))
    if schedule is None and planned is not None and planned.num_ranks == num_ranks:
        share = _share(mesh, batch_sizes)
        if number == planned.num_microbatches or (number is None and share % planned.num_microbatches == 0):
            return planned, planned.num_microbatches
    return schedule or "1f1b", number or default_number(mesh, batch_sizes)


def pipeline_order(schedule: str | PipelineSchedule, mesh: Mesh) -> PipelineSchedule:
    """The order of the actions of every rank along `pp`; of "auto" the one that stages are placed for, before `best_order` knows them.

    Raises `ScheduleError` for one that is made for other numbers.
    """
    num_ranks, number = mesh.size_of(mesh.parts("pp")), mesh.num_microbatches
    if isinstance(schedule, str):
        order = generate("1f1b" if schedule == "auto" else schedule, num_ranks, number)
        return SINGLE if num_ranks == number == 1 else order  # nothing to interleave
    if (schedule.num_ranks, schedule.num_microbatches) != (num_ranks, number):
        raise ScheduleError(
            f"the schedule {schedule.name!r} is for {schedule.num_ranks} ranks and {schedule.num_microbatches} microbatches; this call "
            f"runs on pp = {num_ranks} with {number}: pass num_microbatches={schedule.num_microbatches}, or another schedule"
        )
    return schedule


def ordered_for(order: PipelineSchedule, number: int) -> PipelineSchedule:
    """`order`, or its like for another number of microbatches."""
    if order.num_microbatches == number:
        return order
    num_chunks = order.num_stages // order.num_ranks
    name = order.name if order.name in GENERATORS else "1f1b" if num_chunks == 1 else "interleaved"
    return generate(name, order.num_ranks, number, num_chunks)


def live_microbatches(order: PipelineSchedule) -> tuple[int, ...]:
    """Of how many microbatches each stage holds saved values at most."""
    most, live = Counter[int](), Counter[int]()
    for row in order.orders:
        for action in row:
            live[action.stage] += action.kind == "F"
            most[action.stage] = max(most[action.stage], live[action.stage])
            live[action.stage] -= action.kind in ("B", "W")
    return tuple(most[stage] for stage in range(order.num_stages))


def best_order(program: Program, cost: CostModel, order: PipelineSchedule, capacity_bytes: float) -> PipelineSchedule:
    """The order that takes least time for the stages of `program`, with every rank within `capacity_bytes`; `order` gives the ranks.

    A program without gradients keeps `order`. Raises `ScheduleError` where nothing fits.
    """
    if not program.signature.outputs_of("gradient"):
        return order
    speeds = tuple(cost.cluster.speed(rank) for rank in order.stages)
    prices = price_pipeline(program, cost, order.num_stages, speeds)
    return auto_schedule(prices, order.num_microbatches, order.stages, capacity_bytes, objective="step")
