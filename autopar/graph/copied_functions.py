"""Functions that a copy of a model has as hooks, or in the place of a method: `copy.deepcopy` leaves functions as they are, so that what
their closures hold of the model, itself or a table by modules, would be the original's.

    names = {module: name for name, module in model.named_modules()}
    model.a.register_forward_hook(lambda module, args, output: store(names[module], output))     KeyError, of the copy of a
"""

from __future__ import annotations

from collections.abc import Mapping
from types import CellType, FunctionType
from typing import Any

from torch import nn

from autopar.frontend.module_hooks import FORWARD_HOOKS


def rebind(copied: nn.Module, known: Mapping[int, Any]) -> None:
    """Have the functions of the modules of `copied` see the copies, `known` by the ids of their originals."""
    done = dict[int, Any]()
    for module in copied.modules():
        attributes = vars(module)
        for held in (attributes, *(attributes[name] for name in FORWARD_HOOKS)):
            for name, value in held.items():
                if isinstance(value, FunctionType):
                    held[name] = _rebound(value, known, done)


def _rebound(function: FunctionType, known: Mapping[int, Any], done: dict[int, Any]) -> FunctionType:
    if id(function) in done or not function.__closure__:
        return done.get(id(function), function)
    new = [cell for cell in function.__closure__ if id(cell) not in done]
    done.update((id(cell), CellType()) for cell in new)  # functions that share a variable still do
    cells = tuple(done[id(cell)] for cell in function.__closure__)
    made = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__, made.__dict__ = function.__kwdefaults__, dict(function.__dict__)
    done[id(function)] = made  # its closure may hold itself
    for original in new:
        try:
            done[id(original)].cell_contents = _of_copy(original.cell_contents, known, done)
        except ValueError:  # nothing was assigned yet
            continue
    return made


def _of_copy(value: Any, known: Mapping[int, Any], done: dict[int, Any]) -> Any:
    """The copy of what was copied; a container of such things with their copies; another value as it is, so that what a hook keeps in it
    is seen by who reads it."""
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, FunctionType):
        return _rebound(value, known, done)
    if type(value) is dict and any(id(each) in known for each in (*value, *value.values())):
        return {known.get(id(key), key): known.get(id(each), each) for key, each in value.items()}
    if type(value) in (list, tuple, set) and any(id(each) in known for each in value):
        return type(value)(known.get(id(each), each) for each in value)
    return value
