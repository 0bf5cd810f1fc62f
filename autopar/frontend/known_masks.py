"""Reads by a mask that shapes alone give: all pairs but those of a sample with itself, in a contrastive loss.

    sim[~torch.eye(n, dtype=torch.bool)].view(n, n - 1)         sim[rows, columns].view(n, n - 1), of constant rows and columns

How many a mask counts is a size, which fake tensors cannot say of values that they have not. What a mask of this kind holds is known, so
the read is captured by the places where the mask is true.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.multiprocessing.reductions import StorageWeakRef

from autopar._torch import fake_calls_seen, is_fake, pytree
from autopar.errors import CaptureError
from autopar.frontend.known_values import KnownValues
from autopar.graph.emit import tensor_of
from autopar.graph.overwrites import memory_of
from autopar.ir.arguments import arguments, int_at
from autopar.ir.source import WRAPPED, source_of

aten = torch.ops.aten

_READS = (aten.index.Tensor, aten.masked_select.default, aten.nonzero.default, aten.nonzero_numpy.default, aten.where.default)


def known_masks_counted() -> AbstractContextManager[None]:
    """While this is entered, what is read by a mask that shapes alone give has a size, on fake tensors."""
    known, is_within = KnownValues(lambda tensor: StorageWeakRef(tensor.untyped_storage()).cdata), False

    def call(compute: Callable[..., Any], op: Any, args: Any, kwargs: Any) -> Any:
        nonlocal is_within
        if is_within:  # what torch makes one call of
            return compute(op, args, kwargs)
        is_within = True
        try:
            found = _places(op, args, known) if op in _READS else None
            result = compute(op, args, kwargs) if found is None else _of_size(compute, op, args, found)
            known.note(op, args, kwargs, result)
            return result
        finally:
            is_within = False

    return fake_calls_seen(call)


def known_masks_indexed(graph: Graph, constants: Mapping[Node, torch.Tensor], hold: Callable[[torch.Tensor], Node]) -> None:
    """Let what was read by known masks be read by the places where they are true, in a graph whose nodes have torch's own fake values.

    `constants` are those that the graph has already; `hold` makes a placeholder for another.
    """
    if not any(_is_counted(node) for node in graph.nodes):
        return
    known = KnownValues(memory_of)
    holder = _Holder(hold, known)
    for node, value in constants.items():
        if not (value.is_meta or is_fake(value)):
            known.know(node, value)
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        found = _places(node.target, arguments(node), known) if _is_counted(node) else None
        known.note(node.target, node.args, node.kwargs, node)
        if found is not None:
            _read_at(node, found, holder)
        elif _is_counted(node):
            raise CaptureError(
                "forward reads by a mask whose values are known while it runs, and are not in its graph\n"
                f"  where: {source_of(node, WRAPPED).at}\n"
                "  how to mend it: make the mask of torch.arange, torch.eye and the like, in forward, and write it out of place"
            )


class _Holder:
    """The placeholder that holds some places, one for all that are equal."""

    def __init__(self, hold: Callable[[torch.Tensor], Node], known: KnownValues) -> None:
        self._hold, self._known = hold, known
        self._held: list[tuple[torch.Tensor, Node]] = []

    def __call__(self, places: Any) -> Any:
        """Another index is given back as it is."""
        if not isinstance(places, torch.Tensor):
            return places
        node = next((node for held, node in self._held if torch.equal(held, places)), None)
        if node is None:
            node = self._hold(places)
            self._held.append((places, node))
            self._known.know(node, places)
        return node


def _is_counted(node: Node) -> bool:
    """Whether `node` reads by a mask, and its size is known."""
    if node.target not in _READS:
        return False
    if node.target is aten.index.Tensor and not any(
        each is not None and tensor_of(each).dtype == torch.bool for each in arguments(node)[1]
    ):
        return False
    return all(isinstance(size, int) for each in pytree.tree_leaves(node.meta["val"]) for size in each.shape)


def _places(op: Any, args: Sequence[Any], known: KnownValues) -> list[Any] | None:
    """What indexes the operand in the place of the masks, along each dim: known places, another index as it is, or None. None where nobody
    knows a mask, or there is none."""
    if op is not aten.index.Tensor:
        mask = known.value(args[-1])
        if mask is not None and op is aten.masked_select.default:
            mask = mask.expand(torch.broadcast_shapes(_value(args[0]).shape, mask.shape))
        return None if mask is None else list(mask.nonzero(as_tuple=True))
    found = list[Any]()
    for each in args[1]:
        if each is None or _value(each).dtype != torch.bool:
            found.append(each)
        elif (mask := known.value(each)) is None:
            return None
        else:
            found += mask.nonzero(as_tuple=True)
    return found if len(found) != len(args[1]) or any(one is not other for one, other in zip(found, args[1], strict=True)) else None


def _value(operand: Any) -> torch.Tensor:
    return tensor_of(operand) if isinstance(operand, Node) else operand


def _of_size(compute: Callable[..., Any], op: Any, args: Any, places: list[Any]) -> Any:
    """What `op` gives on fake tensors: as many as there are `places`, which have values."""

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return compute(aten.empty.memory_format, (shape,), {"dtype": dtype, "device": args[0].device})

    if op is aten.masked_select.default:
        return empty((len(places[0]),), args[0].dtype)
    if op is aten.nonzero.default:
        return empty((len(places[0]), len(places)), torch.long)
    if op is not aten.index.Tensor:
        return [empty((len(each),), torch.long) for each in places]
    given = {id(each) for each in args[1]}
    return compute(op, (args[0], [each if id(each) in given else empty((len(each),), torch.long) for each in places]), {})


def _read_at(node: Node, places: list[Any], holder: Callable[[Any], Any]) -> None:
    """Let `node` read at `places`."""
    read = arguments(node)[0]
    if node.target in (aten.nonzero_numpy.default, aten.where.default):
        for reader in list(node.users):
            reader.replace_all_uses_with(holder(places[int_at(reader, 1)]))
            node.graph.erase_node(reader)
    elif node.target is aten.nonzero.default:
        node.replace_all_uses_with(holder(torch.stack(places, 1)))
    if not node.users:
        node.graph.erase_node(node)
        return
    if node.target is aten.masked_select.default:
        mask = arguments(node)[1]
        shape = torch.broadcast_shapes(tensor_of(read).shape, tensor_of(mask).shape)
        with node.graph.inserting_before(node):
            read = node.graph.call_function(aten.expand.default, (read, list(shape)))
        read.meta = {key: value for key, value in node.meta.items() if key != "val"}
    node.target, node.args = aten.index.Tensor, (read, list(map(holder, places)))
