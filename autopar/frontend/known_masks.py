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

from autopar._torch import FakeTensorMode, fake_calls_seen, fake_mode_of, is_fake, pytree
from autopar.errors import CaptureError
from autopar.frontend.known_values import KnownValues
from autopar.graph.autocast import NOTHING, CastsOfCalls, Region
from autopar.graph.emit import tensor_of
from autopar.graph.overwrites import memory_of
from autopar.ir.arguments import arguments, int_at
from autopar.ir.source import WRAPPED, source_of

aten = torch.ops.aten

_WRITES = (aten.index_put.default, aten.index_put_.default)
_READS = (aten.index.Tensor, aten.masked_select.default, aten.nonzero.default, aten.nonzero_numpy.default, aten.where.default)


def known_masks_counted() -> AbstractContextManager[None]:
    """While this is entered, what is read by a mask that shapes alone give has a size, on fake tensors."""
    known, is_within = KnownValues(_memory), False

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
    constant = _Constants(add_constant, known)
    for node, value in constants.items():
        if not (value.is_meta or is_fake(value)):
            known.know(node, value)
    casts = CastsOfCalls(_mode_of(graph))
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        is_read, is_written = _is_counted(node), node.target in _WRITES and _has_mask(node)
        found = _places(node.target, arguments(node), known) if is_read or is_written else None
        if not _is_cast(node, regions, casts):
            known.note(node.target, node.args, node.kwargs, node)
        if is_read and (found is None or _shapes(node.meta["val"]) != _shapes(_read(node, found))):
            raise CaptureError(
                "forward reads by a mask whose values are known while it runs, and are not in its graph\n"
                f"  where: {source_of(node, WRAPPED).at}\n"
                "  how to mend it: make the mask of torch.arange, torch.eye and the like, in forward, outside of autocast, and write it "
                "out of place"
            )
        if found is not None and (is_read or _has_rows(node, found)):
            _at_places(node, found, constant)


class _Constants:
    """The placeholder that holds some places, one for all that are equal."""

    def __init__(self, add: Callable[[torch.Tensor], Node], known: KnownValues) -> None:
        self._add, self._known = add, known
        self._added: list[tuple[torch.Tensor, Node]] = []

    def __call__(self, places: Any) -> Any:
        """Another index is given back as it is."""
        if not isinstance(places, torch.Tensor):
            return places
        node = next((node for other, node in self._added if torch.equal(other, places)), None)
        if node is None:
            node = self._add(places)
            self._added.append((places, node))
            self._known.know(node, places)
        return node


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
    if node.target not in _READS or (node.target is aten.index.Tensor and not _has_mask(node)):
        return False
    return all(isinstance(size, int) for each in _shapes(node.meta["val"]) for size in each)


def _has_mask(node: Node) -> bool:
    return any(each is not None and tensor_of(each).dtype == torch.bool for each in arguments(node)[1])


def _shapes(value: Any) -> list[tuple[int, ...]]:
    return [tuple(each.shape) for each in pytree.tree_leaves(value)]


def _places(op: Any, args: Sequence[Any], known: KnownValues) -> list[Any] | None:
    """What indexes the operand in the place of the masks, along each dim: known places, another index as it is, or None. None where nobody
    knows a mask, or there is none."""
    if op in _READS[1:]:
        mask = known.value(args[-1])
        if mask is not None and op is aten.masked_select.default:
            mask = mask.expand(torch.broadcast_shapes(_value(args[0]).shape, mask.shape))
        return None if mask is None or not mask.dim() else list(mask.nonzero(as_tuple=True))
    found, has_mask = list[Any](), False
    for each in args[1]:
        if each is None or _value(each).dtype != torch.bool:
            found.append(each)
        elif (mask := known.value(each)) is None or not mask.dim():
            return None
        else:
            found, has_mask = [*found, *mask.nonzero(as_tuple=True)], True
    return found if has_mask else None


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


def _read(node: Node, places: list[Any]) -> Any:
    """What `node` gives of `places`, on meta."""

    def on_meta(operand: Any) -> Any:
        return None if operand is None else torch.empty_like(_value(operand), device="meta")

    return _of_size(
        lambda op, args, kwargs: op(*args, **kwargs),
        node.target,
        (on_meta(arguments(node)[0]), [on_meta(each) for each in places]),
        [on_meta(each) for each in places],
    )


def _has_rows(node: Node, places: list[Any]) -> bool:
    """Whether what is written by a mask has a row for each place where it is true, and not one for all."""
    values, given = tensor_of(arguments(node)[2]), [dim for dim, each in enumerate(places) if each is not None]
    front = given[0] if given[-1] - given[0] + 1 == len(given) else 0
    behind = tensor_of(arguments(node)[0]).ndim - len(given) - front
    return values.ndim > behind and values.shape[values.ndim - behind - 1] != 1


def _at_places(node: Node, places: list[Any], constant: Callable[[Any], Any]) -> None:
    """Let `node` read or write at `places`."""
    read = arguments(node)[0]
    if node.target in (aten.nonzero_numpy.default, aten.where.default):
        for reader in list(node.users):
            reader.replace_all_uses_with(constant(places[int_at(reader, 1)]))
            node.graph.erase_node(reader)
    elif node.target is aten.nonzero.default:
        node.replace_all_uses_with(constant(torch.stack(places, 1)))
    if node.target not in _WRITES and not node.users:
        node.graph.erase_node(node)
        return
    if node.target is aten.masked_select.default:
        mask = arguments(node)[1]
        shape = torch.broadcast_shapes(tensor_of(read).shape, tensor_of(mask).shape)
        with node.graph.inserting_before(node):
            read = node.graph.call_function(aten.expand.default, (read, list(shape)))
        read.meta = {key: value for key, value in node.meta.items() if key != "val"}
    node.target = node.target if node.target in _WRITES else aten.index.Tensor
    node.args = (read, list(map(constant, places)), *arguments(node)[2:])
