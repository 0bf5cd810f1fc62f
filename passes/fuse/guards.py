"""When one op may replace several: nothing else reads the values inside, and no operand is written in place in between."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.fx import Node

from autopar.graph.overwrites import is_last_reader, memory_of, overwritten, writes, written_by
from autopar.ir.fusion import NotFusible


def readers_of(node: Node) -> list[Node]:
    """Who reads a value, but for calls whose result nobody reads."""
    return [user for user in node.users if user.users or user.op == "output" or writes(user)]


def check_interior(interior: Iterable[Node], last: Iterable[Node], reason: str) -> None:
    """Raises `NotFusible(reason)` where a node of `interior` is read by more than the others and `last`."""
    interior = tuple(interior)
    inside = {*interior, *last}
    if any(user not in inside for node in interior for user in node.users):
        raise NotFusible(reason)


def check_operands(operands: Iterable[Node], root: Node, writers: Sequence[Node], where: str, own: Iterable[Node] = ()) -> None:
    """The op reads its operands where `root` stood: raises `NotFusible` where one of `writers`, but for `own`, wrote before into one."""
    if (writer := overwritten(operands, root, writers, own)) is not None:
        raise NotFusible(f"{writer.target} writes into an operand in place, {where}")


def check_writes(interior: Iterable[Node], operands: Iterable[Node], root: Node, writers: Sequence[Node]) -> None:
    """Raises `NotFusible` where what is written in place would be read by others, or an operand is written before `root`.

    The operands are those of the op and all wider copies of them that may have been read instead.
    """
    for node in interior:
        if writes(node) and not is_last_reader(node, node.all_input_nodes[0]):
            raise NotFusible(f"{node.target} writes in place into a value that is read elsewhere, too")
    check_operands(operands, root, writers, "between where it is made and the product", interior)


def check_kept(operands: Iterable[Node], root: Node, writers: Sequence[Node]) -> None:
    """An op of ours keeps its operands for the backward, where the ops that it replaces may have kept copies, or nothing (of a sum): raises
    `NotFusible` where one of `writers` writes into one behind `root`."""
    kept = {memory_of(operand) for operand in operands}
    writer = next((each for each in writers if root < each and memory_of(written_by(each)) in kept), None)
    if writer is not None:
        raise NotFusible(f"{writer.target} writes into an operand in place behind it, which the op would keep for the backward")
