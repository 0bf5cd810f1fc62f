"""Sums, maxima, scans and everything else that runs along dims."""

from __future__ import annotations

from torch.fx import Node

from autopar.ir.program import results_of
from autopar.ops.rule import Labels, Rule, rule
from autopar.ops.rules.labels import aligned, argument, aten, blocked, dim_of, dims_of, positional, shape_of, without
from autopar.ops.traits import truncates

_FIRST = (frozenset({0}),)
# Ops over dims (argument 1, `keepdim` argument 2) whose parts cannot be put together by a sum or maximum of results.
_WHOLE_DIMS = (
    aten.amin.default,
    aten.prod.dim_int,
    aten.any.dim,
    aten.any.dims,
    aten.any.default,
    aten.all.dim,
    aten.all.dims,
    aten.all.default,
    aten.argmax.default,
    aten.argmin.default,
    aten.logsumexp.default,
    aten.min.default,
    aten.min.dim,
    aten.max.dim,
    aten.prod.default,
    aten.median.default,
    aten.nanmedian.default,
    aten.nansum.default,
)
# The same over one dim: the name of the op says at which argument it is.
_WHOLE_DIM: dict[object, int] = {
    aten.median.dim: 1,
    aten.nanmedian.dim: 1,
    aten.kthvalue.default: 2,
    aten.mode.default: 1,
}


def _kept(node: Node, reduced: tuple[int, ...]) -> Labels:
    """Labels of the result: reduced dims are left out, or None where they are kept with size 1."""
    source = positional(len(shape_of(node.args[0])))
    value = next(value for value in results_of(node) if value is not None)
    if value.dim() == len(source):
        return without(source, reduced)
    return tuple(label for i, label in enumerate(source) if i not in reduced)


@rule(aten.sum.default, aten.sum.dim_IntList)
def total(node: Node) -> Rule:
    source = positional(len(shape_of(node.args[0])))
    reduced = dims_of(argument(node, 1, "dim"), len(source))
    return Rule((source,), (_kept(node, reduced),), linear=() if truncates(node) else _FIRST)


@rule(aten.amax.default, aten.max.default)
def maximum(node: Node) -> Rule:
    source = positional(len(shape_of(node.args[0])))
    reduced = dims_of(argument(node, 1, "dim"), len(source))
    return Rule((source,), (_kept(node, reduced),), reductions={f"d{i}": "max" for i in reduced})


@rule(aten.mean.default, aten.mean.dim)
def mean(node: Node) -> Rule:
    """Blocked along its dims: a mean of means is no sum. Write `sum / count` to split it."""
    whole = _whole(node, dims_of(argument(node, 1, "dim"), len(shape_of(node.args[0]))))
    return Rule(whole.operands, whole.results, linear=_FIRST)


@rule(*_WHOLE_DIMS)
def whole_dims(node: Node) -> Rule:
    return _whole(node, dims_of(argument(node, 1, "dim"), len(shape_of(node.args[0]))))


@rule(*_WHOLE_DIM)
def whole_dim(node: Node) -> Rule:
    return _whole(node, (dim_of(argument(node, _WHOLE_DIM[node.target], "dim", -1), len(shape_of(node.args[0]))),))


@rule(aten.aminmax.default)
def extremes(node: Node) -> Rule:
    return _whole(node, dims_of(node.kwargs.get("dim"), len(shape_of(node.args[0]))))


@rule("aten.norm.Scalar", "aten.norm.ScalarOpt_dim", "aten.norm.ScalarOpt_dtype", "aten.norm.ScalarOpt_dim_dtype")
def norm(node: Node) -> Rule:
    has_dims = "dim" in str(node.target)
    return _whole(node, dims_of(node.args[2] if has_dims else None, len(shape_of(node.args[0]))))


@rule(aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction, aten.var.dim)
def variance(node: Node) -> Rule:
    return _whole(node, dims_of(argument(node, 1, "dim"), len(shape_of(node.args[0]))))


@rule(aten.linalg_vector_norm.default)
def vector_norm(node: Node) -> Rule:
    return _whole(node, dims_of(argument(node, 2, "dim"), len(shape_of(node.args[0]))))


def _whole(node: Node, reduced: tuple[int, ...]) -> Rule:
    source = without(positional(len(shape_of(node.args[0]))), reduced)
    return Rule((source,), (_kept(node, reduced),) * len(results_of(node)))


@rule(aten.histc.default)
def histogram(node: Node) -> Rule | None:
    """(input, bins, min, max): counts are sums over the elements. None where the bounds are those of the data."""
    if argument(node, 2, "min", 0) == argument(node, 3, "max", 0):
        return None
    source = positional(len(shape_of(node.args[0])))
    return Rule((source,), ((None,),))


@rule(aten.cumsum.default)
def cumulative_sum(node: Node) -> Rule:
    return _along(node, linear=not truncates(node))


@rule(
    aten.cumprod.default,
    aten.cummax.default,
    aten.cummin.default,
    aten.logcumsumexp.default,
    aten._softmax.default,
    aten._log_softmax.default,
    "aten._safe_softmax.default",
)
def along_one_dim(node: Node) -> Rule:
    return _along(node, linear=False)


def _along(node: Node, linear: bool) -> Rule:
    num_dims = len(shape_of(node.args[0]))
    labels = without(positional(num_dims), (dim_of(argument(node, 1, "dim"), num_dims),))
    return Rule((labels,), (labels,) * len(results_of(node)), linear=_FIRST if linear else ())


@rule(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def softmax_backward(node: Node) -> Rule:
    """(gradient, output, dim, dtype), linear in the gradient."""
    num_dims = len(shape_of(node))
    labels = without(positional(num_dims), (dim_of(argument(node, 2, "dim"), num_dims),))
    return Rule(aligned(node, [(node.args[0], labels), (node.args[1], labels)]), (labels,), linear=_FIRST)


@rule(aten.glu.default)
def glu(node: Node) -> Rule:
    """(input, dim): halves of a dim gate each other."""
    num_dims = len(shape_of(node))
    labels = without(positional(num_dims), (dim_of(argument(node, 1, "dim", -1), num_dims),))
    return Rule((labels,), (labels,))


@rule(aten.glu_backward.default)
def glu_backward(node: Node) -> Rule:
    """(gradient, input, dim), linear in the gradient."""
    num_dims = len(shape_of(node))
    labels = without(positional(num_dims), (dim_of(argument(node, 2, "dim"), num_dims),))
    return Rule((labels, labels), (labels,), linear=_FIRST)


@rule(aten.isin.Tensor_Tensor, aten.bucketize.Tensor)
def look_up(node: Node) -> Rule:
    """(elements, table): each element by itself against the whole table."""
    labels = positional(len(shape_of(node)))
    return Rule((labels, blocked(len(shape_of(node.args[1])))), (labels,))


@rule(aten.topk.default)
def topk(node: Node) -> Rule:
    return _sorted(node, argument(node, 2, "dim", -1))


@rule(aten.sort.default)
def sort(node: Node) -> Rule:
    return _sorted(node, argument(node, 1, "dim", -1))


@rule("aten.sort.stable")
def stable_sort(node: Node) -> Rule:
    return _sorted(node, argument(node, 2, "dim", -1))


def _sorted(node: Node, dim: int) -> Rule:
    num_dims = len(shape_of(node.args[0]))
    labels = without(positional(num_dims), (dim_of(dim, num_dims),)) if num_dims else blocked(0)
    return Rule((labels,), (labels,) * len(results_of(node)))


@rule(aten.segment_reduce.default, aten._segment_reduce_backward.default)
def segment_reduce(node: Node) -> Rule:
    """(data[…, axis, …], lengths or offsets[…, segments]): the rows of a segment lie one behind another, so the axis is needed whole.

    The backward has gradient, result and data, which have the same dims.
    """
    lengths = node.kwargs.get("lengths"), node.kwargs.get("offsets")
    labels = positional(len(shape_of(node.args[0])))
    axis = dim_of(node.kwargs.get("axis", 0), len(labels))
    labels = without(labels, (axis,))
    whole = [(argument, labels) for argument in node.args]
    return Rule(aligned(node, [*whole, *((each, (*labels[:axis], None)) for each in lengths)]), (labels,))
