"""Causal biases of torch's (`torch.nn.attention.bias`) as the masks that they stand for: no graph holds tensors of a class of their own."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.attention import bias
from torch.nn.attention.bias import CausalBias, CausalVariant

from autopar.errors import CaptureError
from autopar.graph.model_device import model_device


@contextmanager
def causal_biases_plain(model: nn.Module) -> Generator[None]:
    """While this is entered, biases that `model` holds in attributes, and those that it makes, are bool tensors where its parameters are,
    true where a row attends to a key. Code that knows their class by name might ask for it: there they stay what they are."""
    if _knows_the_class(model):
        yield
        return
    device = model_device(model)
    held = list(_held(model))
    for attributes, name, value in held:
        attributes[name] = _mask(value.variant, value.seq_len_q, value.seq_len_kv, device)
    try:
        with mock.patch.object(bias, "CausalBias", partial(_mask, device=device)):
            yield
    finally:
        for attributes, name, value in held:
            attributes[name] = value


def biases_not_copied(model: nn.Module) -> dict[int, CausalBias]:
    """For the memo of a deep copy of `model`: biases have no numbers, and torch cannot copy one."""
    return {id(value): value for _, _, value in _held(model)}


def refuse_biases(constants: Mapping[str, Any]) -> None:
    """Raise `CaptureError` for one among what was captured: a graph would read its memory, in which there is nothing."""
    name = next((name for name, value in constants.items() if isinstance(value, CausalBias)), None)
    if name is not None:
        raise CaptureError(
            f"forward reads a CausalBias of torch.nn.attention.bias, {name}, which is no tensor that a graph could hold\n"
            "  how to mend it: call causal_upper_left or causal_lower_right in forward, or keep what they give as an attribute of the "
            "module that uses it (not in a list or a global); where the code names the class, pass is_causal=True or a mask"
        )


def _knows_the_class(model: nn.Module) -> bool:
    names = {type(module).__module__ for module in model.modules()}
    modules = [sys.modules[name] for name in names if name in sys.modules and not name.startswith("torch.")]
    return any(value is CausalBias for module in modules for value in vars(module).values())


def _held(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, CausalBias]]:
    for module in model.modules():
        yield from ((vars(module), name, value) for name, value in vars(module).items() if isinstance(value, CausalBias))


def _mask(variant: CausalVariant, seq_len_q: int, seq_len_kv: int, device: torch.device) -> torch.Tensor:
    """[queries, keys]: aligned to the first key, or to the last."""
    first = 0 if variant is CausalVariant.UPPER_LEFT else seq_len_kv - seq_len_q
    return torch.ones(seq_len_q, seq_len_kv, dtype=torch.bool, device=device).tril(first)
