"""What the stages of a pipeline cost, read off the GLOBAL program that was placed on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from autopar.cost.model import CostModel, is_view
from autopar.ir.actions import Direction, Edge
from autopar.ir.collectives import reshard
from autopar.ir.keys import DIMS, SHARDING, STRATEGY
from autopar.ir.markers import MARKERS
from autopar.ir.program import Program, operands, results_of
from autopar.ir.reshard import steps
from autopar.pipeline.cost import EdgeCost, PipelineCost, StageCost
from autopar.pipeline.stage_rules import is_copy, operand_of
from autopar.pipeline.stage_work import Work


def price_pipeline(program: Program, cost: CostModel, num_stages: int, speeds: Sequence[float] = ()) -> PipelineCost:
    """Seconds and bytes of one rank of each stage, per microbatch; `speeds` are those of the stages' devices, 1.0 by default.

    forward            a stage's forward calls, its own copies of what every stage computes for itself included
    input gradient     the backward calls that gradients for other stages descend from; the weight gradient is the rest
    reduce             what runs once a step: changes of sharding of losses and gradients, the exchange of those that several
                       stages want
    saved              what the backward of a stage reads of a forward, its own or what came in from another stage
    held               the parameters that the stage reads, with gradients, optimizer state and copies, and its buffers
    edges              the values that cross, each sent by itself

    Reads: STAGE, PHASE, STRATEGY, SHARDING, DIMS of a program with its reshards.
    """
    return _Pricing(program, cost, num_stages).result(tuple(speeds) or (1.0,) * num_stages)


def call_seconds(node: Node, program: Program, cost: CostModel) -> float:
    """Of one run of a call on one rank, be it a reshard."""
    if node.target is not reshard:
        return cost.node(node, STRATEGY[node]).seconds
    value, source = results_of(node)[0], operands(node)[0]
    assert value is not None
    changes = steps(DIMS[node][0], SHARDING[source][0], SHARDING[node][0], program.mesh)
    return sum(cost.step(step, value.dtype.itemsize).seconds for step in changes)


def value_bytes(node: Node, cost: CostModel) -> float:
    """Bytes of what `node` gives, on one rank."""
    results = zip(DIMS[node], results_of(node), SHARDING[node], strict=True)
    return sum(cost.local_bytes(dims, value.dtype, sharding) for dims, value, sharding in results if value is not None)


def transfer_bytes(work: Work, cost: CostModel) -> dict[tuple[int, int, Direction], float]:
    """What one rank of a stage sends another, each microbatch: (source, target, direction) → bytes."""
    return {ends: sum(value_bytes(node, cost) for node in nodes) for ends, nodes in work.transfers.items()}


def saved_values(work: Work, stage: int, without: frozenset[Node] = frozenset()) -> tuple[Node, ...]:
    """The forward's values that the backward of a stage reads, its own or what came in; those that only calls of `without` read left
    out."""
    found: dict[Node, None] = {}
    for node, phase in work.calls_at(stage):
        for operand in node.all_input_nodes if phase == "backward" and node not in without else ():
            value = _unmarked(operand)
            if value in work.stages and value not in work.per_step and _is_kept(value, stage, work):
                found[value] = None
    return tuple(found)


def _is_kept(node: Node, stage: int, work: Work) -> bool:
    """Whether what the backward of a stage reads is there since the forward. A view of an input needs no memory."""
    phases = work.stages[node]
    return phases.get(stage, next(iter(phases.values()))) == "forward" and not _shows_input(node)


def _unmarked(node: Node) -> Node:
    while node.target in MARKERS:
        node = operand_of(node)
    return node


def _shows_input(node: Node) -> bool:
    while node.op == "call_function" and is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node.op == "placeholder"


def copies_bytes(work: Work, stages: frozenset[int], cost: CostModel) -> float:
    """Bytes of the copies of parameters that ranks with `stages` hold all step."""
    return sum(value_bytes(node, cost) for node in work.calls if is_copy(node) and stages.intersection(work.stages[node]))


@dataclass
class _Pricing:
    program: Program
    cost: CostModel
    num_stages: int

    def __post_init__(self) -> None:
        self.work = Work(self.program)

    def result(self, speeds: Sequence[float]) -> PipelineCost:
        stages = tuple(self.stage(stage, speed) for stage, speed in zip(range(self.num_stages), speeds, strict=True))
        return PipelineCost(stages, self.edges())

    def stage(self, stage: int, speed: float) -> StageCost:
        waited = self.work.waited_for(stage)
        seconds = {"F": 0.0, "I": 0.0, "W": 0.0}
        working = 0.0
        for node, phase in self.work.calls_at(stage):
            kind = "F" if phase == "forward" else "I" if node in waited else "W"
            seconds[kind] += self.seconds(node) / speed
            working = max(working, self.working_bytes(node))
        once = [node for node in self.work.calls if node in self.work.per_step and stage in self.work.stages[node]]
        latency, seconds_per_byte = self.cost.send()
        ties = [(value_bytes(tie.part, self.cost), len(tie.targets)) for tie in self.work.ties if tie.source == stage]
        exchanged = sum(number * (latency + seconds_per_byte * size) for size, number in ties)
        return StageCost(
            forward_seconds=seconds["F"],
            input_gradient_seconds=seconds["I"],
            weight_gradient_seconds=seconds["W"],
            reduce_seconds=sum(self.seconds(node) / speed for node in once) + exchanged,
            saved_bytes=sum(value_bytes(node, self.cost) for node in saved_values(self.work, stage)),
            weight_saved_bytes=sum(value_bytes(node, self.cost) for node in saved_values(self.work, stage, without=waited)),
            working_bytes=working,
            held_bytes=self.held_bytes(stage),
        )

    def seconds(self, node: Node) -> float:
        return call_seconds(node, self.program, self.cost)

    def working_bytes(self, node: Node) -> float:
        if node.target is reshard:
            return value_bytes(node, self.cost) + value_bytes(operands(node)[0], self.cost)
        return self.cost.traffic_bytes(node, STRATEGY[node])

    def held_bytes(self, stage: int) -> float:
        total = 0.0
        for item, node in self.program.named_inputs():
            if item.kind in ("parameter", "buffer") and stage in (self.work.reading(node) or {0}):
                total += self.cost.optimizer.held_bytes(item, value_bytes(node, self.cost))
        return total + copies_bytes(self.work, frozenset({stage}), self.cost)

    def edges(self) -> dict[Edge, EdgeCost]:
        latency, seconds_per_byte = self.cost.send()
        sent = transfer_bytes(self.work, self.cost)
        found: dict[Edge, EdgeCost] = {}
        for pair in sorted({(min(source, target), max(source, target)) for source, target, _ in sent}):
            forward: tuple[int, int, Direction] = (*pair, "F")
            back: tuple[int, int, Direction] = (pair[1], pair[0], "B")
            ends = forward if forward in sent else back
            seconds = latency * len(self.work.transfers[ends]) + seconds_per_byte * sent[ends]
            found[Edge(*pair, back in sent)] = EdgeCost(seconds, sent[ends])
        return found
