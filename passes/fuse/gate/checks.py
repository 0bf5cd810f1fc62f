"""What holds wherever an op takes the place of several: who else reads what is between, what is written in place, which casts count."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.fx import Node

from autopar.graph.emit import tensor_of
from autopar.graph.overwrites import is_last_reader, overwritten, writes
from autopar.ir.arguments import node_at
from autopar.ir.fusion import Refused
from autopar.ops.spellings import is_cast, widens


def same_as(node: Node) -> set[Node]:
    """`node` and the values that it is a wider copy of, and wider copies of these."""
    while is_cast(node) and widens(node):
        node = node_at(node, 0)
    found, pending = {node}, [node]
    while pending:
        for user in pending.pop().users:
            if is_cast(user) and widens(user) and user not in found:
                found.add(user)
                pending.append(user)
    return found


def narrowest(node: Node) -> Node:
    """What `node` is a wider copy of, itself if it is none."""
    while is_cast(node) and widens(node):
        node = node_at(node, 0)
    return node


def rounded(node: Node) -> Node:
    """`node`, or the cast to fewer bits that alone reads it."""
    user = next(iter(node.users), None)
    alone = user is not None and len(node.users) == 1 and is_cast(user)
    return user if alone and tensor_of(user).dtype.itemsize < tensor_of(node).dtype.itemsize else node  # type: ignore[arg-type, return-value]


def widest(*nodes: Node) -> torch.dtype:
    """The dtype that holds all of them."""
    found = tensor_of(nodes[0]).dtype
    for node in nodes[1:]:
        found = torch.promote_types(found, tensor_of(node).dtype)
    return found


def check_interior(interior: Iterable[Node], last: Iterable[Node], reason: str) -> None:
    """Raises `Refused(reason)` where a node of `interior` is read by more than the others and `last`."""
    interior = tuple(interior)
    inside = {*interior, *last}
    for node in interior:
        if any(user not in inside for user in node.users):
            raise Refused(reason)


def check_writes(interior: Iterable[Node], operands: Iterable[Node], root: Node, writers: Sequence[Node]) -> None:
    """Raises `Refused` where what is written in place would be read by others, or an operand is written before `root`.

    The operands are those of the op and all wider copies of them that may have been read instead.
    """
    for node in interior:
        if writes(node) and not is_last_reader(node, node.all_input_nodes[0]):
            raise Refused(f"{node.target} writes in place into a value that is read elsewhere, too")
    writer = overwritten(operands, root, writers, interior)
    if writer is not None:
        raise Refused(f"{writer.target} writes into an operand in place, between where it is made and the product")
