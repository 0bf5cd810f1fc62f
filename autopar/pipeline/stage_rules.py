"""What a call means in a pipeline: who computes it, what only moves elements, what is added up where, what follows from what.

Each rule holds of the nodes of a GLOBAL program with its reshards and of those of the LOCAL one that it becomes: where the one has a
reshard, the other has launches, waits, slices and copies. Prices are read off the first (`stage_work`), schedules off the second
(`stage_cut`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch.fx import Node

from autopar.graph.microbatches import is_summed_later, known_ahead
from autopar.ir.actions import Direction
from autopar.ir.arguments import arguments
from autopar.ir.collectives import LAUNCHES, is_launch, reduce_scatter, reshard, wait
from autopar.ir.keys import COPY, PHASE, SHARDING, STAGE, Phase
from autopar.ir.markers import MARKERS, held, recut
from autopar.ir.mesh import MICROBATCHES
from autopar.ir.program import Form, Input, Program
from autopar.ops.traits import WHOLE_VIEWS

aten = torch.ops.aten

# By call the stages that compute it, and when each does.
Stages = Mapping[Node, Mapping[int, Phase]]

# Ops that only move the elements of their first operand, or add them up over ranks: they may as well be done to a sum as to its parts.
MOVES = WHOLE_VIEWS | {recut, aten.clone.default, aten.slice.Tensor, aten.index_select.default, reshard, wait, *LAUNCHES}


def stages_of_calls(program: Program) -> dict[Node, dict[int, Phase]]:
    """A call with a STAGE runs there. One without runs on every stage that reads it, in the forward where a forward call of that stage
    reads it; so does a view of what another stage sends, since a value and its views are sent once. What only the caller reads is the
    first stage's. A program that nobody placed is one stage."""
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    is_placed = any(node in STAGE for node in calls)
    found: dict[Node, dict[int, Phase]] = {}
    for node in reversed(calls):
        own = STAGE.get(node) if is_placed else 0
        if own is None or (is_placed and _goes_with_readers(node)):
            found[node] = _of_readers(node, own, found)
        else:
            found[node] = {own: PHASE.get(node) or "forward"}
    return found


def _of_readers(node: Node, own: int | None, known: Stages) -> dict[int, Phase]:
    found: dict[int, Phase] = {}
    for user in node.users:
        for stage, phase in known[user].items() if user in known else ():
            found[stage] = "forward" if phase == "forward" else found.get(stage, phase)
    if not found or any(user.op == "output" for user in node.users):
        found.setdefault(own or 0, "forward")
    if own in found:
        found[own] = PHASE.get(node) or "forward"
    return dict(sorted(found.items()))


def _goes_with_readers(node: Node) -> bool:
    """Whether `node` shows a value that may be shown anew. A view of a parameter's gradient stays: its sum is sent, once a step."""
    is_gradient = node in SHARDING and any(is_summed_later(each) for each in SHARDING[node])
    is_view = node.target is recut or node.target in WHOLE_VIEWS
    return ((node.target in MARKERS and not is_view) or (is_view and not is_gradient)) and operand_of(node).op == "call_function"


def direction_of(value: Node, reader: Node, target: int, stages: Stages) -> Direction:
    """The way that a value takes from its stage to stage `target`, where `reader` reads it: activations go forward, gradients back."""
    source = STAGE[value]
    is_forward = source < target and stages[value][source] == "forward"
    is_back = source > target and stages[reader][target] == "backward"
    assert is_forward or is_back, f"{reader} reads {value} against the pipeline"
    return "F" if is_forward else "B"


def counts(node: Node) -> bool:
    """Whether a call adds something up over the microbatches before they are through."""
    if node.target is reshard:
        before, after = SHARDING[operand_of(node)][0], SHARDING[node][0]
        return any(axis == MICROBATCHES for axis, _ in before.unreduced) and MICROBATCHES not in after.axes
    return is_launch(node) and node.args[1] == (MICROBATCHES,)


def follows_counts(program: Program) -> frozenset[Node]:
    """The sums over the microbatches that are known ahead, and all that follows from them and from what does not change with the
    microbatch: calls that run once a step."""
    ahead, found = known_ahead(program), set[Node]()
    changing = {node for item, node in program.named_inputs() if differs(item)}
    for node in program.graph.nodes:
        if node.op == "call_function" and node in ahead and not changing.intersection(node.all_input_nodes):
            calls = [each for each in node.all_input_nodes if each.op == "call_function"]
            if counts(node) or (calls and all(each in found for each in calls)):
                found.add(node)
    return frozenset(found)


def makes_copies(program: Program) -> frozenset[Node]:
    """The calls that make the copies of parameters which are there all step (`held`), and those copies: once a step, ahead of all else."""
    if program.form is Form.LOCAL:
        return frozenset(node for node in program.graph.nodes if node in COPY)
    return frozenset(ancestors(node for node in program.graph.nodes if node.target is held))


def is_copy(node: Node) -> bool:
    """Whether a call of a GLOBAL program is a copy of a parameter with memory of its own."""
    return node.target is held and operand_of(node).op != "placeholder"


def differs(item: Input) -> bool:
    """Whether an input differs from microbatch to microbatch."""
    if item.kind == "coordinate":
        return MICROBATCHES in item.name.split(",")
    return item.sharding is not None and MICROBATCHES in item.sharding.axes


def way_to(result: Node, cut_over: frozenset[str] = frozenset(), low: torch.dtype | None = None) -> list[Node]:
    """The calls from a result back that only move what one call makes, each read by the next alone; none where the result is that call.

    What reduces and scatters over the axes `cut_over` counts as such a call; casts from and to `low`, of a gradient that is held in it,
    only move."""
    found: list[Node] = []
    while (_is_moved(result) or _is_cast(result, low)) and not _cuts(result, cut_over):
        found.append(result)
        result = operand_of(result)
    while found and _cuts(result, cut_over) and _is_cast(found[-1], low):
        found.pop()  # what is cut is added up in the dtype that it is held in
    return found


def _cuts(node: Node, axes: frozenset[str]) -> bool:
    """Whether a call gives each rank along `axes` its part of their sum."""
    if node.target is reshard:
        summed = {axis for axis, _ in SHARDING[operand_of(node)][0].unreduced}
        return not axes.isdisjoint(summed.intersection(SHARDING[node][0].split_axes))
    launch = operand_of(node) if node.target is wait else node
    return launch.target is reduce_scatter and not axes.isdisjoint(arguments(launch)[1])


def _is_cast(node: Node, low: torch.dtype | None) -> bool:
    is_cast = node.target is aten._to_copy.default and len(node.users) == 1 and operand_of(node).op == "call_function"
    return is_cast and low in (node.meta["val"].dtype, operand_of(node).meta["val"].dtype)


def held_in(program: Program) -> torch.dtype | None:
    """The dtype in which gradients are held, where that is another than that of their parameters."""
    return None if program.precision is None or program.precision.grad == torch.float32 else program.precision.grad


def cut_axes(program: Program) -> frozenset[str]:
    """The axes over which gradients are cut to parts after every microbatch; none where there is one microbatch."""
    is_cut = program.freedom.cuts_each_microbatch and program.mesh.num_microbatches > 1
    return frozenset(axis for axis in program.mesh.ranks.names if is_cut and program.freedom.is_batch(axis))


def _is_moved(node: Node) -> bool:
    return node.target in MOVES and not _joins_otherwise(node) and len(node.users) == 1 and operand_of(node).op == "call_function"


def _joins_otherwise(node: Node) -> bool:
    """Whether a call joins what ranks have by something else than a sum: a maximum of sums is no sum of maxima."""
    if node.target is wait:
        return _joins_otherwise(operand_of(node))
    if node.target is reshard:
        joined = set(SHARDING[operand_of(node)][0].unreduced).difference(SHARDING[node][0].unreduced)
        return any(kind != "sum" for _, kind in joined)
    return is_launch(node) and node.args[-1] == "max"


def addends(node: Node, stages: Stages) -> Iterator[Node]:
    """What of different stages an addition of gradients, and additions that it reads, add up; `node` itself where it is none: each addend
    is summed over the microbatches first, so that the additions are left out."""
    if _joins_stages(node, stages):
        for source in node.all_input_nodes:
            yield from addends(source, stages)
    else:
        yield node


def _joins_stages(node: Node, stages: Stages) -> bool:
    sources = node.all_input_nodes
    if node.target is not aten.add.Tensor or len(sources) != 2 or len(node.users) != 1:
        return False
    are_gradients = all(each.op == "call_function" and PHASE.get(each) == "backward" for each in sources)
    return are_gradients and stages[sources[0]].keys().isdisjoint(stages[sources[1]])


def ancestors(nodes: Iterable[Node], stop: frozenset[Node] = frozenset(), within: frozenset[Node] | None = None) -> set[Node]:
    """`nodes` and every call that they descend from, no further than `stop`, and through those `within` alone where these are given."""
    found: set[Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found and node.op == "call_function" and (within is None or node in within):
            found.add(node)
            stack += [] if node in stop else node.all_input_nodes
    return found


def stage_of(node: Node) -> int:
    """The stage of a call that has one; the only one where nobody placed any."""
    return STAGE.get(node) or 0


def operand_of(node: Node) -> Node:
    """The first operand."""
    operand = node.args[0]
    assert isinstance(operand, Node), f"{node} has no operand"
    return operand
