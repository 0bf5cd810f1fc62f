"""Which inputs forward asks how they lie in memory: a program takes each row by row, and has one answer."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.fx import Node
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.graph.emit import tensor_of
from autopar.graph.overwrites import is_copy_told, sources_of, writers_of
from autopar.ir.arguments import node_at
from autopar.ir.program import Program
from autopar.ir.source import source_of

logger = logging.getLogger("autopar")
aten = torch.ops.aten
_ADDRESSES = ("stride", "storage_offset", "dim_order", "as_strided")
_COPIES = ("contiguous", "clone", "reshape")
_NOTED = (
    *((torch.Tensor, name) for name in (*_ADDRESSES, *_COPIES, "is_contiguous")),
    (torch, "as_strided"),
    (torch, "clone"),
    (torch, "reshape"),
)
_NOT_FORWARD = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_BY_LAYOUT = frozenset({aten.reshape.default, aten.reshape_as.default, aten.flatten.using_ints, aten.contiguous.default})
# By the flat index of an input the line of forward that asks.
Asked = dict[int, str]


@contextmanager
def asked_layouts(leaves: Sequence[object]) -> Generator[Asked]:
    """Of which of these inputs, or views of them, it is asked while this is entered how they lie. Calls inside of torch's own do not count,
    nor does it if what lies otherwise is copied (`x if x.is_contiguous() else x.contiguous()`)."""
    tensors = ((index, leaf) for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided)
    watch = _Watch({StorageWeakRef(leaf.untyped_storage()): index for index, leaf in tensors})
    with ExitStack() as patched:
        for place, name in _NOTED:
            patched.enter_context(mock.patch.object(place, name, watch.noting(name, getattr(place, name))))
        yield watch.found
    watch.found |= {index: line for index, line in watch.whether.items() if index not in watch.found}


def asked_otherwise(asked: Asked, leaves: Sequence[object], run: Callable[[list[object]], object]) -> Asked:
    """Those of `asked` of which forward asks, too, if they lie otherwise than row by row, as it was not when it was asked first: what it
    copies then is read row by row. All of them if it does not run so."""
    given = [_lying_otherwise(leaf) if index in asked and isinstance(leaf, torch.Tensor) else leaf for index, leaf in enumerate(leaves)]
    try:
        with asked_layouts(given) as again, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(given)
    except Exception as error:  # whatever the user's code raises of a layout that nobody gave it
        logger.debug("which inputs forward asks how they lie is known for those that lie row by row: %s", error)
        return asked
    return {index: line for index, line in again.items() if index in asked}


def written_by_layout(program: Program) -> Asked:
    """By the inputs of a FORWARD program the lines where something is a view or a copy by how these lie, and forward writes into the one
    and reads the other: `h.reshape(-1)[:2] = 0`, and `h` afterwards."""
    batch = {node: int(item.name) for item, node in program.named_inputs() if item.kind == "batch"}
    found: Asked = {}
    for node in program.graph.nodes if writers_of(program.graph) else ():
        if node.target in _BY_LAYOUT and not _is_always_a_view(node) and is_copy_told(node):
            found |= {batch[each]: source_of(node).at for each in batch.keys() & sources_of([node]) if batch[each] not in found}
    return found


def _is_always_a_view(node: Node) -> bool:
    if node.target is aten.contiguous.default:
        return False
    try:
        _lying_otherwise(torch.empty(tensor_of(node_at(node, 0)).shape, device="meta")).view(tensor_of(node).shape)
    except RuntimeError:
        return False
    return True


def _lying_otherwise(leaf: torch.Tensor) -> torch.Tensor:
    apart = leaf.new_empty([*reversed(leaf.shape), 2])[..., 0]
    return apart.permute([*reversed(range(leaf.ndim))])


class _Watch:
    """Notes calls of methods. A mode for functions would stand in the frames of all others, by which warnings name the user's line."""

    def __init__(self, indices: dict[StorageWeakRef, int]) -> None:
        self._indices = indices
        self.found: Asked = {}
        self.whether: Asked = {}  # asked for nothing else than whether they are contiguous

    def noting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if args and isinstance(args[0], torch.Tensor):
                self._note(name, args[0], sys._getframe(1).f_code.co_filename, sys._getframe(1).f_lineno)
            return function(*args, **kwargs)

        return call

    def _note(self, name: str, tensor: torch.Tensor, file: str, line: int) -> None:
        index = None if file.startswith(_NOT_FORWARD) else self._index(tensor)
        if index is None:
            return
        if name in _ADDRESSES:
            self.found.setdefault(index, f"{file}:{line}")
        elif name == "is_contiguous":
            self.whether.setdefault(index, f"{file}:{line}")
        elif not tensor.is_contiguous():
            self.whether.pop(index, None)

    def _index(self, tensor: torch.Tensor) -> int | None:
        try:
            return self._indices.get(StorageWeakRef(tensor.untyped_storage()))
        except RuntimeError:  # a sparse one, or one inside a transform of torch.func: there is no storage to know it by
            return None


def with_asked(program: Program, asked: Asked) -> Program:
    """`program`, whose inputs say which line asks how they lie."""
    inputs = tuple(
        replace(item, asked=asked.get(int(item.name), "")) if item.kind == "batch" else item for item in program.signature.inputs
    )
    return replace(program, signature=replace(program.signature, inputs=inputs)) if asked else program
