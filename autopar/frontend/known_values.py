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

# What is larger is not looked at.
_MOST_ELEMENTS = 1 << 24
# They bring in a tensor that has values, of a literal.
_LIFTS = (aten.lift_fresh.default, aten.lift_fresh_copy.default)


@dataclass(frozen=True)
class _Known:
    """A tensor among the arguments of a call, by its number."""

    number: int


class KnownValues:
    """What calls gave that read nothing but each other's results: fake tensors, or the nodes of a graph.

    Nothing is computed before it is asked for; then all calls so far are, in their order, what they write in place included. What a call
    writes that reads something else as well is known no more, nor is another view of it: `memory` tells them apart.
    """

    def __init__(self, memory: Callable[[Any], Hashable]) -> None:
        self._memory = memory
        # Held weakly: where somebody else has what a call gave, torch hands on another tensor, which a trace does not know.
        self._numbers: MutableMapping[Any, int] = WeakIdKeyDictionary()
        self._lost = set[Hashable]()
        self._calls = list[tuple[Callable[..., Any], Any, Any, list[int]]]()
        self._values: list[Any] = []

    def know(self, tensor: Any, value: torch.Tensor) -> None:
        self._values[self._number(tensor)] = value.clone()

    def note(self, op: Any, args: Any, kwargs: Any, result: Any) -> None:
        """A call was made."""
        if isinstance(fill := fill_of(op, args), (bool, int, float)):
            like = result.meta["val"] if isinstance(result, Node) else result
            op, args, kwargs = aten.full.default, (list(like.shape), fill), {"dtype": like.dtype}
        operands, results = list(_tensors((args, kwargs))), list(_tensors(result))
        if _can_be_repeated(op, results) and all(self._is_known(each) or _is_literal(op, each) for each in operands):
            args, kwargs = pytree.tree_map(self._kept, (args, kwargs))
            self._calls.append((op, args, kwargs, [self._number(each) for each in results]))
        else:
            self._lost |= {self._memory(each) for each in written_operands(op, args, kwargs) if self._is_known(each)}

    def value(self, tensor: Any) -> torch.Tensor | None:
        """What `tensor` holds now, on the CPU; None where nobody knows."""
        if not self._is_known(tensor):
            return None
        calls, self._calls = self._calls, []
        with outside_fake_modes(), torch.no_grad():
            for op, args, kwargs, numbers in calls:
                args, kwargs = pytree.tree_map(self._restored, (args, kwargs))
                found = op(*args, **kwargs)
                # A node stands for all that its call gives.
                each = [found] if isinstance(tensor, Node) else _tensors(found)
                for number, value in zip(numbers, each, strict=True):
                    self._values[number] = value
            return self._values[self._numbers[tensor]].clone()

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
    """Whether a call of torch's own gives the same once more, and few enough numbers to look at."""
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
