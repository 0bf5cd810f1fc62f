"""Which inputs forward asks how they lie in memory: a program takes each row by row, and has one answer."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard
from unittest import mock

import torch
from torch.fx import Graph, Node
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.errors import CaptureError
from autopar.frontend._torch_export import GIVEN_BACK
from autopar.graph.emit import replace as replace_node
from autopar.graph.emit import tensor_of
from autopar.graph.fake_values import IN_PLACE_VIEWS
from autopar.graph.overwrites import gives_back, is_copy_told, is_written_after, sources_of, writers_of
from autopar.ir.arguments import all_named, node_at
from autopar.ir.program import Program
from autopar.ir.source import WRAPPED, source_of

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
# What shows its operand where that lies in order, or as it is asked to, and copies it where it does not.
_RESHAPES = (aten.reshape.default, aten.reshape_as.default, aten.flatten.using_ints)
_IN_ORDER = (aten.contiguous.default, aten.ravel.default)
_TO = (aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other)
# By the flat index of an input the line of forward that asks.
Asked = dict[int, str]
# By line and question all answers.
_Answers = dict[tuple[str, str], set[object]]


@contextmanager
def asked_layouts(leaves: Sequence[object]) -> Generator[Watch]:
    """What forward asks while this is entered of how tensors lie. Calls inside of torch's own do not count, nor does it if what lies
    otherwise is copied (`x if x.is_contiguous() else x.contiguous()`)."""
    watch = Watch({StorageWeakRef(leaf.untyped_storage()): index for index, leaf in enumerate(leaves) if _is_laid_out(leaf)})
    with ExitStack() as patched:
        for place, name in _NOTED:
            patched.enter_context(mock.patch.object(place, name, watch.noting(name, getattr(place, name))))
        yield watch


def asked_otherwise(watch: Watch, leaves: Sequence[object], run: Callable[[list[object]], object]) -> Asked:
    """The inputs by whose layout forward is told something else: of what `watch` saw those of which it asks, too, if they lie otherwise
    than row by row, as they did not then; what it copies now is read row by row. All of these if it does not run so. And those by which
    other answers are given of values that are computed from them."""
    asked, answers = watch.asked, watch.answers
    if asked:
        again, is_whole = _seen([_lying_otherwise(leaf) if index in asked else leaf for index, leaf in enumerate(leaves)], run)
        asked = {index: line for index, line in again.asked.items() if index in asked} if is_whole else asked
    for index, leaf in enumerate(leaves if answers else ()):
        for lying in _LAYOUTS if index not in asked and _is_laid_out(leaf) else ():
            again, _ = _seen([*leaves[:index], lying(leaf), *leaves[index + 1 :]], run)
            told = [asks for asks, found in again.answers.items() if asks in answers and not found <= answers[asks]]
            if told:
                asked[index] = told[0][0]
    return asked


def _seen(given: list[object], run: Callable[[list[object]], object]) -> tuple[Watch, bool]:
    """What forward asks when it is `given` these, and whether it got to its end."""
    with asked_layouts(given) as watch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run(given)
        except Exception as error:  # whatever the user's code raises of a layout that nobody gave it
            logger.debug("which inputs forward asks how they lie is known for those that lie row by row: %s", error)
            return watch, False
    return watch, True


def written_by_layout(program: Program) -> Asked:
    """By the inputs of a FORWARD program the lines where something is a view or a copy by how these lie, and forward writes into the one
    and reads the other: `h.reshape(-1)[:2] = 0`, and `h` afterwards."""
    batch = {node: int(item.name) for item, node in program.named_inputs() if item.kind == "batch"}
    found: Asked = {}
    for node in program.graph.nodes if writers_of(program.graph) else ():
        if _goes_by_layout(node) and is_copy_told(node):
            found |= {batch[each]: source_of(node).at for each in batch.keys() & sources_of([node]) if batch[each] not in found}
    return found


def needless_copies_dropped(graph: Graph) -> None:
    """Drop what gave its operand back to an export as it lies in order, where no write behind it tells it from a copy; and that, or a cast,
    where the operand gets another shape in place, or is detached so, which is to be seen by this name, too. Raises `CaptureError` where
    how the operand lies says whether it is."""
    turned = [each for each in graph.nodes if each.target in IN_PLACE_VIEWS]
    _refuse_turned_by_layout(graph, turned)
    for node in [each for each in graph.nodes if each.meta.get(GIVEN_BACK)]:
        is_turned = any(node < each and _itself(each) is _itself(node) for each in turned)
        if is_turned or (node.target in _IN_ORDER and not is_written_after(node, node)):
            replace_node(node, node_at(node, 0))
    for op in _IN_ORDER:  # are named as if the others had never been: a program of few layers that is written out has the same names
        for number, node in enumerate(each for each in graph.nodes if each.target is op):
            name = op.overloadpacket.__name__
            node.name = f"{name}_{number}" if number else name


def _itself(value: Node) -> Node:
    """Where the tensor comes from that `value` was to an export, under another name or before something was written into it."""
    while value.meta.get(GIVEN_BACK) or gives_back(value):
        value = node_at(value, 0)
    return value


def _refuse_turned_by_layout(graph: Graph, turned: Sequence[Node]) -> None:
    """Raise `CaptureError` where what `contiguous()` gave, or its operand, gets another shape in place, and the other is read then."""
    for node in graph.nodes if turned else ():
        names = {node: node_at(node, 0), node_at(node, 0): node} if node.target in _IN_ORDER else {}
        for each in turned:
            other = names.get(node_at(each, 0))
            if other is None or each.target is aten.detach_.default or not any(each < reader for reader in other.users):
                continue
            raise CaptureError(
                f"forward changes the shape in place ({each.target}) of what {node.target} gave, or of its operand, and reads the other: "
                "by how the operand lies in memory they are one tensor, or two\n"
                f"  where: {source_of(each, WRAPPED).at}\n  how to mend it: without the underscore it is a view, x = x.transpose(0, 1)"
            )


def _goes_by_layout(node: Node) -> bool:
    """Whether `node` shows its operand or copies it by how that lies."""
    if node.target in _TO:
        named, (before, after) = all_named(node), (tensor_of(node_at(node, 0)), tensor_of(node))
        asks = named["memory_format"] not in (None, torch.preserve_format)
        return asks and before.dtype == after.dtype and not named["copy"]
    return node.target in _IN_ORDER or (node.target in _RESHAPES and not _is_always_a_view(node))


def _is_always_a_view(node: Node) -> bool:
    try:
        _lying_otherwise(torch.empty(tensor_of(node_at(node, 0)).shape, device="meta")).view(tensor_of(node).shape)
    except RuntimeError:
        return False
    return True


def _is_laid_out(leaf: object) -> TypeGuard[torch.Tensor]:
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided


def _lying_otherwise(leaf: Any) -> torch.Tensor:
    apart = leaf.new_empty([*reversed(leaf.shape), 2])[..., 0]
    return apart.permute([*reversed(range(leaf.ndim))])


def _channels_last(leaf: Any) -> torch.Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return leaf.contiguous(memory_format=formats[leaf.ndim]) if leaf.ndim in formats else leaf


_LAYOUTS = (_lying_otherwise, _channels_last)


class Watch:
    """Notes calls of methods. A mode for functions would stand in the frames of all others, by which warnings name the user's line."""

    def __init__(self, indices: dict[StorageWeakRef, int]) -> None:
        self._indices = indices
        self._found: Asked = {}
        self._whether: Asked = {}  # asked for nothing else than whether they are contiguous
        self._computed: list[tuple[StorageWeakRef, str, str, object]] = []

    @property
    def asked(self) -> Asked:
        """The inputs of which, or of views of which, it is asked."""
        return self._whether | self._found

    @property
    def answers(self) -> _Answers:
        """What is asked of other tensors, and answered."""
        found: _Answers = {}
        for _, line, name, answer in self._computed:
            found.setdefault((line, name), set()).add(answer)
        return found

    def noting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if args and _is_laid_out(args[0]):
                frame = sys._getframe(1)
                answer = args[0].stride() if name == "as_strided" else result
                self._note(name, args[0], frame.f_code.co_filename, frame.f_lineno, answer)
            return result

        return call

    def _note(self, name: str, tensor: torch.Tensor, file: str, line: int, answer: object) -> None:
        memory = None if file.startswith(_NOT_FORWARD) else _memory(tensor)
        if memory is None:
            return
        index, where = self._indices.get(memory), f"{file}:{line}"
        if name in _COPIES:
            if not tensor.is_contiguous():
                self._whether.pop(-1 if index is None else index, None)
                self._computed = [each for each in self._computed if each[0] != memory or each[2] != "is_contiguous"]
        elif index is None:
            self._computed.append((memory, where, name, answer))
        elif name in _ADDRESSES:
            self._found.setdefault(index, where)
        else:
            self._whether.setdefault(index, where)


def _memory(tensor: torch.Tensor) -> StorageWeakRef | None:
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except RuntimeError:  # one inside a transform of torch.func: there is no storage to know it by
        return None


def with_asked(program: Program, asked: Asked) -> Program:
    """`program`, whose inputs say which line asks how they lie."""
    inputs = tuple(
        replace(item, asked=asked.get(int(item.name), "")) if item.kind == "batch" else item for item in program.signature.inputs
    )
    return replace(program, signature=replace(program.signature, inputs=inputs)) if asked else program
