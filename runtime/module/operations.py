"""What users compute of parameters and gradients that lie on processes, where torch gives something else or its error says too little."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.runtime._torch import is_alone, local_part, written_operands
from autopar.runtime.module import lost_writes, numbers_of_stages
from autopar.runtime.module._torch import in_place_names, lie_whole

_OF_TWO = "add sub mul div lerp addcmul addcdiv mm bmm addmm dot where maximum minimum".split()
NAMES = frozenset((*in_place_names(), *_OF_TWO, *numbers_of_stages.NAMES, *lost_writes.VIEWS))


def computed(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], compute: Callable[[], Any]) -> Any:
    """What `op` gives, by `compute`, which does as torch does.

    Where it writes a norm or a sum of which each rank holds a part, and torch lays nothing out anew in place, that is made whole before.
    Raises `AutoparError` where a number is made of several parameters of a stage, and where what is written would be lost; errors about
    plain tensors beside DTensors say what to do.
    """
    name = op.__name__.split(".")[0]
    lost_writes.refuse(op, args, kwargs)
    shapes = numbers_of_stages.made_of(name, args) if name in numbers_of_stages.NAMES else frozenset()
    try:
        result = compute()
    except RuntimeError as error:
        if not (_CANNOT_WRITE in str(error) and _made_whole(op, args, kwargs)):
            if _IS_MIXED in str(error):
                error.add_note(_HOW_TO_MIX)
            raise
        result = compute()
    if name in lost_writes.VIEWS:
        lost_writes.remember(args[0], result)
    if name == "_foreach_norm":
        numbers_of_stages.remember_each(args[0], result)
    else:
        numbers_of_stages.remember(name, result, shapes)
    return result


_CANNOT_WRITE = "in-place operations that require placement changes"
_IS_MIXED = "got mixed torch.Tensor and DTensor"
_HOW_TO_MIX = (
    "autopar: on processes parameters of a parallel module, their gradients, state_dict() and what is computed of them are DTensors, and "
    "here a plain tensor stands beside one. torch.zeros_like(p.grad) lies as p.grad does; any other is made to lie on the same ranks "
    "by distribute_tensor(x, p.device_mesh) of torch.distributed.tensor, on every rank: L = distribute_tensor(torch.eye(n), "
    "G.device_mesh), then L += G @ G.T. A plain copy of the model (a moving average) takes parallel.full_state_dict(), which is plain, on "
    "every rank; copy.deepcopy(parallel), after the compile, holds DTensors as parallel does"
)


def _made_whole(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether there was something among the `written` to make whole, and no other tensor shows its memory, which would not see it."""
    partial = [each for each in written_operands(op, args, kwargs) if _is_partial(each)]
    parts = [local_part(each) for each in partial if isinstance(each, DTensor)]
    if not parts or not all(map(is_alone, parts)):
        return False
    for each in partial:
        assert isinstance(each, DTensor)
        lie_whole(each)
    return True


def _is_partial(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor) and any(word.is_partial() for word in tensor.placements)
