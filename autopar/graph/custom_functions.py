"""Both halves of a `torch.autograd.Function` of the user's, or of a hook, as a FORWARD program calls them.

The joint trace finds the backward that was written beside the forward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter

from autopar._torch import apply_custom_function

Results = tuple[Tensor, ...]


@dataclass(frozen=True)
class CustomFunction:
    """Both halves as Dynamo traced them: `forward(*operands) → (results, saved)`, `backward(*gradients, *saved)`."""

    forward: GraphModule
    backward: GraphModule
    options: Mapping[str, Any]
    is_tuple: bool
    is_hook: bool = False  # see `autopar.frontend.hooks`

    def __call__(self, *operands: Tensor) -> Results:
        results = apply_custom_function(self.forward, self.backward, operands, self.options)
        return tuple(results) if self.is_tuple else (results,)

    def results(self, *operands: Tensor) -> Results:
        """The forward alone."""
        with torch.no_grad():
            results, _ = Interpreter(self.forward).run(*operands)
        return tuple(results) if self.is_tuple else (results,)


def as_function(function: CustomFunction) -> Callable[..., Results]:
    """A plain Python function, as graphs of torch.fx call them; `custom_function` gives it back."""

    def custom_function(*operands: Tensor) -> Results:
        return function(*operands)

    vars(custom_function)["autopar_function"] = function
    return custom_function


def custom_function(target: object) -> CustomFunction | None:
    """What a node's target was made from by `as_function`, if it was."""
    return getattr(target, "autopar_function", None)


def mapped(function: CustomFunction, change: Callable[[GraphModule], None]) -> CustomFunction:
    """A copy of `function` with both graphs changed in place by `change`."""
    halves = copy.deepcopy((function.forward, function.backward))
    for half in halves:
        change(half)
        half.recompile()
    return replace(function, forward=halves[0], backward=halves[1])
