"""From the stages of the forward to those of every node: a backward node runs where its forward partner ran.

Partners share autograd's sequence number. What it says wrongly is mended along the data: gradients flow from later stages
to earlier ones, and the sum of two of them is taken where both have arrived.

    stage 0   f0 ── f1 ──┐                     ┌─► b1 ── b0
                         ▼                     │
    stage 1              f2 ── f3 ── b3 ── b2 ─┘
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch.fx import Node

from autopar.collectives import reshard
from autopar.keys import PHASE
from autopar.microbatches import known_ahead
from autopar.program import Program

aten = torch.ops.aten


def copied(program: Program) -> frozenset[Node]:
    """The calls that every stage may compute for itself instead of receiving their value: they descend from the call's inputs
    alone (masks, positions) or from parameters alone (a transposed weight). What descends from both is an activation.
    """
    given = known_ahead(program)
    parameters = {node for item, node in program.named_inputs() if item.kind == "parameter"}
    constant = {node for node in given if node.op == "call_function" and not node.all_input_nodes}
    found: set[Node] = set()
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        if all(operand in parameters or operand in constant for operand in node.all_input_nodes):
            parameters.add(node)
        if node in given or node in parameters:
            found.add(node)
    return frozenset(found)


def assign_stages(program: Program, forward: Mapping[Node, int], num_stages: int) -> dict[Node, int]:
    """The stage of every call of a GLOBAL program, given those of the forward's; `copied` calls have none."""
    everywhere = copied(program)
    stages: dict[Node, int] = {}
    partners: dict[object, int] = {}
    for node in program.graph.nodes:
        if node.op != "call_function" or node in everywhere:
            continue
        sources = [stages[operand] for operand in node.all_input_nodes if operand in stages]
        if node.target is operator.getitem:
            stages[node] = sources[0]
        elif PHASE[node] == "forward":
            stages[node] = max([forward.get(node, 0), *sources])
            sequence = node.meta.get("seq_nr")
            partners[sequence] = max(partners.get(sequence, 0), stages[node])
        else:
            stages[node] = _backward_stage(node, stages, partners, num_stages)
    return stages


def _backward_stage(node: Node, stages: Mapping[Node, int], partners: Mapping[object, int], num_stages: int) -> int:
    gradients = [stages[each] for each in node.all_input_nodes if each in stages and PHASE.get(each) == "backward"]
    saved = [stages[each] for each in node.all_input_nodes if each in stages and PHASE.get(each) == "forward"]
    latest = min(gradients, default=num_stages - 1)
    is_accumulation = node.target is aten.add.Tensor and len(gradients) > 1
    if gradients and (node.target is reshard or is_accumulation):
        return latest
    partner = partners.get(node.meta.get("seq_nr"))
    if partner is None:
        return min(latest, max(saved)) if saved and not gradients else latest
    return min(latest, partner)
