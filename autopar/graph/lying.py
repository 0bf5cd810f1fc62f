"""Calls of a FORWARD program do what they did where it was traced, although its inputs lie row by row, and the model's may lie otherwise.

Of a tensor that is transposed or channels last `view`, `contiguous` and `as_strided` show, copy and address other memory. What they give
is the same once a view that does not fit copies, once what copied copies still where forward writes, and once addresses are of a copy
that lies as the tensor did.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.errors import CaptureError
from autopar.graph.emit import tensor_of
from autopar.graph.overwrites import SHOWS_OR_COPIES, is_copy_told, is_written_after
from autopar.ir.arguments import all_named, node_at
from autopar.ir.source import source_of

aten = torch.ops.aten

# Emits a call before a node: (node, target, args, kwargs).
Call = Callable[[Node, Any, tuple[Any, ...], dict[str, Any]], Node]

_COPYING: dict[Any, Any] = {aten.view.default: aten.reshape.default, aten.view_as.default: aten.reshape_as.default}
# They read several neighbours in memory as one number.
_OF_NEIGHBOURS = (aten.view_as_complex.default, aten.view.dtype)
_MEND = 'make it contiguous where it is made, self.register_buffer("q", q.contiguous()), and pass inputs as x.contiguous()'


class Lying:
    """How the values of `graph` lay where it was traced. Calls are brought to it in order, each before and after its value is computed."""

    def __init__(self, graph: Graph, call: Call) -> None:
        self._traced = {node: value for node in graph.nodes if isinstance(value := node.meta.get("val"), torch.Tensor)}
        self._call = call

    def before(self, node: Node) -> None:
        """Give `node` operands that lie as it needs them."""
        if node not in self._traced:
            return
        if node.target in _OF_NEIGHBOURS and not self._lies_alike(node_at(node, 0)):
            if is_written_after(node, node):
                raise _lost(node)
            _replace_first(node, self._compact(node, node_at(node, 0)))
        elif node.target is aten.as_strided.default:
            self._address(node)

    def copy(self, node: Node) -> bool:
        """Whether `node`, a view that its operand's memory does not allow, copies from now on."""
        if node not in self._traced or node.target not in _COPYING:
            return False
        if is_copy_told(node):
            raise _lost(node)
        node.target = _COPYING[node.target]
        return True

    def after(self, node: Node) -> bool:
        """Whether `node` copies, or shows its operand, from now on, so that its value is to be computed again."""
        if node.target not in SHOWS_OR_COPIES or node not in self._traced or node_at(node, 0) not in self._traced:
            return False
        operand = node_at(node, 0)
        ours, traced = (tensor_of(operand), tensor_of(node)), (self._traced[operand], self._traced[node])
        if [each.dtype for each in ours] != [each.dtype for each in traced]:  # of an autocast
            return False
        shows, showed = _memory(ours[0]) == _memory(ours[1]), _memory(traced[0]) == _memory(traced[1])
        if shows == showed or not is_copy_told(node):
            return False
        if showed and node.target is aten.contiguous.default:  # it gave its operand back
            node.target, node.args, node.kwargs = aten.alias.default, (operand,), {}
        elif showed:
            raise _lost(node)
        else:
            _replace_first(node, self._compact(node, operand))
        return True

    def _lies_alike(self, node: Node) -> bool:
        return node not in self._traced or _place(self._traced[node]) == _place(tensor_of(node))

    def _compact(self, before: Node, value: Node) -> Node:
        return self._call(before, aten.clone.default, (value,), {"memory_format": torch.contiguous_format})

    def _address(self, node: Node) -> None:
        """Let `as_strided` address a copy of the whole memory, in the order that it had."""
        operand = node_at(node, 0)
        if operand not in self._traced:
            return
        memory = _memory(self._traced[operand])
        whole = next(each for each, value in self._traced.items() if _memory(value) == memory)
        if self._lies_alike(whole) and self._lies_alike(operand):
            return
        traced, addressed = self._traced[whole], self._traced[operand]
        if is_written_after(node, node):
            raise _lost(node)
        if traced.dtype != addressed.dtype or not _fills_its_memory(traced):
            raise CaptureError(
                f"{node.target} addresses memory of a tensor of shape {tuple(traced.shape)} and strides {traced.stride()}, which shows it "
                "in part or several times; a program has what it shows, row by row\n"
                f"  where: {source_of(node).at}\n  how to mend it: {_MEND}"
            )
        named, order = all_named(node), sorted(range(traced.ndim), key=lambda dim: -traced.stride(dim))
        by_memory = self._compact(node, self._call(node, aten.permute.default, (whole, order), {}))
        flat = self._call(node, aten.reshape.default, (by_memory, [-1]), {})
        offset = addressed.storage_offset() if named["storage_offset"] is None else named["storage_offset"]
        node.args, node.kwargs = (flat, named["size"], named["stride"], offset), {}


def _memory(value: torch.Tensor) -> int:
    return StorageWeakRef(value.untyped_storage()).cdata


def _place(value: torch.Tensor) -> tuple[object, ...]:
    """How a tensor lies in its memory; a dim of one may have any stride."""
    return (value.storage_offset(), tuple(stride for size, stride in zip(value.shape, value.stride(), strict=True) if size != 1))


def _fills_its_memory(value: torch.Tensor) -> bool:
    """Whether each place of its memory is one element."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(value.stride(), value.shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    size_bytes = value.untyped_storage().nbytes()
    return value.storage_offset() == 0 and size_bytes == math.prod(value.shape) * value.element_size()


def _replace_first(node: Node, operand: Node) -> None:
    node.args = (operand, *node.args[1:])


def _lost(node: Node) -> CaptureError:
    return CaptureError(
        f"forward writes into memory that {node.target} shows of a tensor that lies otherwise than row by row (transposed, channels last); "
        "in a program, of which each tensor lies row by row, that is a copy, and what is written there would be lost\n"
        f"  where: {source_of(node).at}\n  how to mend it: {_MEND}"
    )
