"""The parameters and buffers of a model as slots: each name is one, tied tensors have several."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager

import torch
from torch import nn


def slots_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every name of every parameter and buffer, in the model's order."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def names_of(model: nn.Module) -> dict[str, list[str]]:
    """All names of each tensor by its first one."""
    found: dict[int, list[str]] = {}
    for name, tensor in slots_of(model).items():
        found.setdefault(id(tensor), []).append(name)
    return {names[0]: names for names in found.values()}


def get(model: nn.Module, name: str) -> torch.Tensor:
    path, _, attribute = name.rpartition(".")
    return getattr(model.get_submodule(path), attribute)


def put(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(path), attribute, tensor)


@contextmanager
def replaced(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Generator[None]:
    """While this is entered `model` has `tensors` in these slots."""
    before = {name: get(model, name) for name in tensors}
    try:
        for name, tensor in tensors.items():
            put(model, name, tensor)
        yield
    finally:
        for name, tensor in before.items():
            put(model, name, tensor)


def stand_in(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A tensor, or parameter, like this one on another device; its values are any."""
    empty = torch.empty_like(tensor, device=device, requires_grad=False)
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
