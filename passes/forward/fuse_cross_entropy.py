"""Cross entropy becomes one op of ours and arithmetic on rows."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from autopar.graph.dead_code import remove_dead_code
from autopar.graph.emit import Emitter, replace, tensor_of
from autopar.graph.overwrites import memory_of, overwritten, writers_of, written_by
from autopar.ir.arguments import int_at, node_at
from autopar.ir.fusion import FusionDecision, FusionSite
from autopar.ir.program import Program
from autopar.kernels.attention_reference import LOST_BELOW
from autopar.kernels.cross_entropy import cross_entropy
from autopar.kernels.registration import accumulation_dtype
from autopar.ops.rules.labels import argument
from autopar.ops.traits import PERMUTES, permutation
from autopar.passes.forward.decompose_losses import reduce_rows

aten = torch.ops.aten

_LOG_SOFTMAXES = (aten.log_softmax.int, aten._log_softmax.default)
_NLL_LOSSES = (aten.nll_loss.default, aten.nll_loss_nd.default)
# Where the number stands that masked logits become.
_FILLS: dict[object, int] = {
    aten.masked_fill.Scalar: 2,
    aten.masked_fill_.Scalar: 2,
    aten.where.ScalarOther: 2,
    aten.where.ScalarSelf: 1,
}
# The numbers by which ATen schemas name reductions.
_MEAN = 1


@dataclass(frozen=True)
class FuseCrossEntropy:
    """Cross entropy of labels → `autopar.cross_entropy` and a subtraction, a mask and a mean of numbers of rows.

    What is found: `aten.cross_entropy_loss`; `aten.nll_loss` of a log-softmax; a log-softmax of which the labels' entries are
    gathered, which `DecomposeIndices` makes of `x[arange(n), labels]`. Logits that were made wider for it, or had their classes moved to
    dim 1, are read as they were: the op computes in float32, and reads rows.

    Reads: a FORWARD program; run it after `DecomposeIndices`, and before `DecomposeLosses`, which takes the rest.
    Writes: one `autopar.cross_entropy` a loss, plain ATen ops on its results, the class numbers as an `aten.arange`.
    Ensures: what is decided to be fused is, with the shape and dtype that it had. A label that is no class and is not ignored gives NaN.
    """

    is_asked: bool = True
    name: str = "fuse cross entropy"

    def decide(self, program: Program) -> FusionDecision:
        if not self.is_asked:
            return FusionDecision(())
        writers = writers_of(program.graph)
        return FusionDecision(tuple(_looked_at(node, writers) for node in program.graph.nodes if _is_candidate(node)))

    def apply(self, program: Program, decision: FusionDecision) -> Program:
        if not decision.fused:
            return program
        program = program.copy()
        for each in decision.fused:
            node = program.node(each.node)
            emit = Emitter(program.graph, before=node)
            replace(node, emit.cast(_WRITTEN[node.target](emit, node), tensor_of(node).dtype))
        if decision.fused:
            remove_dead_code(program.graph)
        return program


def _is_candidate(node: Node) -> bool:
    if node.target is aten.cross_entropy_loss.default:
        return True
    source = node.args[0] if node.target in _REASONS else None
    return isinstance(source, Node) and source.target in _LOG_SOFTMAXES and _computes_in(source.args[0], tensor_of(source).dtype)


def _looked_at(node: Node, writers: Sequence[Node]) -> FusionSite:
    logits = _logits(node)
    reason = _REASONS[node.target](node) or _why_not_rows(node, logits) or _why_masked(logits) or _why_overwritten(node, logits, writers)
    conditions = () if reason else (f"{tensor_of(logits).shape[-1]} classes in the last dim of {str(tensor_of(logits).dtype)[6:]}",)
    return FusionSite.at(node, "cross entropy", conditions, reason)


def _why_not_rows(node: Node, logits: Node) -> str:
    num_dims, softmax_dim = tensor_of(logits).dim(), _class_dim(node)
    if node.target in _NLL_LOSSES and softmax_dim != (0 if num_dims == 1 else 1):
        return f"the loss takes dim {0 if num_dims == 1 else 1} for the classes, and the softmax is over dim {softmax_dim}"
    _, dim = _logits_and_dim(node)
    return f"its classes are dim {dim} of {num_dims}, and rows of the last dim are what the op reads" if dim != num_dims - 1 else ""


def _why_masked(logits: Node) -> str:
    """Beside a number such as −1e9 the log n of a row that it masks wholly is lost, which log_softmax keeps apart from the maximum."""
    number = logits.args[_FILLS[logits.target]] if logits.target in _FILLS else 0.0
    is_low = isinstance(number, (int, float)) and -math.inf < number < LOST_BELOW
    return f"its logits are masked by {number:g}, which a row that is masked wholly would show" if is_low else ""


def _why_overwritten(node: Node, logits: Node, writers: Sequence[Node]) -> str:
    """The op reads the logits where the loss stood, and its backward once more: nobody may write there after their first reader."""
    between: list[Node] = []
    value: Any = node.args[0]
    while value is not logits:
        between.append(value)
        value = value.args[0]
    reader, memory = (between or [node])[-1], memory_of(logits)
    late = (each for each in writers if reader < each and memory_of(written_by(each)) is memory)
    writer = next(late, None) or overwritten(between, node, writers)
    return f"{writer.target} writes into its logits in place" if writer is not None else ""


def _logits(node: Node) -> Node:
    """The scores before any log-softmax, as narrow as they were, where the op computes in no less than what they were cast to."""
    logits, _ = _logits_and_dim(node)
    return logits


def _logits_and_dim(node: Node) -> tuple[Node, int]:
    """With the dim of their classes: the last one where `logits.transpose(1, 2)` had moved it."""
    source, dim = node.args[0], _class_dim(node)
    assert isinstance(source, Node)
    if _softmax_dim(source) == dim and _computes_in(source.args[0], tensor_of(source).dtype):
        source = node_at(source, 0)
    source, last = _made_of(source), tensor_of(source).dim() - 1
    if (
        node.target is not aten.gather.default
        and dim == 1 < last
        and source.target in PERMUTES
        and permutation(source) == (0, last, *range(1, last))
    ):
        return _made_of(node_at(source, 0)), last
    return source, dim


def _made_of(source: Node) -> Node:
    """What `source` is made wider from."""
    while source.target in (aten._to_copy.default, aten.to.dtype) and _computes_in(source.args[0], tensor_of(source).dtype):
        source = node_at(source, 0)
    return source


def _computes_in(value: object, dtype: torch.dtype) -> bool:
    """Whether the op on `value` loses nothing of what `value` made wider, to `dtype`, would have kept."""
    before = tensor_of(value)
    exact = accumulation_dtype(before)
    return before.is_floating_point() and torch.promote_types(before.dtype, dtype) == dtype and torch.promote_types(exact, dtype) == exact


def _class_dim(node: Node) -> int:
    """The dim of the classes: that of the log-softmax below, but of a loss that has one of its own."""
    source: Any = node.args[0]
    own = 0 if tensor_of(source).dim() == 1 else 1
    found = None if node.target is aten.cross_entropy_loss.default else _softmax_dim(source)
    return own if found is None else found


def _softmax_dim(source: Any) -> int | None:
    return int(source.args[1]) % tensor_of(source).dim() if source.target in _LOG_SOFTMAXES else None


def _why_no_loss(node: Node) -> str:
    """A loss of torch's."""
    if not tensor_of(node.args[1]).dtype == torch.int64:
        return "its targets are probabilities, which need every logit again"
    smoothing = float(argument(node, 5, "label_smoothing", 0.0)) if node.target is aten.cross_entropy_loss.default else 0.0
    return (
        "its classes have weights, and smoothing sums them over all classes"
        if smoothing and argument(node, 2, "weight") is not None
        else ""
    )


def _why_not_gathered(node: Node) -> str:
    index: Any = node.args[2]
    dims = tensor_of(node.args[0]).dim()
    if int_at(node, 1) % dims != _class_dim(node):
        return f"dim {node.args[1]} is gathered from, and the softmax is over dim {_class_dim(node)}"
    shape = tensor_of(index).shape
    rows = tensor_of(node.args[0]).shape[:-1]
    return "" if shape == (*rows, 1) else f"it gathers {tuple(shape)}, which is not one class a row"


def _why_indexed(_: Node) -> str:
    """`DecomposeIndices` has made a gather of one label in each row."""
    return "it is no gather of one label in each row"


def _loss(emit: Emitter, node: Node) -> Node:
    """A loss of torch's, reduced as it was."""
    labels: Any = node.args[1]
    is_whole = node.target is aten.cross_entropy_loss.default
    smoothing = float(argument(node, 5, "label_smoothing", 0.0)) if is_whole else 0.0
    weight, logits = argument(node, 2, "weight"), _logits(node)
    size = tensor_of(logits).shape[-1]
    log_sum_exp, picked, total = _sums(emit, logits, labels)
    loss = emit.call(aten.sub.Tensor, log_sum_exp, picked)
    if smoothing:
        even = emit.call(aten.sub.Tensor, log_sum_exp, emit.call(aten.mul.Tensor, total, 1.0 / size))
        loss = emit.call(aten.mul.Tensor, loss, 1.0 - smoothing)
        loss = emit.call(aten.add.Tensor, loss, emit.call(aten.mul.Tensor, even, smoothing))
    weights = None
    if isinstance(weight, Node):
        index = emit.call(aten.clamp.default, labels, 0, size - 1)
        weights = emit.cast(emit.call(aten.index.Tensor, weight, [index]), tensor_of(loss).dtype)
        loss = emit.call(aten.mul.Tensor, loss, weights)
    reduction = int(argument(node, 3, "reduction", _MEAN))
    return reduce_rows(emit, loss, labels, size, int(argument(node, 4, "ignore_index", -100)), reduction, weights)


def _gathered(emit: Emitter, node: Node) -> Node:
    index: Any = node.args[2]
    return emit.call(aten.unsqueeze.default, _log_probability(emit, node, emit.call(aten.squeeze.dim, index, -1)), -1)


def _log_probability(emit: Emitter, node: Node, labels: Any) -> Node:
    """Of its label in each row; NaN where that is no class, which raises in torch."""
    logits = _logits(node)
    log_sum_exp, picked, _ = _sums(emit, logits, labels)
    size = tensor_of(logits).shape[-1]
    is_class = emit.call(aten.bitwise_and.Tensor, emit.call(aten.ge.Scalar, labels, 0), emit.call(aten.lt.Scalar, labels, size))
    return emit.call(aten.where.ScalarOther, is_class, emit.call(aten.sub.Tensor, picked, log_sum_exp), float("nan"))


def _sums(emit: Emitter, logits: Node, labels: Node) -> tuple[Node, Node, Node]:
    classes = emit.call(aten.arange.default, tensor_of(logits).shape[-1], device=tensor_of(labels).device)
    sums = emit.call(cross_entropy, logits, labels, classes)
    log_sum_exp, picked, total = (emit.call(operator.getitem, sums, result) for result in range(3))
    return log_sum_exp, picked, total


_WRITTEN: dict[object, Callable[[Emitter, Node], Node]] = {
    aten.cross_entropy_loss.default: _loss,
    **dict.fromkeys(_NLL_LOSSES, _loss),
    aten.gather.default: _gathered,
}
_REASONS: dict[object, Callable[[Node], str]] = {
    aten.cross_entropy_loss.default: _why_no_loss,
    **dict.fromkeys(_NLL_LOSSES, _why_no_loss),
    aten.gather.default: _why_not_gathered,
    aten.index.Tensor: _why_indexed,
}
