"""Graph modules that write their code when somebody wants it.

A `torch.fx.GraphModule` writes its graph as Python and compiles that each time it is made or changed. Export and AOTAutograd change theirs
dozens of times, and read them node by node: of a model with many layers that was a tenth of its compile.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch.fx import GraphModule


class _LateCode:
    """`module._code`, where it has not been written yet."""

    def __get__(self, module: Any, owner: type) -> Any:
        if module is None:
            return self
        _write(module)
        return module.__dict__["_code"]


_write: Any = GraphModule.recompile


def _late_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    _write(module)
    return module(*args, **kwargs)


def _recompile_late(module: Any) -> None:
    """In place of `GraphModule.recompile`: what is known of its inputs at once, all else when it is called or its code is read."""
    pytree_info = getattr(module.graph._codegen, "pytree_info", None)
    if pytree_info is not None:
        module._in_spec, module._out_spec = pytree_info.in_spec, pytree_info.out_spec
    module.__dict__.pop("_code", None)
    kind: Any = type(module)  # each graph module has a class of its own
    kind._code, kind.forward = _LateCode(), _late_forward


@contextmanager
def code_written_late() -> Generator[None]:
    """While this is entered, graph modules write their code when they are called or asked for it; those made here do so for good."""
    before = GraphModule.recompile
    GraphModule.recompile = _recompile_late  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        GraphModule.recompile = before
