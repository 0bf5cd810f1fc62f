"""Whose a class, a module or a function is: Python's and torch's are known by versions, others by what is in them."""

from __future__ import annotations

import inspect
import sys
import types
from typing import Any

from autopar.cache.recorded import is_platform
from autopar.ir.source import is_library

MADE_AT_RUN_TIME = 1 << 9  # Py_TPFLAGS_HEAPTYPE: of classes that are not written in C, as a rule
MISSING = object()


def is_users_module(module: types.ModuleType) -> bool:
    """Whether a module is neither a library's nor Python's."""
    root, file = module.__name__.partition(".")[0], getattr(module, "__file__", None) or ""
    if root == "__main__" or not file:
        return root == "__main__" or (root not in sys.stdlib_module_names and root != "torch")
    return root not in ("torch", "autopar") and not is_library(file) and not is_platform(file)


def is_versioned(module: types.ModuleType) -> bool:
    """Whether a version says what stands in a module, under whatever name it is looked up."""
    root = module.__name__.partition(".")[0]
    return root in sys.stdlib_module_names or root in ("torch", "numpy")


def is_of_python(kind: type) -> bool:
    """Whether a class is Python's own: written in C, or found in the standard library where its name says."""
    if not kind.__flags__ & MADE_AT_RUN_TIME:
        return True
    if kind.__module__.partition(".")[0] not in sys.stdlib_module_names or kind.__module__ == "__main__":
        return False
    return is_found(kind)


def is_found(kind: type) -> bool:
    """Whether a class is where its name says."""
    found: Any = sys.modules.get(kind.__module__)
    for part in kind.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is kind


def is_foreign(value: Any) -> bool:
    """Whether a function, perhaps wrapped by a cache, is not of the platform."""
    code = getattr(inspect.unwrap(value), "__code__", None) if callable(value) else None
    return code is not None and not is_platform(code.co_filename)


def content_of_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet set
        return MISSING


def looked_up(name: str, namespace: dict[str, Any]) -> Any:
    """What a global name means in code of a module; `MISSING` where it means nothing."""
    if name in namespace:
        return namespace[name]
    built_in = namespace.get("__builtins__", {})
    return (built_in if isinstance(built_in, dict) else vars(built_in)).get(name, MISSING)
