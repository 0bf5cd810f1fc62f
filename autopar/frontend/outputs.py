"""The user's output: where its loss is, and which of its tensors a program computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any

import torch

from autopar._torch import pytree
from autopar.driver.compiled import TENSOR
from autopar.errors import CaptureError


@dataclass(frozen=True)
class OutputElement:
    """An element of an output: `.name`, or `[name]` with `by_item`; `leaves` are its places among the output's flat leaves."""

    name: str | int
    by_item: bool
    leaves: tuple[int, ...]

    def of(self, output: Any) -> Any:
        return output[self.name] if self.by_item else getattr(output, str(self.name))


@dataclass(frozen=True)
class OutputSpec:
    """The user's output: its pytree `structure`, its `leaves` (TENSOR where a tensor stands), the `elements` in which tensors are and
    nothing else, and the flat index of the loss, where there is one; it is the output itself, or the element `loss`.

    `assigned` are the buffers for which the forward sets another tensor (`self.mean = ...`), rather than writing into them, and why that
    is not the same; empty where it is. Where `has_objects`, something else than tensors and constants comes out, too (a key-value cache),
    which no program can compute.
    """

    structure: Any
    leaves: tuple[Any, ...]
    loss_index: int | None
    loss: OutputElement | None = None
    elements: tuple[OutputElement, ...] = ()
    assigned: Mapping[str, str] = field(default_factory=dict)
    has_objects: bool = False

    @staticmethod
    def of(output: Any, assigned: Mapping[str, str], batch_size: int | None = None) -> OutputSpec:
        """`output` is of fake tensors. With `batch_size`, elements beside a loss are those alone that have it as their first dim."""
        leaves, structure = flattened(output)
        flat = tuple(leaf if _is_constant(leaf) else TENSOR for leaf in leaves)
        has_objects = any(leaf is TENSOR and not isinstance(given, torch.Tensor) for leaf, given in zip(flat, leaves, strict=True))
        if _is_scalar(output):
            return OutputSpec(structure, flat, 0, assigned=assigned)
        loss = _find_loss(output)
        index = next((index for index, leaf in enumerate(leaves) if loss is not None and leaf is loss), None)
        if loss is not None and index is None:
            raise CaptureError(
                f"the output holds a loss, but {type(output).__name__} is no structure that torch can take apart; "
                "return a dict, a tuple, a dataclass or a ModelOutput, or register the class with torch.utils._pytree.register_pytree_node"
            )
        places = tuple(_elements(output, leaves))
        size = None if loss is None else batch_size
        kept = tuple(place for place in places if index in place.leaves or _holds_tensors(place.of(output), size))
        # An object of another class that torch can take apart has the loss by name.
        by_name = OutputElement("loss", False, (index,)) if index is not None else None
        place = next((place for place in places if place.leaves == (index,)), by_name)
        return OutputSpec(structure, flat, index, place, kept or (() if place is None else (place,)), assigned, has_objects)


def flattened(output: Any) -> tuple[list[Any], Any]:
    """Leaves, in the order in which a program's outputs count them, and structure. Plain dataclasses are made known to torch: export and
    the runtime take them apart, too."""
    leaves, structure = pytree.tree_flatten(output)
    unknown = {type(leaf) for leaf in leaves if is_dataclass(leaf) and not isinstance(leaf, type)}
    for kind in unknown:
        torch.export.register_dataclass(kind)
    return flattened(output) if unknown else (leaves, structure)


def _is_constant(leaf: Any) -> bool:
    """Whether a leaf is the same in every call; tensors are not, nor are objects that may hold some (a key-value cache)."""
    return leaf is None or isinstance(leaf, (bool, int, float, complex, str, bytes, Enum, type, torch.dtype, torch.device))


def _find_loss(output: Any) -> Any:
    """The tensor that is the loss: `.loss`, `["loss"]`, or the one scalar among others in a tuple (`return logits, loss`)."""
    if _is_scalar(getattr(output, "loss", None)):
        return output.loss
    if isinstance(output, Mapping):
        return output["loss"] if _is_scalar(output.get("loss")) else None
    # Of two scalars nobody can say which one is it.
    scalars = [value for value in output if _is_scalar(value)] if isinstance(output, (tuple, list)) else []
    return scalars[0] if len(scalars) == 1 else None


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 0 and value.is_floating_point()


def _elements(output: Any, leaves: list[Any]) -> Iterator[OutputElement]:
    """The elements of an output at its top level, as torch takes it apart; none where that is not how it does."""
    if isinstance(output, Mapping):
        named: list[tuple[str | int, Any]] = list(output.items())
    elif isinstance(output, (tuple, list)):
        named = list(enumerate(output))
    elif is_dataclass(output):
        named = [(field.name, getattr(output, field.name)) for field in fields(output)]
    else:
        return
    flat = [pytree.tree_flatten(value)[0] for _, value in named]
    if [id(leaf) for each in flat for leaf in each] != [id(leaf) for leaf in leaves]:
        return
    begin = 0
    for (name, _), each in zip(named, flat, strict=True):
        yield OutputElement(name, isinstance(output, (Mapping, tuple, list)), tuple(range(begin, begin + len(each))))
        begin += len(each)


def _holds_tensors(value: Any, batch_size: int | None) -> bool:
    if isinstance(value, torch.Tensor):
        return batch_size is None or (value.ndim > 0 and value.shape[0] == batch_size)
    if type(value) in (tuple, list):
        return bool(value) and all(_holds_tensors(each, batch_size) for each in value)
    return False
