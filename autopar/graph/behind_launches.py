"""Gradients of weights are computed while collectives of the backward move.

Nobody but the caller waits for them, and all that follows waits for the collective:

    products, weight gradients               products
    LAUNCH all_reduce (…) -> h               LAUNCH all_reduce (…) -> h
    WAIT h                           →       weight gradients
    norms, products (h, …)                   WAIT h
                                             norms, products (h, …)

Megatron-LM writes it by hand into its linear layers (`LinearWithGradAccumulationAndAsyncCommunication`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

from torch.fx import Node

from autopar.graph.cut_places import Place
from autopar.graph.gone_on_with import is_gone_on_with
from autopar.ir.collectives import is_launch, wait
from autopar.ir.keys import PHASE
from autopar.ops.lookup import is_contraction


def behind_launches(nodes: Sequence[Node]) -> tuple[list[Node], frozenset[Node]]:
    """`nodes`, calls of one section in the order of the graph, in one in which collectives of the backward are launched before what only
    the caller reads; and those of them at which a fragment has to end for that.

    Nothing leaves its block of the model, nor what has no product among what would be moved: a fragment more would cost more.
    """
    spare = _spare(nodes)
    found, ends = list[Node](), set[Node]()
    for block in _blocks(nodes):
        since = list[Node]()  # since the launch before
        for node in block:
            since.append(node)
            if not _is_waited_for(node):
                continue
            behind = [each for each in since if each in spare]
            if any(map(is_contraction, behind)):
                since = [*(each for each in since if each not in spare), *behind]
                ends.add(node)
            found += since
            since = []
        found += since
    return found, frozenset(ends | _with_products_behind(found, spare))


def _spare(nodes: Sequence[Node]) -> set[Node]:
    """What nothing else of the section reads, at once, through others such, or through a collective that nobody else waits for: the
    caller does, or a sum over microbatches."""
    found, inside = set[Node](), frozenset(nodes)
    for node in reversed(nodes):
        if all(user in found or user not in inside for user in node.users) and not (is_launch(node) and is_gone_on_with(node)):
            found.add(node)
    # A collective's WAIT, and what an op of several results gives, stand with it.
    parts = (operator.getitem, wait)
    return {node for node in found if node.target not in parts or node.all_input_nodes[0] in found}


def _blocks(nodes: Sequence[Node]) -> Iterator[list[Node]]:
    """Runs of calls between which a fragment ends anyway."""
    block, place = list[Node](), Place()
    for node in nodes:
        before, place = place, place.at(node)
        if place.is_cut_from(before):
            yield block
            block = []
        block.append(node)
    yield block


def _with_products_behind(nodes: Sequence[Node], spare: set[Node]) -> set[Node]:
    """The launches behind which a product that is spare comes before the first reader of what they bring."""
    found, latest = set[Node](), None
    for node in nodes:
        if _is_waited_for(node):
            latest = node
        elif latest is not None and node in spare and is_contraction(node):
            found.add(latest)
            latest = None
        elif node.target is not wait and any(operand.target is wait and operand.args[0] is latest for operand in node.all_input_nodes):
            latest = None
    return found


def _is_waited_for(node: Node) -> bool:
    """Whether `node` launches what the backward made and goes on with."""
    operand = node.args[0] if is_launch(node) else None
    return isinstance(operand, Node) and PHASE.get(node) == PHASE.get(operand) == "backward" and is_gone_on_with(node)
