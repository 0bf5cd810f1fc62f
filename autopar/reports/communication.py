"""What ranks send each other in a step: the collectives of reshards, and values on their way from stage to stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from torch.fx import Node

from autopar.cost.model import CostModel
from autopar.ir.collectives import reshard
from autopar.ir.instructions import Collective, Launch
from autopar.ir.keys import DIMS, PHASE, SHARDING
from autopar.ir.mesh import MICROBATCHES, Mesh, parent
from autopar.ir.program import Program, operands, results_of
from autopar.ir.reshard import steps
from autopar.ir.schedule import Schedule
from autopar.pipeline.priced import value_bytes
from autopar.pipeline.stage_work import Work


@dataclass(frozen=True)
class Traffic:
    """One collective or send: of which reshard or value, over which of the user's axes; bytes that a rank sends and seconds, each time.

    It happens `runs` times a step, on each of `stages`.
    """

    node: Node
    axes: str
    collective: Collective | Literal["send"]
    phase: str
    bytes: float
    seconds: float
    runs: int = 1
    stages: tuple[int, ...] = (0,)


def transfers(program: Program, cost: CostModel, places: Sequence[int] = ()) -> Iterator[Traffic]:
    """Every collective of the program, in order; then what stages send each other. `places` are the ranks of the stages along `pp`,
    by default one for each."""
    work = Work(program)
    for node in work.calls:
        for transfer in transfers_of(node, program.mesh, cost):
            yield replace(transfer, runs=work.runs(node), stages=tuple(work.stages[node]))
    latency, seconds_per_byte = cost.send()
    for (source, _, direction), values in work.transfers.items():
        for value in values:
            size, phase = value_bytes(value, cost), "forward" if direction == "F" else "backward"
            yield Traffic(value, "pp", "send", phase, size, latency + seconds_per_byte * size, work.runs(value), (source,))
    for part, source, targets in work.ties:
        size, ranks = value_bytes(part, cost), {places[each] if places else each for each in targets}
        peers = ranks - {places[source] if places else source}
        if peers:
            yield Traffic(part, "pp", "send", "backward", size, latency + seconds_per_byte * size, len(peers), (source,))


def transfers_of(node: Node, mesh: Mesh, cost: CostModel) -> Iterator[Traffic]:
    """The collectives of a reshard; none of any other node, and none between microbatches."""
    value = results_of(node)[0]
    if node.target is not reshard or value is None:
        return
    source = operands(node)[0]
    for step in steps(DIMS[node][0], SHARDING[source][0], SHARDING[node][0], mesh):
        axes = "·".join(dict.fromkeys(parent(axis) for axis in step.axes if axis != MICROBATCHES))
        if step.collective != "slice" and axes:
            price = cost.step(step, value.dtype.itemsize)
            yield Traffic(node, axes, step.collective, PHASE.get(node) or "forward", price.bytes, price.seconds)


def over(launch: Launch) -> str:
    """The user's axes of a collective, `dp` or `dp·tp`; nothing for one between microbatches."""
    return "·".join(dict.fromkeys(parent(axis) for axis in launch.axes if axis != MICROBATCHES))


def num_launches(places: Sequence[Schedule], axis: str) -> int:
    """How many collectives over an axis a rank launches in a step, of the one that launches most."""
    mine = ([each for each in place.instructions if isinstance(each, Launch)] for place in places)
    return max(sum(axis in over(each).split("·") for each in launches) for launches in mine)


class Sent(NamedTuple):
    """What a rank sends in a step by one collective of one phase: how often, bytes, seconds."""

    runs: int
    bytes: float
    seconds: float


def sent(program: Program, cost: CostModel, places: Sequence[int] = (0,)) -> dict[tuple[str, str, str], Sent]:
    """By axes, phase and collective what the rank sends that sends most; `places` are the ranks of the stages along `pp`."""
    ranks: dict[tuple[str, str, str], dict[int, Sent]] = {}
    for each in transfers(program, cost, places):
        rows = ranks.setdefault((each.axes, each.phase, each.collective), {})
        for stage in each.stages:
            runs, size, seconds = rows.get(places[stage], Sent(0, 0.0, 0.0))
            rows[places[stage]] = Sent(runs + each.runs, size + each.runs * each.bytes, seconds + each.runs * each.seconds)
    return {key: max(rows.values(), key=lambda row: row.bytes) for key, rows in ranks.items()}
