"""What an op reads by masks whose values are known, and how it is said by the places where they are true: a class for each kind of read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.fx import Node

from autopar.frontend.known_values import KnownValues
from autopar.graph.emit import tensor_of
from autopar.ir.arguments import arguments, int_at

aten = torch.ops.aten


@dataclass(frozen=True)
class TruePlaces:
    """Where a known mask is true, along one of its dims."""

    places: torch.Tensor


class PlaceConstants:
    """The placeholder that holds some places, one for all that are equal."""

    def __init__(self, add: Callable[[torch.Tensor], Node], known: KnownValues) -> None:
        self._add, self._known = add, known
        self._added: list[tuple[torch.Tensor, Node]] = []

    def __call__(self, index: Any) -> Any:
        """Another index is given back as it is."""
        return self.of(index.places) if isinstance(index, TruePlaces) else index

    def of(self, places: torch.Tensor) -> Node:
        node = next((node for other, node in self._added if torch.equal(other, places)), None)
        if node is None:
            node = self._add(places)
            self._added.append((places, node))
            self._known.know(node, places)
        return node


def index_tensor(operand: Any) -> torch.Tensor:
    """The fake value of a node, or a tensor as it is."""
    return tensor_of(operand) if isinstance(operand, Node) else operand


# What indexes an operand, along each dim: known places, another index as it is, or None.
Places = list[Any]


class MaskRead(Protocol):
    """A kind of read.

    places   those of the masks among the arguments; None where nobody knows one, or there is none
    counted  what is read, on fake tensors: that has a size, and no values
    put      lets a node of a graph read at `places`, or what it gave be a constant
    """

    def places(self, args: Sequence[Any], known: KnownValues) -> Places | None: ...
    def counted(self, compute: Callable[..., Any], args: Sequence[Any], places: Places) -> Any: ...
    def put(self, node: Node, places: Places, constant: PlaceConstants) -> None: ...


class _Index:
    """`x[..., mask, ...]`, and what is written there."""

    @staticmethod
    def places(args: Sequence[Any], known: KnownValues) -> Places | None:
        found, has_mask = list[Any](), False
        for each in args[1]:
            if each is None or index_tensor(each).dtype != torch.bool:
                found.append(each)
            elif (mask := known.value(each)) is None or not mask.dim():
                return None
            else:
                found, has_mask = [*found, *_true(mask)], True
        return found if has_mask else None

    @staticmethod
    def counted(compute: Callable[..., Any], args: Sequence[Any], places: Places) -> Any:
        indices = [_empty(compute, args[0], (len(each.places),)) if isinstance(each, TruePlaces) else each for each in places]
        return compute(aten.index.Tensor, (args[0], indices), {})

    @staticmethod
    def put(node: Node, places: Places, constant: PlaceConstants) -> None:
        node.args = (arguments(node)[0], list(map(constant, places)), *arguments(node)[2:])


class _OfMask:
    """Of reads that take one mask, whole."""

    @staticmethod
    def places(args: Sequence[Any], known: KnownValues) -> Places | None:
        mask = known.value(args[-1])
        return None if mask is None or not mask.dim() else _true(mask)


class _MaskedSelect:
    """`torch.masked_select(x, mask)`: each is spread like the other."""

    @staticmethod
    def places(args: Sequence[Any], known: KnownValues) -> Places | None:
        mask = known.value(args[1])
        mask = None if mask is None else mask.expand(torch.broadcast_shapes(index_tensor(args[0]).shape, mask.shape))
        return None if mask is None or not mask.dim() else _true(mask)

    @staticmethod
    def counted(compute: Callable[..., Any], args: Sequence[Any], places: Places) -> Any:
        return _empty(compute, args[0], (len(places[0].places),), args[0].dtype)

    @staticmethod
    def put(node: Node, places: Places, constant: PlaceConstants) -> None:
        read, mask = arguments(node)
        shape = torch.broadcast_shapes(tensor_of(read).shape, tensor_of(mask).shape)
        with node.graph.inserting_before(node):
            spread = node.graph.call_function(aten.expand.default, (read, list(shape)))
        spread.meta = {key: value for key, value in node.meta.items() if key != "val"}
        node.target, node.args = aten.index.Tensor, (spread, list(map(constant, places)))


class _Nonzero(_OfMask):
    """`torch.nonzero(mask)`: a row for each place."""

    @staticmethod
    def counted(compute: Callable[..., Any], args: Sequence[Any], places: Places) -> Any:
        return _empty(compute, args[0], (len(places[0].places), len(places)))

    @staticmethod
    def put(node: Node, places: Places, constant: PlaceConstants) -> None:
        node.replace_all_uses_with(constant.of(torch.stack([each.places for each in places], 1)))
        node.graph.erase_node(node)


class _Where(_OfMask):
    """`torch.where(mask)`, and `torch.nonzero(mask, as_tuple=True)`: a tensor for each dim of the mask."""

    @staticmethod
    def counted(compute: Callable[..., Any], args: Sequence[Any], places: Places) -> Any:
        return [_empty(compute, args[0], (len(each.places),)) for each in places]

    @staticmethod
    def put(node: Node, places: Places, constant: PlaceConstants) -> None:
        for reader in list(node.users):
            reader.replace_all_uses_with(constant(places[int_at(reader, 1)]))
            node.graph.erase_node(reader)
        node.graph.erase_node(node)


def _true(mask: torch.Tensor) -> Places:
    return [TruePlaces(places) for places in mask.nonzero(as_tuple=True)]


def _empty(compute: Callable[..., Any], like: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.long) -> Any:
    return compute(aten.empty.memory_format, (shape,), {"dtype": dtype, "device": like.device})


READS: Mapping[Any, MaskRead] = {
    aten.index.Tensor: _Index(),
    aten.masked_select.default: _MaskedSelect(),
    aten.nonzero.default: _Nonzero(),
    aten.nonzero_numpy.default: _Where(),
    aten.where.default: _Where(),
}
