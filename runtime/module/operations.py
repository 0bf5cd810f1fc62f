"""What users compute of parameters and gradients that lie on processes, where torch gives something else or its error says too little."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor, Partial

from autopar._torch import written_operands
from autopar.errors import AutoparError
from autopar.runtime._torch import is_alone, local_part
from autopar.runtime.module import lost_writes, numbers_of_stages
from autopar.runtime.module._torch import in_place_names, lie_as, lie_whole
from autopar.runtime.module.gathers import lies_in_equal_parts

_OF_TWO = "add sub mul div lerp addcmul addcdiv mm bmm addmm dot where maximum minimum".split()
# Torch has each rank take the mean of its part, and the mean of these.
_MEANS = frozenset("mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy binary_cross_entropy_with_logits".split())
# Torch does not compute these of split tensors.
_UNKNOWN = "_unique2 allclose bincount index isin masked_fill masked_select nonzero renorm searchsorted".split()
NAMES = frozenset(("any", "_foreach_copy_", *_MEANS, *_UNKNOWN, *in_place_names(), *_OF_TWO, *numbers_of_stages.NAMES, *lost_writes.VIEWS))


def computed(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], compute: Callable[[], Any]) -> Any:
    """What `op` gives, by `compute`, which does as torch does.

    Where it writes a norm or a sum of which each rank holds a part, and torch lays nothing out anew in place, that is made whole before.
    Raises `AutoparError` where a number is made of several parameters of a stage, and where what is written would be lost; errors about
    plain tensors beside DTensors say what to do.
    """
    name = op.__name__.split(".")[0]
    lost_writes.refuse(op, args, kwargs)
    if name in _OTHERWISE and isinstance(args[1], (torch.Tensor, list, tuple)):
        return _OTHERWISE[name](*args[:2])
    shapes = numbers_of_stages.made_of(name, args) if name in numbers_of_stages.NAMES else frozenset()
    try:
        result = compute()
    except RuntimeError as error:
        if not (_CANNOT_WRITE in str(error) and _made_whole(op, args, kwargs)):
            _say_what_to_do(name, args, error)
            raise
        result = compute()
    if name == "any":
        _lie_as_greatest(result)
    if name in _MEANS:
        _refuse_mean_of_means(name, args, result)
    if name in lost_writes.VIEWS:
        lost_writes.remember(args[0], result)
    if name == "_foreach_norm":
        numbers_of_stages.remember_each(args[0], result)
    else:
        numbers_of_stages.remember(name, result, shapes)
    return result


def refuse_collective(name: str) -> NoReturn:
    """Raise `AutoparError` for what a loop does itself that keeps copies of a model alike, or that wraps it for that."""
    raise AutoparError(
        f"torch.distributed's {name} does not know DTensors, which parameters of a parallel module, their gradients and numbers made of "
        "them are on processes. The ranks agree in both: gradients are those of the global batch when backward ends. Leave the line out, "
        "with the division by the number of ranks beside it, and DistributedDataParallel. A number (p.grad.norm()) is that of all ranks by "
        ".full_tensor()"
    )


_CANNOT_WRITE = "in-place operations that require placement changes"
_HOW_TO_MIX = (
    "autopar: on processes parameters of a parallel module, their gradients, state_dict() and what is computed of them are DTensors, and "
    "here a plain tensor stands beside one. torch.zeros_like(p.grad) lies as p.grad does; any other is made to lie on the same ranks "
    "by distribute_tensor(x, p.device_mesh) of torch.distributed.tensor, on every rank: L = distribute_tensor(torch.eye(n), "
    "G.device_mesh), then L += G @ G.T. A plain copy of the model (a moving average) takes parallel.full_state_dict(), which is plain, on "
    "every rank; copy.deepcopy(parallel), after the compile, holds DTensors as parallel does. Where torch itself put the two together "
    "(p.quantile(0.5, dim=0)) take p.full_tensor() first"
)
_HOW_TO_COPY = "state_dict() of a parallel module holds DTensors on processes; parallel.full_state_dict() is plain, on every rank"
_HOW_TO_LOAD = (
    "a layer's own load_state_dict, or that of a module around the parallel one, knows nothing of ranks: parallel.load_state_dict takes "
    "whole values by the names in the model, of some alone with strict=False; of one parameter on every rank "
    "p.copy_(distribute_tensor(x, p.device_mesh, p.placements)) of torch.distributed.tensor"
)
_HOW_TO_TAKE_WHOLE = (
    "autopar: torch does not compute this of a parameter or gradient that is split over ranks. Take the whole first, on every rank: "
    "p.full_tensor() is a plain tensor. What is made of it is written back by p.copy_(distribute_tensor(x, p.device_mesh, p.placements)) "
    "of torch.distributed.tensor; a part of p that a mask shows is written by torch.where(mask, x, p)"
)
_NOTES = {
    "got mixed torch.Tensor and DTensor": _HOW_TO_MIX,
    "Sharding propagation failed": _HOW_TO_TAKE_WHOLE,
    "does not have a sharding strategy": _HOW_TO_TAKE_WHOLE,
}


def _say_what_to_do(name: str, args: tuple[Any, ...], error: RuntimeError) -> None:
    note = next((note for text, note in _NOTES.items() if text in str(error)), "")
    if note and note not in getattr(error, "__notes__", []):
        error.add_note(note)
    if note is _HOW_TO_MIX and name == "copy_":  # load_state_dict keeps of an error its arguments alone
        error.args = (f"{error} ({_HOW_TO_LOAD if isinstance(args[0], DTensor) else _HOW_TO_COPY})",)


def _fill(written: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return written.fill_(torch.ops.aten._local_scalar_dense(value))  # what `.item()` of a DTensor is not here, below autograd


def _copy_each(written: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for each, value in zip(written, values, strict=True):
        each.copy_(value)


# What torch does not know of split tensors, by what it knows: `p[:, 2] = 5`, which fills by a tensor, and copies of several at once.
_OTHERWISE: dict[str, Callable[[Any, Any], Any]] = {"fill_": _fill, "_foreach_copy_": _copy_each}


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


def _lie_as_greatest(result: Any) -> None:
    """The bool of all ranks is the greatest of their bools. To torch it is the sum, which it is no longer once it is a number: where two
    ranks have a true one, `(p > 3).any().int()` would be 2, and `p * (p > 3).any(0)` twice as much."""
    if isinstance(result, DTensor) and any(word.is_partial("sum") for word in result.placements):
        lie_as(result, [Partial("max") if word.is_partial("sum") else word for word in result.placements])


def _refuse_mean_of_means(name: str, operands: tuple[Any, ...], result: Any) -> None:
    """Raise `AutoparError` where the mean of all elements is not the mean of the parts', some of which are larger."""
    if not isinstance(result, DTensor) or not any(word.is_partial("avg") for word in result.placements):
        return
    for each in operands:
        if isinstance(each, DTensor) and not lies_in_equal_parts(each):
            raise AutoparError(
                f"{name} of {list(each.shape)} that lies as {tuple(each.placements)} on {tuple(each.device_mesh.shape)} ranks, in parts of "
                "unequal sizes: torch would take the mean of each part, and of these the mean, which is another number. Write it in "
                "plain ops, as ((p - q) ** 2).mean(), or take .full_tensor() of each first, on every rank"
            )
