"""Where a collective and the products beside it may be cut by rows together, so that one moves while the other computes.

    all_gather → views → mm            what is gathered is multiplied, row by row
    mm → add, views → reduce_scatter   partial sums are added up row by row; an all_reduce likewise

Never along the inner dim of a product: each row is computed as it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.fx import Node

from autopar.graph.gone_on_with import is_gone_on_with
from autopar.graph.pieces import PRODUCT, Digit, after, before, rearranges, shape_at
from autopar.ir.arguments import list_at, node_at
from autopar.ir.collectives import all_gather, all_reduce, is_launch, reduce_scatter, wait
from autopar.ir.keys import COPY, PHASE, STAGE
from autopar.ir.mesh import MICROBATCHES
from autopar.ir.program import Program

aten = torch.ops.aten

_SUM = aten.add.Tensor
# What of the second operand of a product may be computed earlier than it is, beside views and collectives.
_LIGHT = frozenset((aten.clone.default, aten._to_copy.default, aten.cat.default, aten.select.int))


@dataclass(frozen=True)
class Pieces:
    """How a site is cut: the pieces of each of its calls, and those of what it reads."""

    of_calls: Mapping[Node, Digit]
    of_operands: Mapping[Node, Digit]


@dataclass(frozen=True)
class Site:
    """A collective, the `products` behind or before it, and what lies between them: all `calls`, in the order of the graph."""

    launch: Node
    calls: tuple[Node, ...]

    @property
    def is_gather(self) -> bool:
        return self.launch.target is all_gather

    @property
    def axes(self) -> tuple[str, ...]:
        return axes_of(self.launch)

    @property
    def wait(self) -> Node:
        return next(iter(self.launch.users))

    @cached_property
    def products(self) -> tuple[Node, ...]:
        return tuple(node for node in self.calls if node.target is PRODUCT)

    def pieces(self, number: int) -> Pieces | None:
        """How the rows are cut into `number` equal parts, along the outermost dim that allows it, which takes the fewest copies."""
        shape = shape_at(node_at(self.launch, 0) if self.is_gather else self.launch)
        for dim, size in enumerate(shape):
            if size % number == 0:
                digit = Digit(math.prod(shape[dim + 1 :]) * size // number, number)
                found = self._gathered(digit) if self.is_gather else self._reduced(digit)
                if found is not None:
                    return found
        return None

    def _gathered(self, digit: Digit) -> Pieces | None:
        operand = node_at(self.launch, 0)
        found = {operand: digit}
        for node in self.calls:
            next_digit = after(node, found[node_at(node, 0)])
            if next_digit is None:
                return None
            found[node] = next_digit
        del found[operand]
        return Pieces(found, {operand: digit})

    def _reduced(self, digit: Digit) -> Pieces | None:
        found, given = {self.launch: digit}, dict[Node, Digit]()
        for node in reversed(self.calls):
            operand_digit = before(node, found[node])
            if operand_digit is None:
                return None
            for operand in cut_operands(node):
                known = found if operand in self.calls else given
                if known.setdefault(operand, operand_digit) != operand_digit:
                    return None
        return Pieces({**found, self.wait: digit}, given)


def axes_of(launch: Node) -> tuple[str, ...]:
    return tuple(map(str, list_at(launch, 1)))


def cut_operands(node: Node) -> tuple[Node, ...]:
    """The operands of which a piece of `node` needs a piece alone; of a product the rows."""
    return (node_at(node, 0), node_at(node, 1)) if node.target is _SUM else (node_at(node, 0),)


def sites(program: Program) -> tuple[Site, ...]:
    """Those of a LOCAL program, in the order of their collectives; no call is in two."""
    taken, found = set[Node](), list[Site]()
    for launch in program.graph.nodes:
        if not is_launch(launch) or launch in COPY or MICROBATCHES in list_at(launch, 1):
            continue
        calls = _behind(launch, taken) if launch.target is all_gather else _ahead(launch, taken)
        if calls:
            taken |= calls
            found.append(Site(launch, tuple(sorted(calls))))
    return tuple(found)


def _behind(launch: Node, taken: set[Node]) -> set[Node]:
    """A gather and what it leads to, products the last; empty where it leads to none, or gathers a parameter."""
    operand = node_at(launch, 0)
    while rearranges(operand) and not is_launch(operand):
        operand = node_at(operand, 0)
    if operand.op == "placeholder":
        return set()
    reached, shape = _views_and_products(launch, taken), shape_at(node_at(launch, 0))
    for dim, size in enumerate(shape):
        along = _along(launch, reached, Digit(math.prod(shape[dim + 1 :]), size)) if size > 1 else set[Node]()
        products = {node for node in along if node.target is PRODUCT}
        first = first_reader(launch, _leading_to(products, along))
        products = {node for node in products if hoisted(node, launch, first) is not None}
        if products:
            return _leading_to(products, along)
    return set()


def _views_and_products(launch: Node, taken: set[Node]) -> list[Node]:
    """What is made of `launch` by views, and products of these by their first operand, in the order of the graph."""
    found, stack = set[Node](), [launch]
    while stack:
        node = stack.pop()
        if node in found:
            continue
        found.add(node)
        for user in node.users if node.target is not PRODUCT else ():
            is_product = user.target is PRODUCT and user.args[0] is node and user not in taken
            if _is_beside(user, launch) and (is_product or (rearranges(user) and not is_launch(user))):
                stack.append(user)
    return sorted(found)


def _along(launch: Node, reached: list[Node], digit: Digit) -> set[Node]:
    """What of `reached` goes by the pieces of which the operand of `launch` has `digit`."""
    found = {node_at(launch, 0): digit}
    for node in reached:
        known = found.get(node_at(node, 0))
        made = after(node, known) if known is not None else None
        if made is not None:
            found[node] = made
    return set(found) - {node_at(launch, 0)}


def _leading_to(products: set[Node], reached: set[Node]) -> set[Node]:
    found = set(products)
    for node in sorted(reached, reverse=True):
        if any(user in found for user in node.users):
            found.add(node)
    return found


def first_reader(launch: Node, calls: set[Node]) -> Node:
    """The first to need what is gathered: one of the products among `calls`, or whoever else reads one of these."""
    readers = [user for node in calls - {launch} for user in node.users if user not in calls]
    return min([*readers, *(node for node in calls if node.target is PRODUCT)], default=launch)


def hoisted(product: Node, launch: Node, first: Node) -> list[Node] | None:
    """What the second operand of `product` is made of behind `first`, in order: it has to stand before; None where it cannot."""
    found, stack, later = set[Node](), [node_at(product, 1)], list[Node]()
    while stack:
        node = stack.pop()
        if node is launch:
            return None
        if node in found or node < launch:
            continue
        found.add(node)
        stack += node.all_input_nodes
        later += [node] if not node < first else []
    is_light = all(is_launch(node) or rearranges(node) or node.target in _LIGHT for node in later)
    return sorted(later) if is_light else None


def _ahead(launch: Node, taken: set[Node]) -> set[Node]:
    """A sum over ranks and what its operand alone is made of, products the first; empty where there is none, or nobody waits for it."""
    if launch.target not in (all_reduce, reduce_scatter) or launch.args[2] != "sum" or not is_gone_on_with(launch):
        return set()
    reached, stack = {launch}, [launch]
    while stack:
        for operand in cut_operands(stack.pop()):
            if operand not in taken and len(operand.users) == 1 and _is_beside(operand, launch) and _goes_by_rows(operand):
                reached.add(operand)
                stack += [operand] if operand.target is not PRODUCT else []
    found = {node for node in reached if node.target is PRODUCT}
    for node in sorted(reached):
        if any(operand in found for operand in node.all_input_nodes):
            found.add(node)
    return found


def _goes_by_rows(node: Node) -> bool:
    if node.target is _SUM:
        return not node.kwargs and all(isinstance(each, Node) and shape_at(each) == shape_at(node) for each in node.args)
    return node.target is PRODUCT or (rearranges(node) and not is_launch(node) and node.target is not wait)


def _is_beside(node: Node, launch: Node) -> bool:
    """Whether both are of one stage and phase."""
    return STAGE.get(node) == STAGE.get(launch) and PHASE.get(node) == PHASE.get(launch)
