"""Every mismatch between what a value is and what a consumer needs becomes an explicit reshard node."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from autopar.graph.emit import copy_origin
from autopar.graph.microbatches import is_summed_later, summed, summed_later
from autopar.ir.arguments import node_at
from autopar.ir.collectives import reshard
from autopar.ir.keys import BATCH, DIMS, PHASE, SHARDING, SOURCE, STRATEGY, Phase, Source
from autopar.ir.program import Program, operands
from autopar.ir.reshard import is_slice
from autopar.ir.sharding import Sharding
from autopar.ops.atoms import operand_result
from autopar.partition.sharding_problem import HOMES, required_sharding
from autopar.partition.solver.assignment import origins


@dataclass(frozen=True)
class InsertReshards:
    """Insert one `reshard` per (value, target, phase), in front of the first consumer that needs it.

    A target that is a slice of another needed target is cut from that one: after an all-reduce for one consumer,
    a second consumer's shard is free. The backward brings again what it needs: nothing is held for it but what is saved.
    The search prices it so.

    Reads: STRATEGY, SHARDING, DIMS. Writes: `reshard` nodes with DIMS, SHARDING, PHASE, SOURCE; shardings in the signature.
    Ensures: every operand's sharding is the one that its consumer's strategy names.
    """

    name: str = "insert reshards"

    def apply(self, program: Program) -> Program:
        program = _with_signature(program.copy())
        made: dict[tuple[Node, Sharding, Phase], Node] = {}
        wanted = _wanted(program)
        for node in list(program.graph.nodes):
            if node.op == "call_function":
                targets = iter(STRATEGY[node].operands)
                node.args, node.kwargs = torch.fx.map_arg(
                    (node.args, node.kwargs),
                    lambda operand, node=node, targets=targets: _fitted(program, operand, next(targets), node, made, wanted),
                )
        end = program.graph.output_node()
        results = [_fitted(program, node, output.sharding, end, made, wanted) for output, node in program.named_outputs()]
        end.args = (tuple(results),)
        return program


def _phase_of(value: Node, user: Node) -> Phase:
    """When `user` reads `value`; a result is read as soon as it is there."""
    return PHASE.get(value if user.op == "output" else user) or "forward"


def _wanted(program: Program) -> dict[tuple[Node, Phase], list[Sharding]]:
    """The shardings that the consumers of each value need in each phase."""
    found: dict[tuple[Node, Phase], list[Sharding]] = {}
    for node in program.graph.nodes:
        if node.op == "call_function":
            for operand, target in zip(operands(node), STRATEGY[node].operands, strict=True):
                found.setdefault((operand, _phase_of(operand, node)), []).append(target)
    for output, node in program.named_outputs():
        if output.sharding is not None:
            found.setdefault((node, _phase_of(node, node)), []).append(output.sharding)
    return found


def _fitted(
    program: Program,
    value: Node,
    target: Sharding | None,
    user: Node,
    made: dict[tuple[Node, Sharding, Phase], Node],
    wanted: dict[tuple[Node, Phase], list[Sharding]],
) -> Node:
    """`value` in the sharding `target`, resharded in front of `user` if it is in another."""
    assert target is not None
    index = operand_result(user, value) if user.op != "output" else 0
    here = SHARDING[value][index]
    if here == target:
        return value
    assert isinstance(value.meta["val"], torch.Tensor), f"{value} gives a list or tuple; getitem names a result before it is resharded"
    phase = _phase_of(value, user)
    if (value, target, phase) not in made:
        origin = origins(here, wanted[value, phase], is_slice)[target]
        source = _fitted(program, value, origin, user, made, wanted)
        over_time = summed(SHARDING[source][0])
        if over_time != SHARDING[source][0] and summed(target) == target:
            # Apart from all else: no collective joins microbatches.
            if (value, over_time, phase) not in made:
                made[value, over_time, phase] = _emit(program, source, over_time, user)
            source = made[value, over_time, phase]
        if SHARDING[source][0] == target:
            return source
        made[value, target, phase] = _emit(program, source, target, user)
    return made[value, target, phase]


def _emit(program: Program, value: Node, target: Sharding, user: Node) -> Node:
    """A result is resharded right after it is made: a loss before the backward begins, a gradient while it goes on."""
    is_result = user.op == "output"
    at_once = is_result and value not in _tangents(program)
    place = program.graph.inserting_after(_last_placeholder(value)) if at_once else program.graph.inserting_before(user)
    with place:
        node = program.graph.call_function(reshard, (value, target))  # type: ignore[arg-type]
    node.meta["val"] = value.meta["val"]
    copy_origin(value, node)
    if _root(value).op == "placeholder" and not is_result:  # an input has no line of its own: its reader's
        SOURCE[node] = SOURCE.get(user) or Source()
    DIMS[node], BATCH[node], SHARDING[node] = DIMS[value], BATCH[value], (target,)
    if is_result:
        PHASE[node] = PHASE.get(value) or ("forward" if at_once else "backward")
    else:
        PHASE[node] = PHASE[user]
    return node


def _root(value: Node) -> Node:
    """What `value` is before all reshards."""
    while value.target is reshard:
        value = node_at(value, 0)
    return value


def _tangents(program: Program) -> set[Node]:
    """What arrives when the forward is over; a gradient may be a tangent as it is."""
    return {node for item, node in program.named_inputs() if item.kind == "tangent"}


def _last_placeholder(value: Node) -> Node:
    return value.graph.find_nodes(op="placeholder")[-1] if value.op == "placeholder" else value


def _with_signature(program: Program) -> Program:
    """Write dims and shardings into the signature: inputs as they were decided, outputs as the contract says."""
    nodes: dict[tuple[str | None, str], Node] = {(item.kind, item.name): node for item, node in program.named_inputs()}
    inputs = tuple(replace(item, dims=DIMS[node][0], sharding=SHARDING[node][0]) for item, node in program.named_inputs())
    outputs = []
    for output, node in program.named_outputs():
        home = nodes.get((HOMES.get(output.kind), output.name))
        sharding = SHARDING[home][0] if home is not None else required_sharding(output, node, program)
        # What a buffer becomes is read by the next microbatch.
        if is_summed_later(SHARDING[node][0]) and output.kind != "buffer":
            sharding = summed_later(sharding)
        outputs.append(replace(output, dims=DIMS[node][0], sharding=sharding))
    return replace(program, signature=replace(program.signature, inputs=inputs, outputs=tuple(outputs)))
