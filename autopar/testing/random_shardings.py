"""Picks a random legal strategy for every node, so that tests reach lowerings that no search would choose."""

from __future__ import annotations

import operator
import random
from dataclasses import dataclass

from torch.fx import Node

from autopar.ir.keys import BATCH, DIMS, SHARDING, STRATEGY
from autopar.ir.program import Program, operands
from autopar.ir.reshard import reachable
from autopar.ir.sharding import Strategy
from autopar.ops.atoms import operand_result
from autopar.ops.strategies import placeholder_strategies, strategies_of


@dataclass(frozen=True)
class RandomShardings:
    """Give each node one of its strategies at random, among those whose operands can be had by a reshard.

    `calm` is the probability that a node takes its operands as they lie, as many as can be: at 0 nearly every operand is resharded.

    Reads: DIMS, BATCH. Writes: STRATEGY, SHARDING. Ensures: a legal plan, the same for the same `seed`.
    """

    seed: int = 0
    calm: float = 0.0
    name: str = "random shardings"

    def decide(self, program: Program) -> dict[str, Strategy]:
        draw = random.Random(self.seed)
        chosen: dict[Node, Strategy] = {}
        for item, node in program.named_inputs():
            chosen[node] = draw.choice(placeholder_strategies(item.kind, DIMS[node][0], program.mesh, BATCH[node][0], program.freedom))
        for node in program.graph.nodes:
            if node.op == "call_function":
                found = [each for each in strategies_of(node, program.mesh, program.freedom) if _is_reachable(node, each, chosen)]
                if self.calm and draw.random() < self.calm:
                    found = _calmest(node, found, chosen)
                chosen[node] = draw.choice(found)
        return {node.name: strategy for node, strategy in chosen.items()}

    def apply(self, program: Program, decision: dict[str, Strategy]) -> Program:
        program = program.copy()
        for node in program.graph.nodes:
            if node.op != "output":
                STRATEGY[node] = decision[node.name]
                SHARDING[node] = decision[node.name].results
        return program


def _is_reachable(node: Node, strategy: Strategy, chosen: dict[Node, Strategy]) -> bool:
    """Whether every operand can be brought to what `strategy` needs; what a getitem selects, be it the only result, is read as it is."""
    for operand, target in zip(operands(node), strategy.operands, strict=True):
        source = chosen[operand].results[operand_result(node, operand)]
        if (node.target is operator.getitem and source != target) or not reachable(source, target):
            return False
    return True


def _calmest(node: Node, strategies: list[Strategy], chosen: dict[Node, Strategy]) -> list[Strategy]:
    """Those that need the fewest reshards."""
    sources = [chosen[operand].results[operand_result(node, operand)] for operand in operands(node)]
    resharded = [sum(map(operator.ne, sources, strategy.operands)) for strategy in strategies]
    return [strategy for strategy, count in zip(strategies, resharded, strict=True) if count == min(resharded)]
