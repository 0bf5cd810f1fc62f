"""Numbers that are made of several parameters or gradients of one stage of a pipeline, where the program means those of the whole model.

    torch.stack([p.grad.norm() for p in parallel.parameters()]).norm()       0.4 in one process, 0.3 on a stage: another step, in silence

On processes a rank has its stage's parameters. A number of one of them is what it is anywhere, and so is what goes element by element. What
joins several is refused. Whether two numbers are of one parameter (a ratio of a weight's norm and its gradient's) is told by the shapes of
what they were reduced from. Plain numbers (`.full_tensor()`, `.item()`) are not followed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from autopar.errors import AutoparError
from autopar.runtime.module._torch import is_in_backward

_REDUCTIONS = frozenset("linalg_vector_norm sum mean max min amax amin dot".split())
_JOINS = frozenset("stack cat".split())
_SUMS = frozenset("add add_ max maximum min minimum".split())  # the last four of two tensors
# What is computed of a number, or element by element of a vector, is made of what that is made of.
_CARRYING = frozenset("_to_copy abs clone div mul mul_ pow sqrt squeeze sub unsqueeze view".split())
NAMES = _REDUCTIONS | _JOINS | _SUMS | _CARRYING | {"_foreach_norm"}

Shapes = frozenset[tuple[int, ...]]
# Where parameters of one stage among several lie.
_STAGES: WeakSet[DeviceMesh] = WeakSet()
# Of the shapes of what tensors are made.
_SOURCES: WeakIdKeyDictionary = WeakIdKeyDictionary()


def lies_on_stage(mesh: DeviceMesh) -> None:
    """What lies on `mesh` is of one stage of a pipeline of several."""
    _STAGES.add(mesh)


def made_of(name: str, args: tuple[Any, ...]) -> Shapes:
    """Of the shapes of what a result of the op of this name is made; none where nobody has to know.

    Raises `AutoparError` where that is a number of several parameters of a stage. One through which gradients come back is none: a penalty
    on each parameter has the gradients that it has in one process.
    """
    operands = list(_operands(args))
    if not operands or operands[0].device_mesh not in _STAGES or is_in_backward():
        return frozenset()
    is_differentiated = torch.is_grad_enabled() and any(each.requires_grad for each in operands)
    numbers = [each for each in operands if each in _SOURCES and each.numel() == 1]
    is_reduction = name in _REDUCTIONS and (len(operands) == 1 or name == "dot")
    if is_reduction or name in _JOINS:
        found = _union(_sources(each) or _shape(each) for each in operands)
        is_wrong = len(found) > 1 if is_reduction else bool(numbers)
    else:
        followed = numbers if len(numbers) == len(operands) else [each for each in operands if each.numel() > 1]
        found = _union(_sources(each) for each in followed)
        is_wrong = name in _SUMS and len(numbers) > 1 and len(found) > 1
    if is_wrong and not is_differentiated:
        shapes = ", ".join(str(list(each)) for each in sorted(found))
        raise AutoparError(
            f"{name} makes a number of several parameters or gradients, of shapes {shapes}, and with pp on processes a rank has those of "
            "its stage alone: each stage would go on with another number than a single process. The norm of all gradients is "
            "parallel.clip_grad_norm_(float('inf')), and parallel.clip_grad_norm_(bound) clips by it; to join numbers in another way take "
            "each whole, p.grad.norm().full_tensor(), and add up what all stages have by torch.distributed.all_reduce"
        )
    return found


def remember(name: str, result: Any, shapes: Shapes) -> None:
    """What `made_of` said of a result that a new tensor holds, or a number that was written."""
    if isinstance(result, DTensor) and shapes and (result.numel() == 1 or not name.endswith("_")):
        _SOURCES[result] = shapes


def remember_each(operands: Any, results: Any) -> None:
    """Each of these results is a number of the operand at its place."""
    for operand, result in zip(operands, results, strict=True):
        if isinstance(operand, DTensor) and isinstance(result, DTensor) and operand.device_mesh in _STAGES:
            _SOURCES[result] = _sources(operand) or _shape(operand)


def _sources(tensor: DTensor) -> Shapes:
    return _SOURCES.get(tensor) or frozenset()


def _shape(tensor: DTensor) -> Shapes:
    return frozenset([tuple(tensor.shape)])


def _operands(args: tuple[Any, ...]) -> Iterator[DTensor]:
    for arg in args:
        for each in arg if isinstance(arg, (list, tuple)) else (arg,):
            if isinstance(each, DTensor):
                yield each


def _union(shapes: Iterator[Shapes]) -> Shapes:
    return frozenset().union(*shapes)
