"""Values that follow from shapes and literals alone, while tensors have none: a mask of these counts the same whatever the batch holds."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.utils.weak import WeakIdKeyDictionary

from autopar._torch import OpOverload, is_fake, outside_fake_modes, pytree, written_operands
from autopar.graph.constants import fill_of, gives_the_same

aten = torch.ops.aten

# What is larger is not computed: a capture would take long, and hold it.
_MOST_ELEMENTS = 1 << 24
# They bring in a tensor that has values, of a literal.
_LIFTS = (aten.lift_fresh.default, aten.lift_fresh_copy.default)


@dataclass(frozen=True)
class _Known:
    """A tensor among the arguments of a call, by its number."""

    number: int


@dataclass(frozen=True)
class _Call:
    """A call that can be made again. `touches` is all memory that it reads, writes or gives, `writes` what it writes in place, and `gives`
    that of its results; `is_whole`: these have one number, all together."""

    op: Callable[..., Any]
    args: Any
    kwargs: Any
    results: tuple[int, ...]
    is_whole: bool
    touches: frozenset[Hashable]
    writes: frozenset[Hashable]
    gives: frozenset[Hashable]


class KnownValues:
    """What calls gave that read nothing but each other's results: fake tensors, or the nodes of a graph.

    Nothing is computed before it is asked for; then those calls are, in their order, whose memory it is made of, what they write in place
    included. What a call writes that reads something else as well is known no more, nor is another view of it: `memory` tells them apart.
    """

    def __init__(self, memory: Callable[[Any], Hashable]) -> None:
        self._memory = memory
        # Held weakly: where somebody else has what a call gave, torch hands on another tensor, which a trace does not know.
        self._numbers: MutableMapping[Any, int] = WeakIdKeyDictionary()
        self._lost = set[Hashable]()
        self._calls: list[_Call] = []  # those that were not made again yet
        self._values: list[Any] = []

    def know(self, tensor: Any, value: torch.Tensor) -> None:
        self._values[self._number(tensor)] = value.clone()

    def note(self, op: Any, args: Any, kwargs: Any, result: Any) -> None:
        """A call was made."""
        if isinstance(fill := fill_of(op, args), (bool, int, float)):
            like = result.meta["val"] if isinstance(result, Node) else result
            op, args, kwargs = aten.full.default, (list(like.shape), fill), {"dtype": like.dtype}
        operands, results = list(_tensors((args, kwargs))), list(_tensors(result))
        written = {self._memory(each) for each in written_operands(op, args, kwargs)}
        if not (_can_be_repeated(op, results) and all(self._is_known(each) or _is_literal(op, each) for each in operands)):
            self._lost |= written
            return
        gives = set(map(self._memory, results))
        touches = written | gives | {self._memory(each) for each in operands if self._is_known(each)}
        args, kwargs = pytree.tree_map(self._kept, (args, kwargs))
        numbers, is_whole = tuple(map(self._number, results)), isinstance(result, Node)
        self._calls.append(_Call(op, args, kwargs, numbers, is_whole, frozenset(touches), frozenset(written), frozenset(gives)))

    def value(self, tensor: Any) -> torch.Tensor | None:
        """What `tensor` holds now, on the CPU; None where nobody knows."""
        if not self._is_known(tensor):
            return None
        with outside_fake_modes(), torch.no_grad():
            for call in self._made_of(self._memory(tensor)):
                args, kwargs = pytree.tree_map(self._restored, (call.args, call.kwargs))
                found = call.op(*args, **kwargs)
                for number, value in zip(call.results, [found] if call.is_whole else _tensors(found), strict=True):
                    self._values[number] = value
            return self._values[self._numbers[tensor]].clone()

    def _made_of(self, memory: Hashable) -> list[_Call]:
        """The calls, taken from those that were not made again, that give or write this memory, or any that one of them touches, and those
        that touch what one of them writes: they may have read it before."""
        wanted, written, made = {memory}, set[Hashable](), set[int]()
        while found := [
            place
            for place, call in enumerate(self._calls)
            if place not in made and ((call.gives | call.writes) & wanted or call.touches & written)
        ]:
            made.update(found)
            for place in found:
                wanted |= self._calls[place].touches
                written |= self._calls[place].writes
        taken = [call for place, call in enumerate(self._calls) if place in made]
        self._calls = [call for place, call in enumerate(self._calls) if place not in made]
        return taken

    def _number(self, tensor: Any) -> int:
        if tensor not in self._numbers:
            self._numbers[tensor] = len(self._values)
            self._values.append(None)
        return self._numbers[tensor]

    def _is_known(self, tensor: Any) -> bool:
        return tensor in self._numbers and self._memory(tensor) not in self._lost

    def _kept(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        return _Known(self._numbers[leaf]) if isinstance(leaf, (torch.Tensor, Node)) and leaf in self._numbers else leaf

    def _restored(self, leaf: Any) -> Any:
        if isinstance(leaf, _Known):
            return self._values[leaf.number]
        return leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf


def _can_be_repeated(op: Any, results: list[Any]) -> bool:
    """Whether a call of torch's own gives the same once more, and few enough numbers to compute."""
    is_torchs = op is operator.getitem or (isinstance(op, OpOverload) and op.namespace == "aten" and gives_the_same(op))
    return is_torchs and bool(results) and sum(map(_number_of_elements, results)) <= _MOST_ELEMENTS


def _is_literal(op: Any, operand: Any) -> bool:
    return op in _LIFTS and isinstance(operand, torch.Tensor) and not is_fake(operand)


def _tensors(value: Any) -> Iterator[Any]:
    return (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, (torch.Tensor, Node)))


def _number_of_elements(tensor: Any) -> float:
    leaves = pytree.tree_leaves(tensor.meta.get("val") if isinstance(tensor, Node) else tensor)
    is_known = all(isinstance(leaf, torch.Tensor) and all(isinstance(size, int) for size in leaf.shape) for leaf in leaves)
    return sum(leaf.numel() for leaf in leaves) if is_known and leaves else math.inf
