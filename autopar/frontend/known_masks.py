"""Reads by a mask that shapes alone give: all pairs but those of a sample with itself, in a contrastive loss.

    sim[~torch.eye(n, dtype=torch.bool)].view(n, n - 1)         sim[rows, columns].view(n, n - 1), of constant rows and columns

How many a mask counts is a size, which fake tensors cannot say of values that they have not. What a mask of this kind holds is known, so
the read is captured by the places where the mask is true.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.multiprocessing.reductions import StorageWeakRef

from autopar._torch import FakeTensorMode, fake_calls_seen, fake_mode_of, is_fake, pytree
from autopar.errors import CaptureError
from autopar.frontend.known_values import KnownValues
from autopar.frontend.mask_reads import READS, MaskRead, PlaceConstants, Places, TruePlaces, index_tensor
from autopar.graph.autocast import NOTHING, CastsOfCalls, Region
from autopar.graph.emit import tensor_of
from autopar.graph.overwrites import memory_of
from autopar.ir.arguments import arguments
from autopar.ir.source import WRAPPED, source_of

aten = torch.ops.aten

_WRITES = (aten.index_put.default, aten.index_put_.default)


def known_masks_counted() -> AbstractContextManager[None]:
    """While this is entered, what is read by a mask that shapes alone give has a size, on fake tensors."""
    known, is_within = KnownValues(_memory), False

    def call(compute: Callable[..., Any], op: Any, args: Any, kwargs: Any) -> Any:
        nonlocal is_within
        if is_within:  # what torch makes one call of
            return compute(op, args, kwargs)
        is_within = True
        try:
            places = READS[op].places(args, known) if op in READS else None
            result = compute(op, args, kwargs) if places is None else READS[op].counted(compute, args, places)
            known.note(op, args, kwargs, result)
            return result
        finally:
            is_within = False

    return fake_calls_seen(call)


def _memory(tensor: torch.Tensor) -> StorageWeakRef | None:
    """Which is that of numbers side by side; sparse ones are all taken to share theirs. Kept: no other memory gets its address."""
    return StorageWeakRef(tensor.untyped_storage()) if tensor.layout is torch.strided else None


def known_masks_indexed(
    graph: Graph, constants: Mapping[Node, torch.Tensor], regions: Mapping[Node, Region], add_constant: Callable[[torch.Tensor], Node]
) -> None:
    """Let what was read by known masks be read by the places where they are true, in a graph whose nodes have torch's own fake values.

    What is written by them at as many places, too. `constants` are those that the graph has already; `add_constant` makes a placeholder for
    another. `regions` are those of calls under autocast: what they cast is not known here.
    """
    if not any(_is_counted(node) for node in graph.nodes):
        return
    known = KnownValues(memory_of)
    constant = PlaceConstants(add_constant, known)
    for node, value in constants.items():
        if not (value.is_meta or is_fake(value)):
            known.know(node, value)
    casts = CastsOfCalls(_mode_of(graph))
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        is_read, is_written = _is_counted(node), node.target in _WRITES and _has_mask(node)
        read = READS[node.target if is_read else aten.index.Tensor]
        places = read.places(arguments(node), known) if is_read or is_written else None
        if not _is_cast(node, regions, casts):
            known.note(node.target, node.args, node.kwargs, node)
        if is_read and (places is None or _shapes(node.meta["val"]) != _shapes(_on_meta(read, node, places))):
            raise CaptureError(
                "forward reads by a mask whose values are known while it runs, and are not in its graph\n"
                f"  where: {source_of(node, WRAPPED).at}\n"
                "  how to mend it: make the mask of torch.arange, torch.eye and the like, in forward, outside of autocast, and write it "
                "out of place"
            )
        if places is not None and (is_read or _has_rows(node, places)):
            read.put(node, places, constant)


def _is_cast(node: Node, regions: Mapping[Node, Region], casts: CastsOfCalls) -> bool:
    """Whether an autocast makes something else of a call than the call says."""
    if node not in regions or regions[node].autocast is None:
        return False
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
    return regions[node].casts_of(node, args, kwargs, casts) != NOTHING


def _mode_of(graph: Graph) -> FakeTensorMode:
    values = (value for node in graph.nodes for value in pytree.tree_leaves(node.meta.get("val")))
    return fake_mode_of(next(value for value in values if isinstance(value, torch.Tensor) and is_fake(value)))


def _is_counted(node: Node) -> bool:
    """Whether `node` reads by a mask, and its size is known."""
    if node.target not in READS or (node.target is aten.index.Tensor and not _has_mask(node)):
        return False
    return all(isinstance(size, int) for each in _shapes(node.meta["val"]) for size in each)


def _has_mask(node: Node) -> bool:
    return any(each is not None and tensor_of(each).dtype == torch.bool for each in arguments(node)[1])


def _shapes(value: Any) -> list[tuple[int, ...]]:
    return [tuple(each.shape) for each in pytree.tree_leaves(value)]


def _on_meta(read: MaskRead, node: Node, places: Places) -> Any:
    """What `node` gives of `places`."""

    def on_meta(operand: Any) -> Any:
        is_here = operand is None or isinstance(operand, TruePlaces)
        return operand if is_here else torch.empty_like(index_tensor(operand), device="meta")

    return read.counted(lambda op, args, kwargs: op(*args, **kwargs), [on_meta(arguments(node)[0])], list(map(on_meta, places)))


def _has_rows(node: Node, places: Places) -> bool:
    """Whether what is written by a mask has a row for each place where it is true, and not one for all."""
    values, given = tensor_of(arguments(node)[2]), [dim for dim, each in enumerate(places) if each is not None]
    front = given[0] if given[-1] - given[0] + 1 == len(given) else 0
    behind = tensor_of(arguments(node)[0]).ndim - len(given) - front
    return values.ndim > behind and values.shape[values.ndim - behind - 1] != 1
