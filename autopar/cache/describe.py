"""What a capture of a model could read, in words that are equal in two processes only where all of it is.

    Description(executed).of(model)      the model's modules, their classes, attributes and hooks, and every function that was executed,
                                         with its defaults, its closure, and the globals that it names, and what these are made of

By induction: where the code that begins is the same, and every name that it looks up means the same, the code that it calls is the same.
So functions that were not executed go by a digest of their code alone, and nobody follows what they name. What cannot be described (an
object of a C extension, a module that is handed around, a global that forward assigns) is `CannotStore`, which says where it is.
"""

from __future__ import annotations

import contextvars
import enum
import functools
import hashlib
import importlib
import importlib.util
import inspect
import logging
import os
import pathlib
import re
import sys
import types
import typing
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import nn

from autopar._torch_cache import OP_KINDS, flattening_of, is_treated_apart
from autopar.cache import origins
from autopar.cache.code import Import, code_digest, codes_in, looks_up_by_name, names_read
from autopar.cache.encode import NAMESPACES, CannotStore
from autopar.cache.origins import MADE_AT_RUN_TIME, MISSING
from autopar.cache.recorded import CodeName, is_platform, name_of
from autopar.cache.unread import HASHES, NOTES, OF_CLASSES, OF_ENUMS, OF_TENSORS, UNREAD
from autopar.frontend.module_hooks import BACKWARD_HOOKS, FORWARD_HOOK_FLAGS, FORWARD_HOOKS

_PLAIN = (int, bool, float, complex, str, bytes, type(None), type(...), type(NotImplemented))
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_SEQUENCES = (list, tuple, deque, torch.Size)
_MAPPINGS = (dict, OrderedDict, defaultdict, types.MappingProxyType)
_BUILTIN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType,
            types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType)  # fmt: skip
_WRAPPED = {
    property: ("fget", "fset"), staticmethod: ("__func__",), classmethod: ("__func__",), functools.cached_property: ("func",),
    functools.partial: ("func", "args", "keywords"), functools.partialmethod: ("func", "args", "keywords"),
    types.MethodType: ("__func__", "__self__"), type(functools.lru_cache(lambda: None)): ("__wrapped__",), slice: ("start", "stop", "step"),
    range: ("start", "stop", "step"), re.Pattern: ("pattern", "flags"), types.SimpleNamespace: ("__dict__",),
}  # fmt: skip
_MOST_BYTES = 1 << 28


class _Pair(typing.NamedTuple):
    first: int


class Description:
    """One walk. `described` are the codes of executed functions that it came across, `classes` the classes, by module and name."""

    def __init__(self, executed: frozenset[CodeName]) -> None:
        self.executed = executed
        self.described = set[CodeName]()
        self.classes: dict[str, type] = {}
        self._words: list[str] = []
        self._numbers: dict[int, int] = {}
        self._kept = list[Any]()  # so that no two objects have one identity
        self._storages: dict[int, int] = {}
        self._path: list[str] = []
        self._inputs: dict[int, str] = {}

    def of(self, model: nn.Module, call: Any = None) -> str:
        """The digest of `model`, and of the arguments of a `call`. Raises `CannotStore`."""
        tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        self._inputs = {id(tensor): name for name, tensor in tensors}
        try:
            with self._at("the model"):
                self.value(model)
            with self._at("the arguments"):
                self.value(call)
        except RecursionError:
            raise CannotStore("the model's attributes lead too deep") from None
        return hashlib.sha256("\n".join(self._words).encode()).hexdigest()

    def refuse(self, why: str) -> typing.NoReturn:
        raise CannotStore(f"{''.join(self._path)}: {why}")

    @contextmanager
    def _at(self, step: str) -> typing.Generator[None]:
        self._path.append(step)
        yield
        self._path.pop()  # not where something is raised: whoever catches it reads the path

    def _say(self, *words: object) -> None:
        self._words.append(" ".join(map(str, words)))

    def _is_known(self, value: Any) -> bool:
        """Whether this very object was described before; if not it has a number from here on."""
        known = self._numbers.get(id(value))
        if known is not None:
            self._say("#", known)
            return True
        self._numbers[id(value)] = len(self._numbers)
        self._kept.append(value)
        return False

    # ---- values

    def value(self, value: Any) -> None:
        kind = type(value)
        if kind in _PLAIN:
            self._say(kind.__name__, repr(value))
        elif isinstance(value, _OF_TORCH) or kind in (type(typing.Any), types.GenericAlias, types.UnionType, typing.TypeVar):
            self._say(repr(value))
        elif kind is tuple or kind is torch.Size or kind is frozenset or kind is set:
            self._items(kind.__name__, value)
        elif value is MISSING:
            self._say("missing")
        elif not self._is_known(value):
            self._object(kind, value)

    def _items(self, name: str, value: Any) -> None:
        if isinstance(value, (set, frozenset)):
            if not all(type(each) in _PLAIN for each in value):
                self.refuse("a set of objects, whose order is another one in each process")
            self._say(name, sorted(map(repr, value)))
            return
        self._say(name, len(value))
        for number, each in enumerate(value):
            with self._at(f"[{number}]"):
                self.value(each)

    def _object(self, kind: type, value: Any) -> None:
        describe = _BY_KIND.get(kind) or next((each for base, each in _BY_BASE if isinstance(value, base)), None)
        if describe is not None:
            describe(self, value)
        elif kind.__module__ in ("typing", "types") and " at 0x" not in repr(value):
            self._say(repr(value))
        else:
            self._instance(kind, value)

    def _op(self, value: Any) -> None:
        if str(value).partition(".")[0] not in NAMESPACES:
            self.refuse(f"{value} is an op that is neither torch's nor autopar's")
        self._say("op", value)

    def _logger(self, value: logging.Logger) -> None:
        self._say("logger", value.name)
        self._attributes({name: each for name, each in vars(logging.Logger).items() if origins.is_foreign(each)})

    def _member(self, value: enum.Enum) -> None:
        self._say("member", value.name)
        self.value(type(value))

    def _wrapped(self, value: Any, kind: type | None = None) -> None:
        kind = kind or type(value)
        self._say(kind.__name__)
        for name in _WRAPPED[kind]:
            with self._at(f".{name}"):
                self.value(getattr(value, name))

    def _mapping(self, value: Mapping[Any, Any]) -> None:
        self._say(type(value).__name__, len(value))
        for key, each in value.items():
            with self._at(f"[{key!r:.60}]"):
                self.value(key)
                self.value(each)
        if isinstance(value, defaultdict):
            self.value(value.default_factory)

    def _instance(self, kind: type, value: Any) -> None:
        """An object of a class written in Python: its class and its attributes, and its items where it is a kind of container."""
        base = next(each for each in kind.__mro__ if not each.__flags__ & MADE_AT_RUN_TIME)
        has_state = hasattr(value, "__dict__") or any("__slots__" in vars(each) for each in kind.__mro__)
        known = (object, dict, list, tuple, int, float, str, BaseException, Exception, OrderedDict, defaultdict, *_WRAPPED)
        if base not in known or not has_state:
            self.refuse(f"an object of {kind.__module__}.{kind.__qualname__}, of which Python cannot see what is in it")
        self._say("object")
        self.value(kind)
        if base in (dict, OrderedDict, defaultdict):
            self._mapping(dict(dict.items(value)))
        elif base in (list, tuple):
            self._items(base.__name__, base(base.__iter__(value)))
        elif base in (int, float, str):
            self.value(base(value))
        elif base in _WRAPPED:
            self._wrapped(value, base)
        attributes = dict(getattr(value, "__dict__", {}))
        for each in kind.__mro__:
            names = vars(each).get("__slots__", ())
            for name in (names,) if isinstance(names, str) else names:
                if name not in ("__dict__", "__weakref__"):
                    attributes[name] = inspect.getattr_static(value, name, None) and getattr(value, name, None)
        of_library = kind.__module__.startswith("transformers.")
        self._attributes({name: each for name, each in attributes.items() if not (of_library and name in HASHES)})

    def _attributes(self, attributes: Mapping[str, Any]) -> None:
        self._say("attributes", len(attributes))
        for name, each in attributes.items():
            with self._at(f".{name}"):
                self._say(name)
                self.value(each)

    def _tensor(self, value: torch.Tensor) -> None:
        if type(value) not in (torch.Tensor, nn.Parameter) and not isinstance(value, nn.Buffer):
            self.refuse(f"a tensor of {type(value).__module__}.{type(value).__qualname__}")
        if value.layout is not torch.strided or value.is_conj() or value.is_neg() or value.is_nested or value.is_quantized:
            self.refuse("a tensor that is no plain one")
        memory = self._storages.setdefault(value.untyped_storage()._cdata, len(self._storages))
        self._say(type(value).__name__, tuple(value.shape), value.stride(), value.storage_offset(), memory, value.dtype, value.device.type)
        self._say(value.requires_grad, value.is_leaf, value.is_inference())
        more = {name: each for name, each in vars(value).items() if name not in OF_TENSORS}
        self._attributes(more)
        if id(value) not in self._inputs and not value.is_meta:
            if value.nbytes > _MOST_BYTES:
                self.refuse(f"a constant of {value.nbytes:,} bytes")
            plain = value.detach().cpu().contiguous()
            self._say(hashlib.sha256(plain.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest())

    # ---- modules, classes, functions

    def _module(self, module: nn.Module) -> None:
        self._say("module", module.training)
        self.value(type(module))
        for name, each in vars(module).items():
            if UNREAD.fullmatch(name) or name in FORWARD_HOOK_FLAGS:
                continue
            with self._at("" if name in ("_modules", "_parameters", "_buffers") else f".{name}"):
                self._say(name)
                if name in (*FORWARD_HOOKS, *BACKWARD_HOOKS):  # known by numbers that count on in a process
                    self._hooks(module, name, each)
                elif name in ("_modules", "_parameters", "_buffers"):
                    self._attributes(each)
                else:
                    self.value(each)

    def _hooks(self, module: nn.Module, name: str, hooks: Mapping[int, Any]) -> None:
        self._say(len(hooks))
        for key, hook in hooks.items():
            self._say([key in vars(module).get(flag, {}) for flag in FORWARD_HOOK_FLAGS])
            self.value(hook)

    def _class(self, kind: type) -> None:
        name = f"{kind.__module__}:{kind.__qualname__}"
        self._say("class", name)
        if self.classes.setdefault(name, kind) is not kind:
            self.refuse(f"there are two classes {name}")
        is_torchs = kind.__module__.partition(".")[0] == "torch" and origins.is_found(kind)  # a parametrized one is made at run time
        if is_torchs or origins.is_of_python(kind):
            self._of_platform(kind, is_torchs)
            return
        for base in kind.__bases__:
            self.value(base)
        if type(kind) is not type:
            self.value(type(kind))
        self._attributes({key: each for key, each in vars(kind).items() if key not in OF_CLASSES and not self._is_of_enum(kind, key)})
        if isinstance(kind, enum.EnumMeta):
            self._attributes({key: vars(each).get("_value_") for key, each in kind.__members__.items()})
        if is_dataclass(kind):
            made = vars(kind).get("__dataclass_fields__", {})
            self._attributes({key: each.default_factory for key, each in made.items() if callable(each.default_factory)})
        for each in flattening_of(kind):
            self.value(each)

    def _of_platform(self, kind: type, is_torchs: bool) -> None:
        """A class of Python's or of torch's: of the latter what is in it, for somebody may have put something else there."""
        for base in kind.__bases__ if is_torchs else ():
            self.value(base)
        for attribute, each in vars(kind).items() if is_torchs else ():
            if isinstance(each, types.FunctionType):
                self._say(attribute, code_digest(each.__code__))
            if type(each) in _PLAIN and attribute != "__doc__" or origins.is_foreign(each):
                self.value(each)
        for each in flattening_of(kind):
            self._say(getattr(each, "__qualname__", type(each).__name__))

    def _is_of_enum(self, kind: type, key: str) -> bool:
        return isinstance(kind, enum.EnumMeta) and (key in OF_ENUMS or key in kind.__members__)

    def _builtin(self, value: Any) -> None:
        owner = getattr(value, "__self__", None)
        holder = getattr(value, "__objclass__", None)
        module = getattr(value, "__module__", None) or (holder.__module__ if holder is not None else "")
        self._say("builtin", module, getattr(value, "__qualname__", value.__name__))
        if holder is not None:
            self._say(holder.__module__, holder.__qualname__)
        root = str(module).partition(".")[0]
        if root and root not in sys.stdlib_module_names and root not in ("torch", "numpy") and holder is None:
            self.refuse(f"{value.__name__} of {module}, which is written in C")
        if owner is not None and not isinstance(owner, types.ModuleType):
            self.value(owner)

    def _namespace(self, module: types.ModuleType) -> None:
        if origins.is_users_module(module):
            self.refuse(f"the module {module.__name__} itself is handed on, so that nobody sees what is read of it")
        self._say("namespace", module.__name__)

    def _function(self, function: types.FunctionType) -> None:
        code = function.__code__
        self._say("function", function.__module__, function.__qualname__, code_digest(code))
        is_executed, of_platform = name_of(code) in self.executed, is_platform(code.co_filename)
        if not is_executed:
            return
        with self._at(f" → {function.__qualname__}"):
            if is_treated_apart(function) and not of_platform:
                self.refuse("Dynamo was told not to look into it")
            for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
                with self._at(f" closure {name}"):
                    self._say(name)
                    self.value(origins.content_of_cell(cell))
            if of_platform:
                return
            self.value(function.__defaults__)
            self.value(function.__kwdefaults__)
            self._attributes(vars(function))
            for each in codes_in(code):
                self.described.add(name_of(each))
                self._named(each, function.__globals__)

    # ---- what the code of a function names

    def _named(self, code: types.CodeType, namespace: dict[str, Any]) -> None:
        try:
            read = names_read(code)
        except CannotStore as why:
            self.refuse(str(why))
        by_name = looks_up_by_name(code)
        for each in read:
            if isinstance(each, Import):
                with self._at(f" import {each.module}"):
                    self._imported(each, namespace)
            elif (namespace.get("__name__"), each.name) not in NOTES:
                with self._at(f" global {each.name}"):
                    self._say(each.name)
                    self._followed(origins.looked_up(each.name, namespace), each.attributes, by_name)

    def _followed(self, found: Any, attributes: tuple[str, ...], by_name: bool) -> None:
        """A module by what is read of it, anything else by what it is."""
        for name in attributes:
            if not isinstance(found, types.ModuleType):
                break
            if found is sys and name in ("modules", "argv", "stdin"):
                self.refuse(f"it reads sys.{name}")
            self._say(".", name)
            found = getattr(found, name, MISSING)
        if by_name and isinstance(found, types.ModuleType) and not origins.is_versioned(found):
            self.refuse(f"it looks things up by name, and the module {found.__name__} is at hand")
        if found is os.environ:
            self._say("environ")  # what is read of it is recorded
        else:
            self.value(found)

    def _imported(self, read: Import, namespace: dict[str, Any]) -> None:
        name = read.module
        if read.level:
            name = importlib.util.resolve_name("." * read.level + name, namespace.get("__package__") or "")
        try:
            module = importlib.import_module(name)
        except ImportError:
            self._say("missing")
            return
        if not read.names:
            self.value(module)
        for each in read.names:
            with self._at(f".{each}"):
                self._say(each)
                found = getattr(module, each, sys.modules.get(f"{name}.{each}", MISSING))
                self.value(found)


_BY_KIND: dict[type, Callable[[Description, Any], None]] = {
    types.FunctionType: Description._function,
    list: lambda walk, value: walk._items("list", value),
    deque: lambda walk, value: walk._items("deque", value),
    **dict.fromkeys(_MAPPINGS, Description._mapping),
    **dict.fromkeys(_BUILTIN, Description._builtin),
    **dict.fromkeys(_WRAPPED, Description._wrapped),
    type(vars(_Pair)["first"]): lambda walk, value: walk._say("field", value.__reduce__()[1][0]),
    object: lambda walk, value: walk._say("a mark"),  # known by its identity alone
}
_BY_BASE: tuple[tuple[Any, Callable[[Description, Any], None]], ...] = (
    (nn.Module, Description._module),
    (torch.Tensor, Description._tensor),
    (type, Description._class),
    (OP_KINDS, Description._op),  # before modules: namespaces of ops are such, too
    (types.ModuleType, Description._namespace),
    (contextvars.ContextVar, lambda walk, value: walk._items(f"context {value.name}", (value.get(None),))),
    (logging.Logger, Description._logger),
    (pathlib.PurePath, lambda walk, value: walk._say("path", str(value))),
    (enum.Enum, Description._member),
)
