"""The calls of a program in segments: each layer, and what stands before, between and behind layers.

    forward    [before the layers]   [h.0]   [h.1]   [behind h.1]         embedding | layers | norm, head, loss
    backward   [behind h.1]          [h.1]   [h.0]   [before the layers]

A call of the backward without a layer belongs to what the forward has in front of the layer that the backward has just left.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from autopar.ir.keys import RECOMPUTED, SOURCE
from autopar.ir.markers import save
from autopar.ir.program import Program
from autopar.recompute.again import is_forward
from autopar.recompute.choices import Groups, layer_of

_FIRST, _BEHIND = "before the layers", "behind "


def segments(program: Program) -> Groups:
    """The segment of each call of the forward, changes of sharding and `save` nodes included."""
    found, here = dict[Node, str](), _FIRST
    for node in program.graph.nodes:
        if is_forward(node):
            layer = _layer(node)
            here = f"{_BEHIND}{layer}" if layer else here
            # A value is saved where it is made.
            found[node] = found.get(node.all_input_nodes[0], layer or here) if node.target is save else layer or here
    return found


def segments_of_backward(calls: Sequence[Node], names: Sequence[str]) -> Groups:
    """The segment in which each of `calls` of the backward runs, given in order, a copy with the call that it stands in front of. `names`
    are the segments of the forward, in its order."""
    found, here, before = dict[Node, str](), names[-1] if names else _FIRST, dict(zip(names[1:], names, strict=False))
    originals = [node for node in calls if node not in RECOMPUTED]
    for node in originals:
        layer = _layer(node)
        if layer:
            here = layer
        elif before.get(here, "").startswith((_FIRST, _BEHIND)):
            here = before[here]
        found[node] = here
    for node in reversed(calls):
        here = found.setdefault(node, here)
    return found


def _layer(node: Node) -> str:
    return layer_of(SOURCE[node].module) if node in SOURCE else ""
