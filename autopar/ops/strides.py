"""Which kernels honour the strides of their operands. All others are given contiguous ones.

Many of ATen's kernels read an operand, mostly a gradient, a statistic or an index, as if it were contiguous without looking, and
answer wrongly where it is not: the backward ops of weight norm, layer norm, group norm and 3-d pools, bags of embeddings, attention
on CPU. After collectives and slices a part may have other strides than the whole, so that a rank meets strides the model never had.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from autopar._torch import OpOverload, gives_views
from autopar.ir.program import operands, results_of
from autopar.ops.rule import RULES
from autopar.ops.rules.pointwise import pointwise

# ATen ops, by name, that were tested on operands of several layouts: those that read much, where a needless copy would cost time.
_HONOURING = frozenset(
    """
    mm bmm addmm baddbmm mv dot convolution convolution_backward
    sum mean prod any all amax amin max min argmax argmin var std var_mean std_mean norm linalg_vector_norm logsumexp
    _softmax _log_softmax _safe_softmax _softmax_backward_data _log_softmax_backward_data cumsum cumprod sort topk glu glu_backward
    cat stack split split_with_sizes slice_scatter select_scatter select_backward slice_backward constant_pad_nd flip roll repeat tril triu
    reshape _unsafe_view index _unsafe_index index_put _unsafe_index_put index_select index_add gather scatter scatter_add
    embedding embedding_dense_backward
    """.split()
)
# Views of memory itself, not of what lies there.
_VIEWS_OF_MEMORY = ("aten.view_as_complex.default", "aten.view.dtype", "aten.as_strided.default")


def honours_strides(target: object) -> bool:
    """Whether an op computes the same whatever the strides of its operands are, as far as is known.

    So do pointwise ops, views, the ops named above, and those that say so by torch's tag `flexible_layout`, as all of ours do.
    """
    if not isinstance(target, OpOverload):
        return True
    if str(target) in _VIEWS_OF_MEMORY:
        return False
    if torch.Tag.pointwise in target.tags or torch.Tag.flexible_layout in target.tags:
        return True
    if (RULES.get(target) or RULES.get(str(target))) is pointwise or gives_views(target):
        return True
    return target.namespace == "aten" and target.overloadpacket.__name__ in _HONOURING


def to_be_contiguous(node: Node, parts: tuple[Node, ...]) -> Iterator[bool]:
    """For each of `parts`, the local operands of `node`, whether it must be made contiguous.

    An op that others registered, or one that addresses memory, may want an operand laid out as it was traced: what was strided
    there is left alone.
    """
    honours = honours_strides(node.target)
    takes_contiguous = getattr(node.target, "namespace", "") == "aten" and str(node.target) != "aten.as_strided.default"
    for operand, part in zip(operands(node), parts, strict=True):
        whole, local = results_of(operand)[0], results_of(part)[0]
        strided = local is not None and not local.is_contiguous()
        yield strided and not honours and (takes_contiguous or whole is None or whole.is_contiguous())
