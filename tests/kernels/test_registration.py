"""Options of our ops travel through torch's own Python as keyword arguments: a name that torch uses there itself would be given twice."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

import autopar.kernels

# Where torch hands on the arguments of an op that it does not know: `def create(cls, kernel, *args, **kwargs)`.
PASSING_ON = (
    "torch._inductor.graph",
    "torch._inductor.ir",
    "torch._inductor.lowering",
    "torch._library.autograd",
    "torch._library.utils",
    "torch._ops",
    "torch._subclasses.fake_tensor",
    "torch._subclasses.functional_tensor",
    "torch.fx.experimental.proxy_tensor",
    "torch.fx.interpreter",
    "torch.fx.proxy",
    "torch.utils._python_dispatch",
)


def functions(module: ModuleType) -> Iterator[Callable[..., Any]]:
    """All functions and methods that `module` defines."""
    for value in vars(module).values():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        members = vars(value).values() if inspect.isclass(value) else (value,)
        for member in members:
            function = getattr(member, "__func__", member)
            if inspect.isfunction(function):
                yield function


def taken_names() -> dict[str, str]:
    """Names that a function takes by keyword beside `**kwargs`, each with such a function."""
    found: dict[str, str] = {}
    for module in map(importlib.import_module, PASSING_ON):
        for function in functions(module):
            parameters = inspect.signature(function).parameters.values()
            if any(each.kind is each.VAR_KEYWORD for each in parameters):
                named = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
                found |= dict.fromkeys(named, f"{module.__name__}.{function.__qualname__}")
    return found


def our_ops() -> list[str]:
    for found in pkgutil.iter_modules(autopar.kernels.__path__):
        if not found.ispkg:
            importlib.import_module(f"autopar.kernels.{found.name}")
    return sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith("autopar::"))


def test_what_torch_takes_is_found() -> None:
    assert "kernel" in taken_names()


@pytest.mark.parametrize("name", our_ops())
def test_no_option_has_a_name_that_torch_takes(name: str) -> None:
    op = getattr(torch.ops.autopar, name.split("::")[1].split(".")[0]).default
    taken = taken_names()
    clashes = {each.name: taken[each.name] for each in op._schema.arguments if each.kwarg_only and each.name in taken}
    assert not clashes, f"{name}: these names are parameters of torch's own functions: {clashes}"
