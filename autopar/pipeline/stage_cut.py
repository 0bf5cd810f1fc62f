"""A LOCAL program of a pipeline in pieces: what each action computes, what stages send, what is summed over the microbatches.

copies   of parameters, there all step: once, before all else
ahead    for every microbatch, before the first: what the sums over the microbatches that the network reads are made of
from_counts  what follows from those sums alone (a token count, summed over dp)
F B I W  one microbatch through one stage: forward; backward, whole or as the gradients that other stages wait for
         and the rest
after    what is done to the sums of losses and gradients: changes of sharding, once a step

What belongs where is said by `Work`, by which the GLOBAL program was priced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch.fx import Node

from autopar.ir.actions import Direction, Edge, Kind
from autopar.ir.program import Program
from autopar.pipeline.stage_rules import ancestors, counts, operand_of, stage_of
from autopar.pipeline.stage_work import Sum, Work


@dataclass(frozen=True)
class StageCut:
    """A LOCAL program in pieces, those of each stage in the order of the graph.

    `counts` are the sums over microbatches that are taken ahead: (what is added, the collective it stands for)."""

    program: Program
    num_stages: int
    copies: Mapping[int, tuple[Node, ...]]
    ahead: Mapping[int, tuple[Node, ...]]
    counts: Mapping[int, tuple[tuple[Node, Node], ...]]
    from_counts: Mapping[int, tuple[Node, ...]]
    actions: Mapping[tuple[int, Kind], tuple[Node, ...]]
    transfers: Mapping[tuple[int, int, Direction], tuple[Node, ...]]
    sums: tuple[Sum, ...]

    @property
    def edges(self) -> tuple[Edge, ...]:
        pairs = sorted({(min(source, target), max(source, target)) for source, target, _ in self.transfers})
        return tuple(Edge(*pair, (pair[1], pair[0], "B") in self.transfers) for pair in pairs)

    @property
    def per_step(self) -> frozenset[Node]:
        """The calls whose values there is one of a step, not one of a microbatch."""
        found = {node for each in (self.copies, self.from_counts) for nodes in each.values() for node in nodes}
        found |= {node for each in self.sums for node in each.after}
        return frozenset(found | {launch for pairs in self.counts.values() for _, launch in pairs})


def cut_stages(program: Program, num_stages: int) -> StageCut:
    """Cut a LOCAL program of which every call has a stage, or none has, and no value of the loop is reduced over `mb`."""
    work, stages = Work(program), range(num_stages)
    counted = [node for node in work.counted if counts(node)]
    ahead = ancestors(operand_of(each) for each in counted) - work.counted
    # A sum over the microbatches is added up by ADD, and there is nothing to wait for.
    added = {*counted, *(user for node in counted for user in node.users)}

    def by_stage(nodes: Iterable[Node]) -> dict[int, tuple[Node, ...]]:
        chosen = set(nodes)
        return {stage: tuple(node for node in work.calls if node in chosen and stage_of(node) == stage) for stage in stages}

    actions: dict[tuple[int, Kind], tuple[Node, ...]] = {}
    for stage in stages:
        mine = [(node, phase) for node, phase in work.calls_at(stage) if node not in ahead]
        backward = tuple(node for node, phase in mine if phase == "backward")
        waited = work.waited_for(stage)
        actions[stage, "F"] = tuple(node for node, phase in mine if phase == "forward")
        actions[stage, "B"] = backward
        actions[stage, "I"] = tuple(node for node in backward if node in waited)
        actions[stage, "W"] = tuple(node for node in backward if node not in waited)
    sources = {stage: tuple((operand_of(node), node) for node in nodes) for stage, nodes in by_stage(counted).items()}
    copies, from_counts = by_stage(work.copies), by_stage(work.counted - added)
    return StageCut(program, num_stages, copies, by_stage(ahead), sources, from_counts, actions, work.transfers, work.sums)
