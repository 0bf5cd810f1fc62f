"""Every `scaled_dot_product_attention` becomes one op of ours, the same on every device.

Left to autograd's trace it would turn into whichever kernel the tracing device prefers, each with another backward.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from autopar.graph.constants import Constants
from autopar.graph.dead_code import remove_dead_code
from autopar.graph.differentiable import differentiable
from autopar.graph.emit import Emitter, tensor_of
from autopar.graph.emit import replace as replace_node
from autopar.graph.overwrites import memory_of, overwritten, sources_of, writers_of, written_by
from autopar.ir.keys import SITE, Site
from autopar.ir.mesh import MICROBATCHES, Mesh, parent
from autopar.ir.program import Program
from autopar.passes.fuse.attention.form import attended, call_attention
from autopar.passes.fuse.attention.layout import Labels, broadcast_to, flat
from autopar.passes.fuse.attention.masks import meaning_of_one
from autopar.passes.fuse.attention.repeated_heads import groups_of

aten = torch.ops.aten


@dataclass(frozen=True)
class UnifyAttention:
    """`aten.scaled_dot_product_attention` → `autopar.attention` and its result 0.

    Reads: a FORWARD program in which random ops are still ATen's: run it before `KeyRandom`, which keys the dropout it leaves.
    Writes: `autopar.attention` on [B, H, S, D] operands; leading dims beyond that are merged. Its dropout is one that
        `KeyRandom` is to draw. A direct `view` of the result becomes `reshape`: the op has a layout of its own.
        A mask that is the triangle or a band becomes a flag, ids of documents that it compares become operands, as in `FuseAttention`;
        where heads are fewer than the ranks that may split them it stays a mask: a flag counts rows from 0, and rows can be split then.
        Key and value heads that were repeated for the query heads are read as the groups that they were.
    Ensures: no `scaled_dot_product_attention` is left. Where the mask needs a gradient (a learned bias), or heads are broadcast in a
        way that grouped heads cannot say, plain matmul and softmax stand in its place.
    """

    name: str = "unify attention"

    def apply(self, program: Program) -> Program:
        program = program.copy()
        trained, constants, writers = differentiable(program), Constants(program), writers_of(program.graph)
        for node in list(program.graph.nodes):
            if node.target is aten.scaled_dot_product_attention.default:
                emit = Emitter(program.graph, before=node)
                call = AttentionCall.of(node).with_groups(emit, node, writers)
                fused = call.attn_mask not in trained and _has_groups(call)
                # What a mask says is read from what made it: nothing of that may have been written since.
                said = (
                    _Said.by(emit, call, constants, node, writers, _has_heads_for(program.mesh, call)) if fused else _Said(call.attn_mask)
                )
                _reshape_views(node)
                by = _fused(emit, call, said) if fused else plain_attention(emit, call)
                # The op keeps its output for the backward.
                is_written = any(memory_of(written_by(writer)) is node for writer in writers)
                replace_node(node, emit.call(aten.clone.default, by) if is_written else by)
        remove_dead_code(program.graph)
        return program


@dataclass(frozen=True)
class AttentionCall:
    """Where a `scaled_dot_product_attention` draws, and its arguments, by torch's names."""

    site: Site | None
    query: Node
    key: Node
    value: Node
    attn_mask: Node | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @staticmethod
    def of(node: Node) -> AttentionCall:
        found = AttentionCall(SITE.get(node), *node.args, **node.kwargs)  # type: ignore[arg-type]
        return found if found.scale is not None else replace(found, scale=1.0 / math.sqrt(tensor_of(found.query).shape[-1]))

    def with_groups(self, emit: Emitter, node: Node, writers: Sequence[Node]) -> AttentionCall:
        """The call at `node` that reads the heads that key and value repeat for the query heads."""
        heads = {tensor_of(each).shape[-3] for each in (self.query, self.key, self.value) if tensor_of(each).ndim > 3}
        found = groups_of(self.key, self.value, node, writers) if len(heads) == 1 else None
        return self if found is None else replace(self, key=found[0].emit(emit), value=found[1].emit(emit), enable_gqa=True)

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Shapes of query, key and value with at least four dims: [N, S, D] is N batches of one head."""
        query, key, value = (_four_dims(tensor_of(node).shape) for node in (self.query, self.key, self.value))
        return query, key, value

    @property
    def batch(self) -> tuple[int, ...]:
        """What is in front of the heads, broadcast."""
        return torch.broadcast_shapes(*(shape[:-3] for shape in self.shapes))


def _has_groups(call: AttentionCall) -> bool:
    """Whether query heads map onto key heads in equal runs, and key and value have the same heads."""
    query, key, value = call.shapes
    same = key[-3] == value[-3]
    return same and (query[-3] == key[-3] or key[-3] == 1 or (call.enable_gqa and query[-3] % key[-3] == 0))


def _has_heads_for(mesh: Mesh, call: AttentionCall) -> bool:
    """Whether there is a head for each rank along the axes that do not split the batch."""
    ranks = mesh.size_of([axis for axis in mesh.names if parent(axis) not in ("dp", "pp", MICROBATCHES)])
    return call.shapes[0][-3] >= ranks


@dataclass(frozen=True)
class _Said:
    """A mask as the op takes it: what is left of it, as the op's dims have it, beside flags and ids of documents."""

    mask: Node | None
    is_causal: bool = False
    window: int = 0
    documents: tuple[Node | None, Node | None] = (None, None)

    @staticmethod
    def by(emit: Emitter, call: AttentionCall, constants: Constants, node: Node, writers: Sequence[Node], may_flag: bool) -> _Said:
        """What the mask of the call at `node` says; with flags where it `may_flag` them."""
        if call.attn_mask is None:
            return _Said(None)
        labels, num_dims = Labels(), tensor_of(call.query).ndim
        dims = labels.of_shape((*call.batch, *call.shapes[0][-3:-1], call.shapes[1][-2]))
        scores = (flat(dims[:-3]), *dims[-3:])
        # Without heads, masks have none either.
        layout = broadcast_to((*dims[:-3], *dims[-2:]) if num_dims == 3 else dims, tensor_of(call.attn_mask).shape)
        found = meaning_of_one(call.attn_mask, layout, scores, labels, constants)
        flags = found.is_causal or found.window > 0
        is_plain = not (flags or found.documents) and bool(found.attends or found.added) or (flags and not may_flag)
        read = sources_of([call.attn_mask])
        if is_plain or overwritten({*read, *found.nodes()}, node, writers, own=read) is not None:
            return _Said(_merged_mask(emit, call.attn_mask, num_dims, call.batch))
        assert not found.added, "an added mask is a flag, or what was given"
        documents = (None, None) if found.documents is None else found.documents.laid_out(emit, scores, labels)
        return _Said(attended(emit, found.attends, scores, labels), found.is_causal, found.window, documents)


def _fused(emit: Emitter, call: AttentionCall, said: _Said) -> Node:
    batch = call.batch
    operands = [_merged(emit, node, shape, batch) for node, shape in zip((call.query, call.key, call.value), call.shapes, strict=True)]
    options = {"is_causal": call.is_causal or said.is_causal, "scale": call.scale, "soft_cap": 0.0, "window": said.window}
    result = call_attention(emit, operands, said.mask, said.documents, call.dropout_p, **options)
    _note_site(result, call)
    out = emit.call(operator.getitem, result, 0)
    shape = torch.broadcast_shapes(*(tensor_of(node).shape[:-3] for node in (call.query, call.key, call.value)))
    wanted = [*shape, *tensor_of(call.query).shape[-3:-1], tensor_of(call.value).shape[-1]]
    return out if list(tensor_of(out).shape) == wanted else emit.call(aten.reshape.default, out, wanted)


def _note_site(node: Node, call: AttentionCall) -> None:
    if call.site is not None:
        SITE[node] = call.site


def _four_dims(shape: Sequence[int]) -> tuple[int, ...]:
    if len(shape) == 3:
        return (shape[0], 1, shape[1], shape[2])
    return (1,) * (4 - len(shape)) + tuple(shape)


def _merged(emit: Emitter, node: Node, shape: Sequence[int], batch: Sequence[int]) -> Node:
    """`node` as [B, H, S, D]: viewed in `shape`, its leading dims broadcast to `batch` and merged."""
    for wanted in (tuple(shape), (*batch, *shape[-3:]), (math.prod(batch), *shape[-3:])):
        if tuple(tensor_of(node).shape) != wanted:
            expands = len(wanted) == len(tensor_of(node).shape) and math.prod(wanted) != tensor_of(node).numel()
            node = emit.call(aten.expand.default if expands else aten.reshape.default, node, list(wanted))
    return node


def _merged_mask(emit: Emitter, mask: Node, num_dims: int, batch: Sequence[int]) -> Node:
    """The mask so that it broadcasts to [B, H, S, T]."""
    shape = tuple(tensor_of(mask).shape)
    if num_dims == 3 and len(shape) == 3:
        return emit.call(aten.unsqueeze.default, mask, 1)
    lead = len(shape) - 3
    if lead <= 0 or len(batch) == 1:
        return mask
    shape = (1,) * (len(batch) - lead) + shape
    return _merged(emit, mask, shape, batch)


def plain_attention(emit: Emitter, call: AttentionCall) -> Node:
    """Attention in plain ops, in float32 for 16-bit operands as torch's own."""
    dtype = tensor_of(call.query).dtype
    exact = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    query, key, value = (emit.cast(node, exact) for node in (call.query, call.key, call.value))
    if call.enable_gqa:
        num_heads = tensor_of(query).shape[-3]
        key, value = (_repeated(emit, node, num_heads) for node in (key, value))
    query = emit.call(aten.mul.Tensor, query, call.scale)
    scores = emit.call(aten.matmul.default, query, emit.call(aten.transpose.int, key, -2, -1))
    for mask in (call.attn_mask, _causal_mask(emit, tensor_of(scores)) if call.is_causal else None):
        scores = _masked(emit, scores, mask)
    probabilities = emit.call(aten._safe_softmax.default, scores, -1)
    if call.dropout_p > 0.0:
        probabilities = emit.call(aten.dropout.default, probabilities, call.dropout_p, True)
        _note_site(probabilities, call)
    return emit.cast(emit.call(aten.matmul.default, probabilities, value), dtype)


def _repeated(emit: Emitter, node: Node, num_heads: int) -> Node:
    repeats = num_heads // tensor_of(node).shape[-3]
    return node if repeats == 1 else emit.call(aten.repeat_interleave.self_int, node, repeats, -3)


def _causal_mask(emit: Emitter, scores: torch.Tensor) -> Node:
    length, key_length = scores.shape[-2:]
    rows = emit.call(aten.unsqueeze.default, emit.call(aten.arange.default, length, device=scores.device), 1)
    return emit.call(aten.ge.Tensor, rows, emit.call(aten.arange.default, key_length, device=scores.device))


def _masked(emit: Emitter, scores: Node, mask: Node | None) -> Node:
    if mask is None:
        return scores
    if tensor_of(mask).dtype == torch.bool:
        return emit.call(aten.where.ScalarOther, mask, scores, -math.inf)
    return emit.call(aten.add.Tensor, scores, emit.cast(mask, tensor_of(scores).dtype))


def _reshape_views(node: Node) -> None:
    """A `view` that the layout of `node` allowed need not fit the layout of what replaces it."""
    for user in node.users:
        if user.target is aten.view.default:
            user.target = aten.reshape.default
