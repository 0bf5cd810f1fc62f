"""Which inputs forward asks how they lie in memory: a program takes each row by row, and has one answer."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from autopar.ir.program import Program

logger = logging.getLogger("autopar")
_ADDRESSES = frozenset(
    {torch.Tensor.stride, torch.Tensor.storage_offset, torch.Tensor.dim_order, torch.Tensor.as_strided, torch.as_strided}
)
_COPIES = frozenset({torch.Tensor.contiguous, torch.Tensor.clone, torch.clone, torch.Tensor.reshape, torch.reshape})
_NOTED = _ADDRESSES | _COPIES | {torch.Tensor.is_contiguous}
_NOT_FORWARD = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
# By the flat index of an input the line of forward that asks.
Asked = dict[int, str]


@contextmanager
def asked_layouts(leaves: Sequence[object]) -> Generator[Asked]:
    """Of which of these inputs, or views of them, it is asked while this is entered how they lie. Calls inside of torch's own do not count,
    nor does it if what lies otherwise is copied (`x if x.is_contiguous() else x.contiguous()`)."""
    found: Asked = {}
    tensors = ((index, leaf) for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided)
    with _Watched({StorageWeakRef(leaf.untyped_storage()): index for index, leaf in tensors}, found) as watched:
        yield found
    found |= {index: line for index, line in watched.whether.items() if index not in found}


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


def _lying_otherwise(leaf: torch.Tensor) -> torch.Tensor:
    apart = leaf.new_empty([*reversed(leaf.shape), 2])[..., 0]
    return apart.permute(*reversed(range(leaf.ndim)))


class _Watched(TorchFunctionMode):
    def __init__(self, indices: dict[StorageWeakRef, int], found: Asked) -> None:
        super().__init__()
        self._indices, self._found = indices, found
        self.whether: Asked = {}  # asked for nothing else than whether they are contiguous

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _NOTED and args and isinstance(args[0], torch.Tensor) and (index := self._index(args[0])) is not None:
            self._note(func, index, args[0])
        return func(*args, **(kwargs or {}))

    def _index(self, tensor: torch.Tensor) -> int | None:
        try:
            return self._indices.get(StorageWeakRef(tensor.untyped_storage()))
        except (NotImplementedError, RuntimeError):  # a sparse one, or one inside a transform of torch.func
            return None

    def _note(self, func: Any, index: int, tensor: torch.Tensor) -> None:
        if func in _ADDRESSES:
            self._found.setdefault(index, _line(sys._getframe(2)))
        elif func is torch.Tensor.is_contiguous:
            self.whether.setdefault(index, _line(sys._getframe(2)))
        elif func in _COPIES and not tensor.is_contiguous():
            self.whether.pop(index, None)


def _line(frame: FrameType | None) -> str:
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_FORWARD):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def with_asked(program: Program, asked: Asked) -> Program:
    """`program`, whose inputs say which line asks how they lie."""
    inputs = tuple(
        replace(item, asked=asked.get(int(item.name), "")) if item.kind == "batch" else item for item in program.signature.inputs
    )
    return replace(program, signature=replace(program.signature, inputs=inputs)) if asked else program
