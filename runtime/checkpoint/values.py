"""Values of optimizers and modules as JSON, from which the very same values are made again; tensors in them stand for themselves by name.

None, True, 3, 0.1, "mean", [1, 2]      as they are
(0.9, 0.999)                            {"tuple": [0.9, 0.999]}
{"step": tensor, 0: 1.5}                {"dict": [["step", {"tensor": "name"}], [0, 1.5]]}
inf                                     {"float": "inf"}
np.float64(0.1), np.bool_(True)         0.1, True
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from autopar.errors import CheckpointError

# Characters of NumPy's dtypes: bools, integers and floats, but for long double, which no number of Python's is equal to.
_NUMPY_NUMBERS = "?bBhHiIlLqQefd"
_NON_FINITE = ("inf", "-inf", "nan")


def encode(value: Any, name: str, keep: Callable[[str, torch.Tensor], None]) -> Any:
    """`keep` is told each tensor in `value`, and a name for it that begins with `name`. Raises `CheckpointError` for other objects."""
    match value:
        case None | bool() | str():
            return value
        case int() | float() if type(value) in (int, float):
            return value if math.isfinite(value) else {"float": repr(value)}
        case np.generic() if value.dtype.char in _NUMPY_NUMBERS:
            return encode(value.item(), name, keep)
        case torch.Tensor():
            keep(name, value)
            return {"tensor": name}
        case list() | tuple() if type(value) in (list, tuple):
            items = [encode(each, f"{name}/{number}", keep) for number, each in enumerate(value)]
            return items if isinstance(value, list) else {"tuple": items}
        case dict() if type(value) is dict:
            return {"dict": [[encode(key, name, keep), encode(each, f"{name}/{key}", keep)] for key, each in value.items()]}
        case _:
            pass
    raise CheckpointError(
        f"{name!r} is a {type(value).__name__}, and a checkpoint holds tensors, numbers, text, None, and lists, tuples and dicts of "
        "these: what else there is would have to be pickled"
    )


def decode(value: Any, fetch: Callable[[str], Any]) -> Any:
    """What was encoded; `fetch` gives what stands for a tensor. Raises `CheckpointError` for what `encode` does not write."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [decode(each, fetch) for each in value]
        case {"tensor": str(name)} if len(value) == 1:
            return fetch(name)
        case {"float": str(text)} if len(value) == 1 and text in _NON_FINITE:
            return float(text)
        case {"tuple": [*items]} if len(value) == 1:
            return tuple(decode(each, fetch) for each in items)
        case {"dict": [*pairs]} if len(value) == 1 and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            found = {_key(decode(key, fetch)): decode(each, fetch) for key, each in pairs}
            if len(found) == len(pairs):
                return found
        case _:
            pass
    raise CheckpointError(f"the index has {str(value)[:100]!r} where a value should stand")


def _key(value: Any) -> Any:
    if isinstance(value, list | dict):
        raise CheckpointError(f"the index has {str(value)[:100]!r} for a key")
    return value
