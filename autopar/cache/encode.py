"""Values of programs as JSON, and back: numbers, names out of fixed tables, shapes. Nothing that is read runs any code.

    (1, 2.0, node, torch.float32)   ⇄   ["t", 1, 2.0, ["n", 7], ["y", "float32"]]

What has no such form (a function of the user's, an op of theirs, an object) is `CannotStore`; what is read and has another form is
`Unreadable`.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch.fx import Node
from torch.fx.immutable_collections import immutable_list
from torch.multiprocessing.reductions import StorageWeakRef

from autopar._torch import FakeTensorMode, OpOverload, is_fake
from autopar._torch_cache import fake_in, memory
from autopar.driver.compiled import TENSOR
from autopar.ir.keys import Site, Source
from autopar.ir.program import Input, Output

# The namespaces of ops that torch or we bring: what they compute follows from versions.
NAMESPACES = ("aten", "prims", "autopar")
_FUNCTIONS: dict[str, Callable[..., Any]] = {"getitem": operator.getitem}
_FUNCTION_NAMES = {function: name for name, function in _FUNCTIONS.items()}
_OP = re.compile(r"(\w+)\.(\w+)\.(\w+)")
_DTYPES = {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
_LAYOUTS = {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.layout)}
_FORMATS = {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.memory_format)}
_DEVICE = re.compile(r"(cpu|cuda|meta)(:\d+)?")
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Source, Site, Input, Output)}


class CannotStore(Exception):
    """Something that means nothing to another process, or whose meaning there nobody could vouch for."""


class Unreadable(Exception):
    """What was read is not what was written."""


def op_name(target: object) -> str:
    """The name of what a node calls. Raises `CannotStore`."""
    if isinstance(target, OpOverload):
        if target.namespace not in NAMESPACES:
            raise CannotStore(f"the program calls {target}, an op that is neither torch's nor autopar's")
        return str(target)
    name = _FUNCTION_NAMES.get(target) if callable(target) else None
    if name is None:
        words = getattr(target, "__qualname__", target)
        raise CannotStore(f"the program calls {words}, which is no op: a function with a backward of its own, or a hook on a gradient")
    return name


def op_of(name: object) -> Callable[..., Any]:
    """The op of a name, among those that are registered."""
    if not isinstance(name, str):
        raise Unreadable(f"{name!r} is no op")
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    match = _OP.fullmatch(name)
    if match is None or match[1] not in NAMESPACES:
        raise Unreadable(f"{name!r} is no op")
    found = getattr(getattr(getattr(torch.ops, match[1]), match[2], None), match[3], None)
    if not isinstance(found, OpOverload):
        raise Unreadable(f"there is no op {name!r}")
    return found


@dataclass
class Encoder:
    """Values as JSON. `nodes` are numbered as they are written, and long records are written once, in `table`."""

    nodes: dict[Node, int] = field(default_factory=dict[Node, int])
    table: list[Any] = field(default_factory=list[Any])
    _places: dict[Any, int] = field(default_factory=dict[Any, int])
    _storages: dict[StorageWeakRef, int] = field(default_factory=dict[StorageWeakRef, int])

    def shared(self, key: object, value: Any) -> list[Any]:
        """`value` by its place in the table; equal `key`s share one."""
        if key not in self._places:
            encoded = self.value(value)
            self._places[key] = len(self.table)
            self.table.append(encoded)
        return ["#", self._places[key]]

    def value(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else ["f", repr(value)]
        if kind in _SEQUENCES:
            return [_SEQUENCES[kind], *map(self.value, value)]
        if isinstance(value, Node):
            if value not in self.nodes:
                raise CannotStore(f"{value} is of another graph")
            return ["n", self.nodes[value]]
        return self._other(value)

    def _other(self, value: Any) -> Any:
        if isinstance(value, Mapping) and type(value).__name__ in ("dict", "immutable_dict"):
            return ["d", *([self.value(key), self.value(each)] for key, each in value.items())]
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            letter = "y" if isinstance(value, torch.dtype) else "a" if isinstance(value, torch.layout) else "m"
            return [letter, str(value).removeprefix("torch.")]
        if isinstance(value, torch.device):
            return ["v", str(value)]
        if type(value) is complex:
            return ["c", self.value(value.real), self.value(value.imag)]
        if type(value) is slice:
            return ["s", *map(self.value, (value.start, value.stop, value.step))]
        if value is TENSOR:
            return ["T"]
        if isinstance(value, torch.Tensor) and is_fake(value):
            return self._fake(value)
        name = type(value).__name__
        if _KINDS.get(name) is type(value):
            return ["o", name, *(self.value(getattr(value, each.name)) for each in fields(_KINDS[name]))]
        raise CannotStore(f"the program holds a {type(value).__name__}, {str(value)[:80]!r}")

    def _fake(self, value: torch.Tensor) -> Any:
        if type(value).__name__ != "FakeTensor" or value.layout is not torch.strided or not all(type(size) is int for size in value.shape):
            raise CannotStore(f"a value of the program is no plain tensor: {value}")
        storage = value.untyped_storage()
        number = self._storages.setdefault(StorageWeakRef(storage), len(self._storages))
        sizes = list(value.shape), list(value.stride()), value.storage_offset()
        return ["x", number, storage.nbytes(), *sizes, str(value.dtype).removeprefix("torch."), str(value.device), int(value.requires_grad)]


_SEQUENCES: dict[type[Any], str] = {list: "l", tuple: "t", torch.Size: "z", immutable_list: "l"}


@dataclass
class Decoder:
    """JSON as values; fake tensors are of `mode`. Raises `Unreadable`."""

    mode: FakeTensorMode
    nodes: list[Node] = field(default_factory=list[Node])
    table: Sequence[Any] = ()
    _memories: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    _shared: dict[int, Any] = field(default_factory=dict[int, Any])

    def shared(self, place: int) -> Any:
        """What stands in the table, decoded once: nobody writes to it."""
        if place not in self._shared:
            self._shared[place] = self.value(self.table[place])
        return self._shared[place]

    def value(self, value: Any) -> Any:
        if type(value) is not list:
            if isinstance(value, dict):
                raise Unreadable("a value of no known form")
            return value
        letter, *rest = value
        decode = _DECODERS.get(letter)
        if decode is None:
            raise Unreadable(f"a value of no known form, {letter!r}")
        return decode(self, rest)

    def values(self, values: Sequence[Any]) -> list[Any]:
        return [each if type(each) is not list else self.value(each) for each in values]

    def fake(self, values: Sequence[Any]) -> torch.Tensor:
        number, num_bytes, size, stride, offset, dtype_name, device_name, requires_grad = values
        dtype, device = _DTYPES[dtype_name], _device(device_name)
        numbers = (number, num_bytes, offset, *size, *stride)
        if len(size) != len(stride) or not all(type(each) is int and each >= 0 for each in numbers):
            raise Unreadable(f"a tensor of shape {size}, strides {stride} and offset {offset}")
        last = 0 if 0 in size else offset + 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        if last * dtype.itemsize > num_bytes:
            raise Unreadable(f"a tensor of shape {size} and strides {stride} in {num_bytes} bytes")
        if number not in self._memories:
            self._memories[number] = memory(num_bytes)
        base = self._memories[number]
        if base.numel() != num_bytes:
            raise Unreadable(f"a memory of {num_bytes} and of {base.numel()} bytes")
        found = fake_in(self.mode, base, size, stride, offset, dtype, device)
        return found.requires_grad_() if requires_grad else found

    def object(self, values: Sequence[Any]) -> Any:
        name, *rest = values
        kind = _KINDS[name]
        if len(rest) != len(fields(kind)):
            raise Unreadable(f"a {name} of {len(rest)} fields")
        return kind(**dict(zip((each.name for each in fields(kind)), self.values(rest), strict=True)))


def _device(name: str) -> torch.device:
    if _DEVICE.fullmatch(name) is None:
        raise Unreadable(f"{name!r} is no device")
    return torch.device(name)


def _special_float(text: str) -> float:
    if text not in ("inf", "-inf", "nan"):
        raise Unreadable(f"{text!r} is no number")
    return float(text)


_DECODERS: dict[str, Callable[[Decoder, list[Any]], Any]] = {
    "t": lambda decoder, rest: tuple(decoder.values(rest)),
    "l": lambda decoder, rest: decoder.values(rest),
    "z": lambda decoder, rest: torch.Size(decoder.values(rest)),
    "d": lambda decoder, rest: {decoder.value(key): decoder.value(each) for key, each in rest},
    "n": lambda decoder, rest: decoder.nodes[_place(rest[0])],
    "f": lambda decoder, rest: _special_float(rest[0]),
    "c": lambda decoder, rest: complex(*decoder.values(rest)),
    "s": lambda decoder, rest: slice(*decoder.values(rest)),
    "y": lambda decoder, rest: _DTYPES[rest[0]],
    "a": lambda decoder, rest: _LAYOUTS[rest[0]],
    "m": lambda decoder, rest: _FORMATS[rest[0]],
    "v": lambda decoder, rest: _device(rest[0]),
    "#": lambda decoder, rest: decoder.shared(_place(rest[0])),
    "T": lambda decoder, rest: TENSOR,
    "x": Decoder.fake,
    "o": Decoder.object,
}


def _place(number: object) -> int:
    if type(number) is not int or number < 0:
        raise Unreadable(f"{number!r} is no number of a node")
    return number
