"""Matrix products, by their einsum equations."""

from __future__ import annotations

from torch.fx import Node

from autopar.ir.program import operands
from autopar.ops.rule import Labels, Rule, rule
from autopar.ops.rules.labels import argument, aten, broadcast, shape_of

_EQUATIONS: dict[object, str] = {
    aten.mm.default: "mk,kn->mn",
    aten.bmm.default: "bmk,bkn->bmn",
    aten.mv.default: "mk,k->m",
    aten.dot.default: "k,k->",
    aten.vdot.default: "k,k->",
}
_WITH_BIAS: dict[object, str] = {
    aten.addmm.default: "mk,kn->mn",
    aten.baddbmm.default: "bmk,bkn->bmn",
    aten.addmv.default: "mk,k->m",
    aten.addbmm.default: "bmk,bkn->mn",
}


def _labels(equation: str) -> tuple[tuple[Labels, ...], Labels]:
    inputs, result = equation.split("->")
    return tuple(tuple(term) for term in inputs.split(",")), tuple(result)


def _flops(labels: tuple[Labels, ...], shapes: list[tuple[int, ...]]) -> float:
    sizes = {label: size for term, shape in zip(labels, shapes, strict=True) for label, size in zip(term, shape, strict=True)}
    flops = 2.0
    for size in sizes.values():
        flops *= size
    return flops


@rule(*_EQUATIONS)
def contraction(node: Node) -> Rule:
    inputs, result = _labels(_EQUATIONS[node.target])
    flops = _flops(inputs, [shape_of(operand) for operand in operands(node)])
    return Rule(inputs, (result,), linear=(frozenset({0}), frozenset({1})), flops=flops)


@rule(*_WITH_BIAS)
def contraction_with_bias(node: Node) -> Rule:
    """The contracted labels are blocked: every rank of a split would add the bias once more."""
    inputs, result = _labels(_WITH_BIAS[node.target])
    bias, left, right = (shape_of(node.args[i]) for i in range(3))
    flops = _flops(inputs, [left, right])
    names = {f"d{i}": label for i, label in enumerate(result)}
    bias_labels = tuple(names[str(label)] if label else None for label in broadcast(bias, shape_of(node)))
    contracted = frozenset(str(label) for term in inputs for label in term if label not in result)
    if argument(node, 3, "beta", 1) == 0:
        contracted = frozenset[str]()
    return Rule((bias_labels, *inputs), (result,), contracted, linear=(frozenset({0, 1}), frozenset({0, 2})), flops=flops)
