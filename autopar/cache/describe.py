"""Values in words that are equal in two processes exactly when the values are: of numbers, texts, and what is made of them alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from types import EllipsisType
from typing import Any

import torch

_PLAIN = (type(None), bool, int, float, complex, str, bytes, EllipsisType)
_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)


class NotKnown(Exception):
    """Something of a compile whose meaning nobody can tell from outside: it is not cached. The text says what."""


def described(value: Any) -> str:
    """`value` in words. Raises `NotKnown` for a function, or an object of a class that is neither Python's, torch's nor ours."""
    kind = type(value)
    if kind in _PLAIN or isinstance(value, _OF_TORCH):
        return repr(value)
    if isinstance(value, torch.device):
        return value.type  # the index is each rank's own
    if kind in (tuple, list, torch.Size):
        return f"({', '.join(map(described, value))})"
    if kind in (set, frozenset):
        return f"{{{', '.join(sorted(map(described, value)))}}}"
    if isinstance(value, PurePath):
        return f"path {str(value)!r}"
    if isinstance(value, Mapping) and not is_dataclass(value):
        return f"{{{', '.join(f'{described(key)}: {described(each)}' for key, each in value.items())}}}"
    is_ours = kind.__module__.startswith("autopar.")
    if is_ours and isinstance(value, Enum):
        return f"{kind.__qualname__}.{value.name}"
    if is_ours and is_dataclass(value):
        return f"{kind.__qualname__}({', '.join(f'{each.name}={described(getattr(value, each.name))}' for each in fields(value))})"
    if is_ours and isinstance(value, tuple):
        return f"{kind.__qualname__}({', '.join(map(described, value))})"
    raise NotKnown(f"a value of type {kind.__module__}.{kind.__qualname__}")
