"""The settings of a model: all that a program is made of besides the values of tensors, by path.

Two models with equal entries give one program. Entries compare contents, so that a dropout of 0.1 replaced by another
dropout of 0.1 is no change. Containers are looked into, and objects that hold settings (a `config`); what else there is, a
function, an object of torch's or one that holds such (a trainer), is compared by identity.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from autopar.frontend.module_hooks import BACKWARD_HOOKS, FORWARD_HOOK_FLAGS, FORWARD_HOOKS
from autopar.runtime._torch import version_of

MAX_ITEMS = 2000  # of a container; a longer one (a vocabulary) is compared by identity
MAX_VALUES = 20_000  # in containers and objects in all; what comes after them is compared by identity
MAX_DEPTH = 8
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.device, torch.Size, slice, range)
_CLOSED = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, torch.Tensor, nn.Module, Enum)
_CLOSED_PACKAGES = frozenset({*sys.stdlib_module_names, "builtins", "torch", "numpy"})
_OPEN_CLASSES = ("types.SimpleNamespace", "argparse.Namespace")
_TENSORS = ("_parameters", "_buffers")
# Shape, dtype, and the first name of the same tensor.
ParameterForm = tuple[tuple[int, ...], torch.dtype, str]
# No part of what a call computes; that hooks were full ones shows in the hooks.
_APART = frozenset(
    {*_TENSORS, *FORWARD_HOOKS, *FORWARD_HOOK_FLAGS, *BACKWARD_HOOKS, "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook"}
    | {"_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"}
)


@dataclass(frozen=True, eq=False)
class Same:
    """Equal to itself wrapped again, and to nothing else."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return getattr(self.value, "__qualname__", None) or type(self.value).__qualname__


@dataclass(frozen=True)
class Description:
    """Settings (`entries`) and `parameters` (shape, dtype, first name if tied) by path; `watch` tells whether any of them has changed.
    `stand_ins` are the paths of plain tensors where parameters belong."""

    entries: dict[str, Any]
    parameters: dict[str, ParameterForm]
    stand_ins: tuple[str, ...]
    watch: Watch


class Watch:
    """Tells in a fraction of a millisecond that nothing was changed; where it cannot, the model must be described anew.

    Objects are compared by identity, which needs no code of theirs: those in every dict, list and set that was looked
    into, read through live views.
    """

    def __init__(
        self,
        modules: list[nn.Module],
        collections: list[Collection[Any]],
        tensors: list[torch.Tensor],
        constants: list[torch.Tensor],
    ) -> None:
        self._modules, self._classes = modules, list(map(type, modules))
        self._empty = [each for each in collections if not each]
        self._filled = [each for each in collections if each]
        self._lengths = list(map(len, self._filled))
        self._values = list(chain.from_iterable(self._filled))
        self._tensors, self._forms = tensors, list(map(_form, tensors))
        self._constants, self._versions = constants, list(map(version_of, constants))
        self.parameters = [each for each in tensors if isinstance(each, nn.Parameter)]

    def is_unchanged(self) -> bool:
        return (
            not any(self._empty)
            and list(map(len, self._filled)) == self._lengths
            and all(map(is_, chain.from_iterable(self._filled), self._values))
            and list(map(type, self._modules)) == self._classes
            and list(map(_form, self._tensors)) == self._forms
            and list(map(version_of, self._constants)) == self._versions
        )


def describe(model: nn.Module, left_out: Collection[str] = ()) -> Description:
    """The settings of `model`, but for the attributes `left_out`, given by path."""
    walk = _Walk(frozenset(left_out))
    walk.module("", model)
    return Description(
        walk.entries, walk.parameters, tuple(walk.stand_ins), Watch(walk.modules, walk.collections, walk.tensors, walk.constants)
    )


def changes(before: dict[str, Any], after: dict[str, Any], most: int = 3) -> str:
    """What differs, in words: `drop.p 0.1 → 0.5`."""
    paths = [path for path in {**before, **after} if before.get(path) != after.get(path)]
    told = [f"{path or 'the model'} {_words(before, path)} → {_words(after, path)}" for path in paths[:most]]
    return ", ".join(told) + (f" and {len(paths) - most} more" if len(paths) > most else "")


def _words(entries: dict[str, Any], path: str) -> str:
    if path not in entries:
        return "(nothing)"
    value = entries[path]
    text = value[1] if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], type) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# Asked of every parameter at every call.
_form: Callable[[torch.Tensor], tuple[Any, ...]] = attrgetter("shape", "dtype")


class _Walk:
    def __init__(self, left_out: frozenset[str]) -> None:
        self.entries: dict[str, Any] = {}
        self.parameters: dict[str, ParameterForm] = {}
        self.stand_ins: list[str] = []
        self.modules: list[nn.Module] = []
        self.collections: list[Collection[Any]] = []
        self.tensors: list[torch.Tensor] = []
        self.constants: list[torch.Tensor] = []
        self._left_out = left_out
        self._num_values = 0
        self._seen: dict[int, str] = {}

    def module(self, path: str, module: nn.Module) -> None:
        if self._is_known(path, module):
            return
        self.modules.append(module)
        attributes = vars(module)
        self.collections += [attributes.values(), *(attributes[name].values() for name in (*_TENSORS, "_modules"))]
        self.entries[path] = Same(type(module))
        for name, value in attributes.items():
            if name not in _APART and _join(path, name) not in self._left_out:
                self._value(_join(path, name), value, 0)
        self._hooks(path, attributes)
        given = attributes["_parameters"].items()
        self.stand_ins += [_join(path, name) for name, value in given if value is not None and not isinstance(value, nn.Parameter)]
        for name, tensor in chain(given, attributes["_buffers"].items()):
            self._tensor(_join(path, name), tensor)
        children: dict[str, nn.Module | None] = attributes["_modules"]
        self.entries[f"{path} (submodules)"] = tuple((name, child is None) for name, child in children.items())
        for name, child in children.items():
            if child is not None:
                self.module(_join(path, name), child)

    def _hooks(self, path: str, attributes: dict[str, Any]) -> None:
        """In their order, without the numbers that torch gives them; backward hooks of the root run around the call."""
        for kind in (*FORWARD_HOOKS, *BACKWARD_HOOKS) if path else FORWARD_HOOKS:
            self.collections.append(attributes[kind].values())
            flags = [attributes[name] for name in FORWARD_HOOK_FLAGS if name.startswith(kind)]
            if attributes[kind]:
                hooks = ((Same(hook), *(number in each for each in flags)) for number, hook in attributes[kind].items())
                self.entries[f"{path} ({kind.strip('_').replace('_', ' ')})"] = tuple(hooks)

    def _tensor(self, path: str, tensor: torch.Tensor | None) -> None:
        """A parameter or buffer: its values are read at every call."""
        if tensor is None:
            self.entries[path] = None
            return
        first = self._seen.setdefault(id(tensor), path)
        form = (tuple(tensor.shape), tensor.dtype, first)
        if isinstance(tensor, nn.Parameter):
            self.parameters[path] = form
        else:
            self.entries[path] = form
        if first == path:
            self.tensors.append(tensor)

    def _value(self, path: str, value: Any, depth: int) -> None:
        kind = type(value)
        if kind in _PLAIN:
            self.entries[path] = (kind, repr(value))
        elif depth > MAX_DEPTH or self._num_values > MAX_VALUES or self._is_closed(value):
            self.entries[path] = self._constant(value) if isinstance(value, torch.Tensor) else Same(value)
        elif kind in (tuple, frozenset) or not self._is_known(path, value):
            self.entries[path] = Same(kind)
            for key, each in self._contents(value):
                self._num_values += 1
                self._value(f"{path}{key}", each, depth + 1)

    def _is_known(self, path: str, value: Any) -> bool:
        """Whether it was reached by another path."""
        first = self._seen.setdefault(id(value), path)
        if first != path:
            self.entries[path] = ("as", first)
            return True
        return False

    def _is_closed(self, value: Any) -> bool:
        if isinstance(value, functools.partial):
            return False
        if isinstance(value, (dict, list, tuple, set, frozenset, deque)):
            return len(value) > MAX_ITEMS
        if isinstance(value, _CLOSED) or not (hasattr(value, "__dict__") or _Slots(value)):
            return True
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        is_foreign = name not in _OPEN_CLASSES and kind.__module__.partition(".")[0] in _CLOSED_PACKAGES
        return is_foreign or any(map(_is_machinery, chain(getattr(value, "__dict__", {}).values(), _Slots(value))))

    def _constant(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """A tensor that is no buffer: its values are in the program."""
        self.constants.append(tensor)
        return (Same(tensor), version_of(tensor), *_form(tensor))

    def _contents(self, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, functools.partial):
            yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
            return
        if isinstance(value, dict):
            self.collections += [value, value.values()]
            yield from ((f"[{key!r}]", each) for key, each in value.items())
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            self.collections.append(value)
            yield from ((f"[{number}]", each) for number, each in enumerate(value))
        if hasattr(value, "__dict__"):
            self.collections += [vars(value), vars(value).values()]
            yield from ((f".{name}", each) for name, each in vars(value).items())
        if slots := _Slots(value):
            self.collections.append(slots)
            yield from zip(map(".{}".format, slots.names()), slots, strict=True)


class _Slots(Collection[Any]):
    """What an object holds in slots (`@dataclass(slots=True)`), read anew each time as a view of a dict is."""

    def __init__(self, value: Any) -> None:
        self._value = value
        slots = (vars(kind).get("__slots__", ()) for kind in type(value).__mro__)
        each = chain.from_iterable((found,) if isinstance(found, str) else found for found in slots)
        self._names = [name for name in each if not name.startswith("__")]

    def names(self) -> list[str]:
        return [name for name in self._names if hasattr(self._value, name)]

    def __iter__(self) -> Iterator[Any]:
        return (getattr(self._value, name) for name in self.names())

    def __len__(self) -> int:
        return len(self.names())

    def __contains__(self, value: object) -> bool:
        return any(each is value for each in self)


def _is_machinery(value: Any) -> bool:
    """Whether the object that holds it is no bag of settings: a trainer holds a model, an optimizer, a loader."""
    is_torchs = type(value).__module__.partition(".")[0] == "torch" and not isinstance(value, (torch.dtype, torch.device, torch.Size))
    return is_torchs or isinstance(value, nn.Module)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
