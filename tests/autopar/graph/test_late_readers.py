"""What only the caller, or a sum over microbatches, reads of what a collective brings is computed last, and keeps nothing waiting."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

import autopar
from autopar.graph.late_readers import late_readers
from autopar.ir.collectives import all_reduce, wait
from autopar.ir.instructions import Launch, Pause, Wait
from autopar.ir.keys import PHASE

aten = torch.ops.aten


def backward() -> dict[str, Node]:
    """A gradient that is summed over ranks and cast, and what follows: its cut into shards, or other things that need it."""
    graph = Graph()
    given = graph.placeholder("x")
    found = {"partial": graph.call_function(aten.sum.dim_IntList, (given, [0]))}
    found["launch"] = graph.call_function(all_reduce, (found["partial"], ("dp", "tp"), "sum"))
    found["wait"] = graph.call_function(wait, (found["launch"],))
    found["cast"] = graph.call_function(aten._to_copy.default, (found["wait"],), {"dtype": torch.bfloat16})
    found["shard"] = graph.call_function(aten.index_select.default, (found["cast"], 0, given))
    found["other"] = graph.call_function(aten.neg.default, (given,))
    graph.output((found["shard"], found["other"]))
    for node in graph.nodes:
        PHASE[node] = "backward"
    return found


def test_the_way_of_a_reduced_gradient_to_the_caller() -> None:
    found = backward()
    assert late_readers(list(found.values())) == {found["cast"], found["shard"]}


def test_of_several_microbatches_the_way_to_their_sum() -> None:
    """What follows the sum is computed once a step, in a section of its own."""
    found = backward()
    section = [node for name, node in found.items() if name != "shard"]
    assert late_readers(section, (), {found["cast"]}) == {found["cast"]}
    assert late_readers(section) == set(), "another stage, or a later action, may read it"


class Positions(nn.Module):
    """A table of positions: its gradient is made of what is summed over all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.positions, self.head = nn.Embedding(32, 8), nn.Embedding(8, 8), nn.Linear(8, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.symbols(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return self.head(x).logsumexp(-1).mean()


def test_a_table_of_positions_keeps_nothing_waiting() -> None:
    """Everything is launched before the first wait of the backward: that of the symbols' gradient as well."""
    parallel = autopar.compile(Positions(), autopar.virtual_mesh(dp=2), example_inputs={"tokens": torch.zeros(4, 6, dtype=torch.int64)})
    instructions = parallel.compiled.schedule_of(0).instructions
    backward = instructions[next(number for number, each in enumerate(instructions) if isinstance(each, Pause)) :]
    kinds = [type(each) for each in backward if isinstance(each, (Launch, Wait))]
    assert Launch in kinds and Launch not in kinds[kinds.index(Wait) :], "\n".join(map(str, backward))
