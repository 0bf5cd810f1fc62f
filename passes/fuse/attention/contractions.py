"""Products of two tensors, however they are called: which label of the result comes from which operand, and what is summed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from autopar.graph.emit import tensor_of
from autopar.ir.arguments import float_named, list_at, node_at
from autopar.ir.program import operands
from autopar.passes.fuse.attention.layout import Labels, Layout

aten = torch.ops.aten


@dataclass(frozen=True)
class Contraction:
    """`node` = scale · left × right + factor · added. `contracted` labels are summed over."""

    node: Node
    left: Node
    right: Node
    left_layout: Layout
    right_layout: Layout
    contracted: tuple[int, ...]
    scale: float = 1.0
    added: Node | None = None
    factor: float = 1.0

    def sides(self) -> tuple[tuple[Node, Layout], tuple[Node, Layout]]:
        return (self.left, self.left_layout), (self.right, self.right_layout)


def is_contraction(node: Node) -> bool:
    """Whether `contraction` can read it."""
    if node.target is aten.einsum.default:
        return len(list_at(node, 1)) == 2 and _terms(node) is not None
    if node.target is aten.matmul.default:
        return all(tensor_of(operand).dim() > 1 for operand in node.args)
    return node.target in (aten.bmm.default, aten.mm.default, aten.baddbmm.default)


def contraction(node: Node, layout: Layout, labels: Labels) -> Contraction:
    """`node`, whose result carries `layout`, taken apart."""
    found = _terms(node)
    assert found is not None, node
    (first, second), output = found
    left, right = operands(node)[-2:]
    carried = dict(zip(output, layout, strict=True))
    contracted: list[int] = []
    for letter, size in zip(first, tensor_of(left).shape, strict=True):
        if letter not in carried:
            carried[letter] = labels.new(size)
            contracted += carried[letter]
    sides = [
        tuple(carried[letter] if size > 1 else () for letter, size in zip(term, tensor_of(operand).shape, strict=True))
        for term, operand in ((first, left), (second, right))
    ]
    scale, factor = float_named(node, "alpha", 1.0), float_named(node, "beta", 1.0)
    added = node_at(node, 0) if node.target is aten.baddbmm.default and factor != 0.0 else None
    return Contraction(node, left, right, sides[0], sides[1], tuple(contracted), scale, added, factor)


def _terms(node: Node) -> tuple[list[str], str] | None:
    """The operands' dims and the result's, one character each; None for traces, sums within one operand and unequal ellipses."""
    shapes = [tensor_of(operand).shape for operand in operands(node)]
    if node.target is not aten.einsum.default:
        batch = _dots(tensor_of(node).dim() - 2)
        inner = zip(shapes[-2:], ("ik", "kj"), strict=True)
        return [batch[len(batch) + 2 - len(shape) :] + letters for shape, letters in inner], batch + "ij"
    equation = str(node.args[0]).replace(" ", "")
    inputs, arrow, output = equation.partition("->")
    terms = inputs.split(",")
    if not arrow or len(terms) != len(shapes):
        return None
    if "..." in equation:
        dots = {len(shape) - len(term) + 3 for term, shape in zip(terms, shapes, strict=True) if "..." in term}
        if len(dots) != 1:
            return None
        batch = _dots(dots.pop())
        terms, output = [term.replace("...", batch) for term in terms], output.replace("...", batch)
    single = any(len(set(term)) != len(term) for term in (*terms, output))
    summed = set(terms[0]) ^ set(terms[1])
    return None if single or not summed <= set(output) else (terms, output)


def _dots(number: int) -> str:
    return "".join(chr(0x100 + position) for position in range(number))
