"""From the stages of the forward to those of every node: a backward node runs where its forward partner ran.

Partners share autograd's sequence number. Where that is misleading, the data flow corrects it: gradients flow from later stages
to earlier ones, and two of them are added on the stage where both have arrived. Backward ops that do not depend on a gradient
(views of saved values, for the most part) run on the stage that reads them.

    stage 0   f0 ── f1 ──┐                     ┌─► b1 ── b0
                         ▼                     │
    stage 1              f2 ── f3 ── b3 ── b2 ─┘
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch.fx import Node

from autopar.cost.model import is_view
from autopar.graph.microbatches import known_ahead
from autopar.ir.collectives import reshard
from autopar.ir.keys import PHASE
from autopar.ir.program import Program

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
    """The stage of every call of a GLOBAL program, given those of the forward's; `copied` calls have none.

    It goes by sequence numbers, maxima and minima alone: first by units of work, then from units to stages, gives the same.
    """
    everywhere, gradients = copied(program), _gradients(program)
    calls = [node for node in program.graph.nodes if node.op == "call_function" and node not in everywhere]
    stages: dict[Node, int] = {}
    for node in calls:
        if PHASE[node] == "forward":
            sources = [stages[operand] for operand in node.all_input_nodes if operand in stages]
            stages[node] = sources[0] if node.target is operator.getitem else max([forward.get(node, 0), *sources])
    partners = _partners(program, stages)
    for node in calls:
        if node in gradients and node not in stages:
            is_result = node.target is operator.getitem
            stages[node] = stages[node.all_input_nodes[0]] if is_result else _backward_stage(node, stages, partners, num_stages)
    for node in reversed(calls):
        if node not in stages:
            stages[node] = max((stages[user] for user in node.users if user in stages), default=0)
    return stages


def _partners(program: Program, stages: Mapping[Node, int]) -> dict[object, int]:
    """Where the forward of each sequence number is last computed; of what stages copy, where it is last read."""
    found: dict[object, int] = {}
    for node, stage in stages.items():
        found[node.meta.get("seq_nr")] = max(found.get(node.meta.get("seq_nr"), 0), stage)
    own, readers = frozenset(found), dict(stages)
    for node in reversed(program.graph.nodes):
        last = [readers[user] for user in node.users if user in readers]
        if node.op == "call_function" and PHASE[node] == "forward" and node not in stages and last:
            readers[node] = max(last)
            if (sequence := node.meta.get("seq_nr")) not in own:
                found[sequence] = max(found.get(sequence, 0), readers[node])
    return found


def _gradients(program: Program) -> frozenset[Node]:
    """The calls of the backward that descend from what the loss's gradient is given as."""
    found = {node for item, node in program.named_inputs() if item.kind == "tangent"}
    for node in program.graph.nodes:
        if node.op == "call_function" and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return frozenset(found)


def _backward_stage(node: Node, stages: Mapping[Node, int], partners: Mapping[object, int], num_stages: int) -> int:
    gradients = [stages[each] for each in node.all_input_nodes if each in stages and PHASE.get(each) == "backward"]
    latest = min(gradients, default=num_stages - 1)
    is_accumulation = node.target is aten.add.Tensor and len(gradients) > 1
    if gradients and (node.target is reshard or is_accumulation or _ends_a_gradient(node)):
        return latest
    return min(latest, partners.get(node.meta.get("seq_nr"), latest))


def _ends_a_gradient(node: Node) -> bool:
    """Whether `node` is a view that only the caller reads, through others such: of a parameter's gradient, which stays where it is made.

    Its sequence number may be that of a view of an activation: autograd counts no call of which nothing needs a gradient.
    """
    pending = [node]
    while pending:
        each = pending.pop()
        if each.op != "output":
            if not is_view(each) and each.target is not reshard:
                return False
            pending += each.users
    return True
