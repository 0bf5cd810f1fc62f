"""What is computed again by name: whole layers, all but contractions, or the regions that the user put under `torch.utils.checkpoint`.

full        every layer from what it reads of others: its own values are not kept
selective   likewise, but what its contractions and attentions make is kept (Korthikanti et al., arXiv:2205.05198)
auto        the user's regions, each from what it reads

A layer is a module with a number in its path, the outermost: `h.3`, `layer1.0`. What one layer or region makes for others is kept, so that
each is computed again by itself.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache

from torch.fx import Node

from autopar.cost.model import is_view
from autopar.ir.collectives import reshard
from autopar.ir.keys import SHARDING, SOURCE
from autopar.ir.markers import save
from autopar.ir.mesh import MICROBATCHES
from autopar.ir.program import Program, operands
from autopar.ir.reshard import moves
from autopar.ops.lookup import is_contraction
from autopar.pipeline.stage_work import Work
from autopar.recompute.again import is_forward, reduces

_LAYER = re.compile(r"^((?:.*?\.)?\d+)(\.|$)")
# The field in which torch notes the checkpointed region that a call is in.
REGION = "ac_graph_id"

Groups = Mapping[Node, str]


def layers(program: Program) -> Groups:
    """The layer of each call of the forward that is in one."""
    calls = (node for node in program.graph.nodes if is_forward(node) and node in SOURCE)
    return {node: layer for node in calls if (layer := layer_of(SOURCE[node].module))}


@cache
def layer_of(module: str) -> str:
    """The layer that the module at a path is in, or is; "" where that is none."""
    match = _LAYER.match(module)
    return match.group(1) if match else ""


def regions(program: Program) -> Groups:
    """The region under `torch.utils.checkpoint` of each call of the forward that is in one."""
    return {node: f"region {node.meta[REGION]}" for node in program.graph.nodes if is_forward(node) and REGION in node.meta}


def named(mode: str, program: Program) -> frozenset[str]:
    """What is computed again under `mode`, of "auto" the user's regions, by name. Before or after shardings are decided."""
    if mode in ("full", "selective"):
        return within(program, layers(program), keeps=is_contraction if mode == "selective" else lambda node: False)
    return within(program, regions(program)) if mode == "auto" else frozenset()


def within(program: Program, groups: Groups, keeps: Callable[[Node], bool] = lambda node: False) -> frozenset[str]:
    """The names of the calls that are computed again where each of `groups` is, from what it reads, but for what `keeps` says.

    What it makes for others is kept, and so are sums that are reduced for others, and what `fixed` says.
    """
    banned = fixed(program)
    found: set[Node] = set()
    for node in program.graph.nodes:
        if node not in groups or node in banned or node.target is save:
            continue
        if node.target is reshard:
            source = node.args[0]
            is_again = source in found if reduces(node) else True
        else:
            is_again = not keeps(node) and all(groups.get(reader) == groups[node] for reader in readers(node))
        if is_again:
            found.add(node)
    return frozenset(node.name for node in found)


def readers(node: Node) -> Iterator[Node]:
    """The calls of the forward that read `node`, through views and changes of sharding; the output, if it is a result."""
    for user in node.users:
        if user.op == "output":
            yield user
        elif is_forward(user) and user.target is not save:
            if user.target is reshard or user.target is operator.getitem or is_view(user):
                yield from readers(user)
            else:
                yield user


def fixed(program: Program) -> frozenset[Node]:
    """The calls that are done once: what runs once a step, what joins microbatches, and what reads a buffer that the step changes."""
    changed = {item.name for item in program.signature.outputs_of("buffer")}
    old = {node for item, node in program.named_inputs() if item.kind == "buffer" and item.name in changed}
    found = set(Work(program).per_step)
    for node in program.graph.nodes:
        if not is_forward(node):
            continue
        if (is_view(node) or node.target is reshard) and any(operand in old for operand in node.all_input_nodes):
            old.add(node)
        if any(operand in old for operand in node.all_input_nodes) or (node.target is reshard and _joins_microbatches(node)):
            found.add(node)
    return frozenset(found)


def _joins_microbatches(node: Node) -> bool:
    source = operands(node)[0]
    found = moves(SHARDING[source][0], SHARDING[node][0])
    return any(MICROBATCHES in move.axes and move.collective != "slice" for move in found)
