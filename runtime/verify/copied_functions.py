"""Functions that a copy of a model has as hooks, or in the place of a method: `copy.deepcopy` leaves functions as they are, so that what
their closures and defaults hold of the model, itself, a method or a table by modules, would be the original's.

    names = {module: name for name, module in model.named_modules()}
    model.a.register_forward_hook(lambda module, args, output: store(names[module], output))     KeyError, of the copy of a
    plain = model.forward
    model.forward = lambda x: 2 * plain(x)                                                       the gradients would be the original's
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any
from weakref import ReferenceType, ref

from torch import nn

from autopar.frontend.module_hooks import FORWARD_HOOKS

_DICTS = (dict, OrderedDict, defaultdict)


def rebind(copied: nn.Module, known: Mapping[int, Any]) -> None:
    """Have the functions of the modules of `copied` see the copies, `known` by the ids of their originals."""
    binding = _Rebinding(known)
    for module in copied.modules():
        attributes = vars(module)
        for held in (attributes, *(attributes[name] for name in FORWARD_HOOKS)):
            for name, value in held.items():
                if isinstance(value, (FunctionType, partial)):
                    held[name] = binding.of_copy(value)


class _Rebinding:
    """What stands in a copy for what its original's functions hold; the same thing twice has one that stands for it."""

    def __init__(self, known: Mapping[int, Any]) -> None:
        self._known = known
        self._made = dict[int, Any]()  # of functions, cells and containers, by the ids of their originals

    def of_copy(self, value: Any) -> Any:
        """The copy of what was copied; what holds such, anew; another value as it is, so that what a hook keeps in it is seen by who reads
        it."""
        found = self._known.get(id(value), self._made.get(id(value)))
        if found is not None:
            return found
        if type(value) is FunctionType:
            return self._function(value)
        if not self._sees(value):
            return value
        if type(value) is MethodType:
            return MethodType(value.__func__, self.of_copy(value.__self__))
        if type(value) is partial:
            return partial(self.of_copy(value.func), *map(self.of_copy, value.args), **self._values(value.keywords))
        return ref(self.of_copy(value())) if type(value) is ReferenceType else self._container(value)

    def _function(self, function: FunctionType) -> FunctionType:
        cells = function.__closure__ or ()
        if not cells and not self._sees(function):
            return function
        new = [cell for cell in cells if id(cell) not in self._made]
        self._made.update((id(cell), CellType()) for cell in new)  # functions that share a variable still do
        closure = tuple(self._made[id(cell)] for cell in cells)
        made = FunctionType(function.__code__, function.__globals__, function.__name__, None, closure)
        self._made[id(function)] = made  # its closure may hold itself
        made.__defaults__ = self.of_copy(function.__defaults__)
        made.__kwdefaults__ = function.__kwdefaults__ and self._values(function.__kwdefaults__)
        made.__dict__.update(self._values(vars(function)))
        for cell in new:
            for content in _contents(cell):
                self._made[id(cell)].cell_contents = self.of_copy(content)
        return made

    def _container(self, value: Any) -> Any:
        if type(value) is tuple:
            return tuple(map(self.of_copy, value))
        made = self._made[id(value)] = copy.copy(value)  # before what it holds, which may be itself
        made.clear()
        if type(value) is list:
            made.extend(map(self.of_copy, value))
        elif type(value) is set:
            made.update(map(self.of_copy, value))
        else:
            made.update((self.of_copy(key), self.of_copy(each)) for key, each in value.items())
        return made

    def _values(self, named: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.of_copy(each) for name, each in named.items()}

    def _sees(self, value: Any) -> bool:
        """Whether something that was copied is to be found from here."""
        seen, left = set[int](), [value]
        while left:
            each = left.pop()
            if id(each) in self._known:
                return True
            if id(each) not in seen:
                seen.add(id(each))
                left += _held(each)
        return False


def _held(value: Any) -> Iterable[Any]:
    """What is made anew where it was copied."""
    kind = type(value)
    if kind in _DICTS:
        return (*value, *value.values())
    if kind in (list, tuple, set):
        return value
    if kind is FunctionType:
        closed = (content for cell in value.__closure__ or () for content in _contents(cell))
        return (*closed, value.__defaults__, value.__kwdefaults__, vars(value))
    if kind is partial:
        return (value.func, value.args, value.keywords)
    if kind is MethodType:
        return (value.__self__,)
    return (value(),) if kind is ReferenceType else ()


def _contents(cell: CellType) -> Iterator[Any]:
    """What a variable of a closure has, if anything was assigned yet."""
    try:
        yield cell.cell_contents
    except ValueError:
        return
