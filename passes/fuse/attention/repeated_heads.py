"""Key and value heads that were repeated for the query heads, read again as the groups that they were.

    [B, G, T, D] → unsqueeze, expand, reshape → [B, H, T, D]    or    repeat_interleave(H / G, dim=-3)

Attention of ours reads G heads for H query heads itself. The repeated ones are copies: of a Llama's keys and values 4 or 8 of each,
kept for the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from autopar.graph.emit import Emitter, tensor_of
from autopar.graph.overwrites import overwritten
from autopar.passes.fuse.attention.layout import Labels, Layout, Placed, above, flat


@dataclass(frozen=True)
class RepeatedHeads:
    """The value `source` before its heads were repeated, and its `layout` [..., G, T, D] behind the views that follow."""

    source: Placed
    layout: Layout
    labels: Labels

    @staticmethod
    def of(operand: Node) -> RepeatedHeads | None:
        """What `operand` [..., H, T, D] repeats; None where each of its heads is one of its own."""
        labels = Labels()
        whole = labels.of_shape(tensor_of(operand).shape)
        node, layout, found = operand, whole, None
        while (step := above(node, layout, labels)) is not None:
            node, layout = step
            heads, present = labels.resolved(whole[-3]), set(labels.resolved(flat(layout)))
            groups = tuple(label for label in heads if label in present)
            if not present >= set(flat(labels.layout((*whole[:-3], *whole[-2:])))) or groups != heads[: len(groups)]:
                break
            wanted = labels.layout((*whole[:-3], groups, *whole[-2:]))
            # The nearest source, or the one that lies as it is wanted.
            if len(groups) < len(heads) and (found is None or labels.layout(layout) == wanted):
                found = RepeatedHeads(Placed(node, layout), wanted, labels)
        return found

    @property
    def num_groups(self) -> int:
        return self.labels.size(self.labels.resolved(self.layout[-3]))

    def emit(self, emit: Emitter) -> Node:
        return self.source.laid_out(emit, self.layout, self.labels)


def groups_of(key: Node, value: Node, before: Node, writers: Sequence[Node]) -> tuple[RepeatedHeads, RepeatedHeads] | None:
    """`key` and `value` as equal groups of heads that may still be read at `before`; None where there are no such groups."""
    if min(tensor_of(key).ndim, tensor_of(value).ndim) < 4:
        return None
    keys, values = RepeatedHeads.of(key), RepeatedHeads.of(value)
    if keys is None or values is None or keys.num_groups != values.num_groups:
        return None
    return None if overwritten((keys.source.node, values.source.node), before, writers) else (keys, values)
