"""What the instructions of a program that is written out take: a clock for passes on the schedule, and the step by that clock."""

from __future__ import annotations

import math
from functools import cache

from autopar.cost.hardware.host import Host
from autopar.cost.model import CostModel
from autopar.ir.instructions import Add, Collective, Copy, Instruction, Launch, Pause, Receive, Run, Send
from autopar.ir.mesh import MICROBATCHES
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.pipeline.simulate import HostOf, Seconds, Simulation, simulate

# A sum reads both and writes one.
_ADD_PASSES = 3


def on_paper(program: ScheduleProgram, cost: CostModel, has_memory: bool = True) -> Simulation:
    """A step of `program` at the prices of `cost`, slowed down by communication as far as its links say, with what the host takes."""
    prices, host = fragment_seconds(program, cost), host_seconds(program, cost)
    return simulate(program, prices, has_memory=has_memory, busy_of=cache(cost.busy), host_of=host)


def host_seconds(program: ScheduleProgram, cost: CostModel) -> HostOf:
    """What each instruction of `program` takes of the host: to be read, and to start what is sent, buffer by buffer. Where the host is
    said, an ADD takes its bytes, too."""
    host, schedule = cost.cluster.device.host, program.places[0]
    if host == Host():
        return lambda each: 0.0

    def seconds(each: Instruction) -> float:
        if isinstance(each, Pause):
            return 0.0
        started = 0
        if isinstance(each, (Send, Receive)):
            started = len(each.buffers)
        elif isinstance(each, Launch):
            started = int(any(axis != MICROBATCHES for axis in each.axes))
        moved = _ADD_PASSES * cost.memory_seconds(schedule.bytes_of(each.source)) if isinstance(each, Add) else 0.0
        return host.instruction_seconds + host.launch_seconds * started + moved

    return seconds


def fragment_seconds(program: ScheduleProgram, cost: CostModel) -> Seconds:
    """The price of each instruction of `program`: of a RUN those of its fragment's calls, of a SEND, LAUNCH or COPY that of its bytes.

    By the formulas that priced the grid, on local shapes and devices of equal speed. ADD and FREE take the host alone, and what
    joins microbatches: they run on one rank. Raises `ScheduleError` for a buffer of unknown size.
    """
    latency, seconds_per_byte = cost.send()
    schedule = program.places[0]  # all share one table of fragments and one of buffers

    @cache
    def of_fragment(name: str) -> float:
        nodes = program.fragments[name].module.graph.nodes
        return sum(cost.local(node).seconds for node in nodes if node.op == "call_function")

    @cache
    def of_collective(kind: Collective, axes: tuple[str, ...], given: float, left: float, node_size: int) -> float:
        if not axes:
            return 0.0
        by_node = cost.by_node(kind, axes, given, left) if node_size else math.inf
        if by_node < math.inf:
            return by_node
        # On a cluster without such nodes, as one of which an axis was measured, a collective by node goes as one.
        return cost.collective(kind, axes, given, left).seconds

    def seconds(instruction: Run | Send | Launch | Copy) -> float:
        if isinstance(instruction, Run):
            return of_fragment(instruction.fragment)
        if isinstance(instruction, Send):
            return latency * len(instruction.buffers) + seconds_per_byte * sum(map(schedule.bytes_of, instruction.buffers))
        if isinstance(instruction, Copy):
            away = instruction.sources if instruction.memory == "device" else instruction.targets
            where = schedule.buffers[away[0]].memory
            return cost.copy_seconds(where, sum(map(schedule.bytes_of, instruction.sources)))
        axes = tuple(axis for axis in instruction.axes if axis != MICROBATCHES)
        given, left = (float(sum(map(schedule.bytes_of, names))) for names in (instruction.sources, instruction.targets))
        return of_collective(instruction.collective, axes, given, left, instruction.node_size)

    return seconds
