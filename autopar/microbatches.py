"""Microbatches are an axis in time: what that means for the nodes of a program.

The batch of every rank is cut into equal slices that run one after another. On the mesh of a program the axis `mb`
counts them, so that shardings, local shapes and coordinates say of a microbatch what they say of a rank. A value that is
unreduced over `mb` is summed when all microbatches have run. One that is reduced over it before that is either

    known ahead   it descends from the batch's inputs alone (a count of tokens): computed for all microbatches first
    mixing        it joins what the network made of several microbatches (the statistics of a batch norm): each microbatch
                  takes its own estimate of it, as it would if it were the whole batch
"""

from __future__ import annotations

from torch.fx import Node

from autopar.collectives import is_launch
from autopar.mesh import MICROBATCHES
from autopar.program import Program
from autopar.sharding import Sharding

_KNOWN_AHEAD = ("batch", "constant", "coordinate", "random_key")


def known_ahead(program: Program) -> frozenset[Node]:
    """The nodes that descend from the inputs of the call alone, and from buffers that the model does not change."""
    changed = {item.name for item in program.signature.outputs_of("buffer")}
    known: set[Node] = set()
    for item, node in program.named_inputs():
        if item.kind in _KNOWN_AHEAD or (item.kind == "buffer" and item.name not in changed):
            known.add(node)
    for node in program.graph.nodes:
        if node.op == "call_function" and all(operand in known for operand in node.all_input_nodes):
            known.add(node)
    return frozenset(known)


def mixing(program: Program) -> tuple[Node, ...]:
    """The collectives of a LOCAL program that join what the network made of several microbatches."""
    ahead = known_ahead(program)
    return tuple(node for node in program.graph.nodes if is_launch(node) and MICROBATCHES in node.args[1] and node not in ahead)


def is_summed_later(sharding: Sharding) -> bool:
    """Whether a value's parts are summed over the microbatches when all have run."""
    return (MICROBATCHES, "sum") in sharding.unreduced


def summed_later(sharding: Sharding) -> Sharding:
    """`sharding`, but for a sum over the microbatches that is still to be taken."""
    return Sharding(sharding.splits, (*sharding.unreduced, (MICROBATCHES, "sum")))


def summed(sharding: Sharding) -> Sharding:
    """`sharding` once that sum is taken."""
    return Sharding(sharding.splits, tuple(entry for entry in sharding.unreduced if entry[0] != MICROBATCHES))
