"""What only the caller, or a sum over microbatches, reads of what a collective brings is computed last, and keeps nothing waiting."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from autopar.graph.late_readers import late_readers
from autopar.ir.collectives import all_reduce, wait
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
