"""The user's output structure, with placeholders for tensors that were not computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from autopar.driver.compiled import TENSOR
from autopar.errors import AutoparError, BackwardError
from autopar.ir.program import Signature
from autopar.runtime._torch import paths_of, unflatten


class OmittedTensor:
    """Stands where the user's output has a tensor that the program does not compute; any use raises `AutoparError`."""

    def __repr__(self) -> str:
        return "<not computed: see outputs= of autopar.compile>"

    def __getattr__(self, name: str) -> NoReturn:
        raise _omitted(f"its attribute {name!r} was read")

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise _omitted(f"{getattr(function, '__name__', function)} was called on it")


def _omitted(what: str) -> AutoparError:
    return AutoparError(
        f"this output was not computed, and {what}: where gradients are on, only the loss leaves the mesh by default; "
        'compile with outputs="all" to get every tensor of the output. An object that is no structure of tensors (a key-value cache) '
        "never leaves it"
    )


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(self: OmittedTensor, *args: Any) -> NoReturn:
        raise _omitted(f"{name} was called on it")

    return refuse


_OPERATIONS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul neg pos abs invert "
    "and or xor lt le gt ge eq ne getitem setitem len iter contains bool float int index array"
)
for _name in _OPERATIONS.split():
    setattr(OmittedTensor, f"__{_name}__", _refusal(f"__{_name}__"))
OmittedTensor.__hash__ = object.__hash__


def build_output(signature: Signature, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The user's output: `tensors` by flat index in their places, `OmittedTensor` where one was not computed."""
    leaves = [OmittedTensor() if leaf is TENSOR else leaf for leaf in signature.leaves]
    for index, tensor in tensors.items():
        leaves[int(index)] = tensor
    return unflatten(leaves, signature.structure)


def refuse_detached(signature: Signature, indices: Sequence[str]) -> None:
    """Raise `BackwardError` where a backward came through outputs, by flat index, that a pipeline has detached."""
    if indices:
        paths = paths_of(signature.structure)
        names = ", ".join(f"output{paths[int(index)]}" for index in indices)
        raise BackwardError(
            f"a gradient came back through {names}, but with pp > 1 or several microbatches the backward runs inside the call, from the "
            "loss alone: add up all losses inside the model and return the sum as its loss, or use .detach() on what is only looked at; "
            "with pp = 1 and num_microbatches=1 every output may be differentiated"
        )
