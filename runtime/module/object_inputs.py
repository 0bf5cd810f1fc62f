"""Inputs that are objects with tensors in them, which no graph sees, and of which ranks could compare nothing: they print their values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from autopar.runtime._torch import flatten


def holds_tensors(leaf: Any) -> bool:
    """Whether there are tensors in what torch takes for one value."""
    if isinstance(leaf, torch.Tensor):
        return False
    fields = [getattr(leaf, each.name, None) for each in dataclasses.fields(leaf)] if dataclasses.is_dataclass(leaf) else []
    return any(isinstance(each, torch.Tensor) for each in flatten((fields, getattr(leaf, "__dict__", {})))[0])


def as_structure(name: str, leaf: Any) -> str:
    """What is wrong with such an object, and how to pass it."""
    kind = type(leaf).__qualname__
    if dataclasses.is_dataclass(leaf):
        mend = f"call torch.export.register_dataclass({kind}) once, before any is passed"
    elif isinstance(leaf, Mapping):
        mend = f"pass dict({name}), or what is in it by name, **{name}"
    else:
        mend = "pass its tensors in tuples, lists, dicts or dataclasses known to torch.export.register_dataclass"
    return f"{name!r} is of type {kind}, in which torch knows no tensors: {mend}"
