"""Products by which tokens meet their experts: rows sorted by expert, one weight an expert.

    s  rows (token and choice, sorted)      e  experts      m, k, n  dims of a matrix product

Offsets say at which row each expert's run ends. They count all rows, so rows and experts are blocked; the other dims are free.
"""

from __future__ import annotations

from torch.fx import Node

from autopar.ops.rule import Label, Labels, Rule, rule
from autopar.ops.rules.labels import aligned, argument, numel, shape_of, value_of

_RUNS = frozenset({"s", "e"})
_EITHER = (frozenset({0}), frozenset({1}))


def _flops(rows: tuple[int, ...], weight: tuple[int, ...]) -> float:
    return 2.0 * rows[0] * weight[1] * weight[2]


@rule("transformers.grouped_mm_fallback.default")
def grouped_product(node: Node) -> Rule:
    """(rows[s, k], weight[e, k, n], offsets[e]) → [s, n]."""
    rows, weight, _ = node.args
    operands = (("s", "k"), ("e", "k", "n"), ("e",))
    return Rule(operands, (("s", "n"),), _RUNS, linear=_EITHER, flops=_flops(shape_of(rows), shape_of(weight)))


@rule("transformers.grouped_mm_fallback_backward.default")
def grouped_product_backward(node: Node) -> Rule:
    """(rows, weight, offsets, gradient[s, n]) → gradients of rows and weight."""
    rows, weight = node.args[:2]
    operands = (("s", "k"), ("e", "k", "n"), ("e",), ("s", "n"))
    flops = 2 * _flops(shape_of(rows), shape_of(weight))
    return Rule(operands, (("s", "k"), ("e", "k", "n")), _RUNS, linear=(frozenset({3}),), flops=flops)


# Of torch's own op: which dim the runs are of is said by the numbers of dims of both operands.
_GROUPED = {(2, 3): ("sk", "ekn", "sn"), (2, 2): ("ms", "sn", "emn"), (3, 2): ("emk", "ks", "ms"), (3, 3): ("emk", "ekn", "emn")}
_ALIGNMENT_BYTES = 16  # of every row of an operand


@rule("aten._grouped_mm.default")
def torch_grouped_product(node: Node) -> Rule | None:
    """(left, right, offsets?, bias?): dims are split in pieces of 16 bytes, as the kernels want their rows aligned."""
    left, right = node.args[:2]
    if argument(node, 3, "bias") is not None:
        return None
    shapes = shape_of(left), shape_of(right)
    terms = _GROUPED[len(shapes[0]), len(shapes[1])]
    sizes = {name: size for term, shape in zip(terms, shapes, strict=False) for name, size in zip(term, shape, strict=True)}
    piece = _ALIGNMENT_BYTES // value_of(left).dtype.itemsize
    labels, inner, blocked = dict[str, Label](), dict[str, int](), frozenset({"s"} if "s" in sizes else ())
    for name, size in sizes.items():
        labels[name] = name
        if name in "mkn" and size > piece and size % piece == 0:
            labels[name] = (name, f"{name}_piece")
            inner |= {name: size // piece, f"{name}_piece": piece}
            blocked |= {f"{name}_piece"}
        elif name in "mkn":
            blocked |= {name}
    offsets = argument(node, 2, "offs")
    if offsets is not None:
        labels["e"], blocked = "e", blocked | {"e"}
        sizes.pop("e", None)  # a row meets one expert
    operands, result = [_term(labels, term) for term in terms[:2]], _term(labels, terms[2])
    order = aligned(node, [(left, operands[0]), (right, operands[1]), (offsets, ("e",))])
    return Rule(order, (result,), blocked, linear=_EITHER, flops=2.0 * numel(sizes.values()), sizes=inner)


def _term(labels: dict[str, Label], term: str) -> Labels:
    return tuple(labels[name] for name in term)
