"""What stands in code: a digest of it, and the names that it looks up outside of itself."""

from __future__ import annotations

import dis
import hashlib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from autopar.cache.encode import CannotStore
from autopar.cache.recorded import name_of
from autopar.ir.source import is_library

# What a function of the user's may not ask: its answer is not written down anywhere.
_FORBIDDEN = frozenset((
    "globals", "eval", "exec", "_getframe", "currentframe", "get_objects", "get_referrers", "get_rank", "get_local_rank", "initial_seed",
    "get_rng_state", "data_ptr", "__code__", "f_globals",
))  # fmt: skip
_BY_NAME = frozenset(("getattr", "vars", "__dict__", "attrgetter", "hasattr", "__getattribute__", "dir"))


@dataclass(frozen=True)
class Global:
    """A global that is looked up, and the `attributes` that are read of it at once, one of the other: `torch.nn.functional.gelu`."""

    name: str
    attributes: tuple[str, ...]


@dataclass(frozen=True)
class Import:
    """`from module import names`, relative by `level`; without names, `import module`."""

    module: str
    level: int
    names: tuple[str, ...]


@cache
def code_digest(code: types.CodeType) -> str:
    """Of all that a code object computes, and of the lines it stands on."""
    words: list[Any] = [name_of(code), code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags]
    words += [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_exceptiontable, code.co_linetable]
    words += [code_digest(each) if isinstance(each, types.CodeType) else _constant(each) for each in code.co_consts]
    return hashlib.sha256(repr(words).encode()).hexdigest()


def _constant(value: Any) -> Any:
    return ("frozenset", sorted(map(repr, value))) if isinstance(value, frozenset) else (type(value).__name__, repr(value))


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """`code`, and that of functions, classes and comprehensions in it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from codes_in(each)


def looks_up_by_name(code: types.CodeType) -> bool:
    """Whether attributes may be read whose names do not stand in the code as such."""
    return not _BY_NAME.isdisjoint(code.co_names)


@cache
def names_read(code: types.CodeType) -> tuple[Global | Import, ...]:
    """In the order of the code. Raises `CannotStore` for code that assigns globals or asks for what no description has."""
    forbidden = sorted(_FORBIDDEN.intersection(code.co_names))
    if forbidden and not is_library(code.co_filename):
        raise CannotStore(f"it asks for {forbidden[0]}, whose answer nobody writes down")
    found: list[Global | Import] = []
    instructions = list(dis.get_instructions(code))
    for place, each in enumerate(instructions):
        if each.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            raise CannotStore(f"it assigns the global {each.argval}")
        elif each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            found.append(Global(each.argval, tuple(_attributes(instructions, place + 1))))
        elif each.opname == "IMPORT_NAME":
            names = instructions[place - 1].argval
            found.append(Import(each.argval, instructions[place - 2].argval or 0, tuple(names or ())))
    return tuple(found)


def _attributes(instructions: list[dis.Instruction], place: int) -> Iterator[str]:
    for each in instructions[place:]:
        if each.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            return
        yield each.argval
