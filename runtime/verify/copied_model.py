"""A copy of the user's model to run beside what was compiled of it: in float64, or with other values, hooks and ties included."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from autopar.graph.causal_biases import biases_not_copied
from autopar.graph.promote import promote_tensor, promoted_dtype
from autopar.runtime.verify.copied_functions import rebind


def copy_model(model: nn.Module, tensors: Mapping[int, torch.Tensor], *, promoted: bool) -> nn.Module:
    """A deep copy of `model` in which `tensors`, by the id of the original, stand for parameters and buffers; ties stay ties.

    With `promoted` whatever else the modules hold of lower float tensors, in lists, tuples and dicts too, becomes float64. What was
    computed (the weight of `nn.utils.weight_norm`, which its hook computes anew at each call) is copied without its history. Hooks that
    hold the model see the copy.
    """
    memo: dict[int, Any] = {**biases_not_copied(model)}
    for tensor in (*model.parameters(), *model.buffers()):
        value = tensors[id(tensor)].detach().clone()
        memo[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
    for tensor in _held_tensors(model):
        is_plain = type(tensor) in (torch.Tensor, nn.Parameter)
        is_promoted = promoted and is_plain and promoted_dtype(tensor.dtype) is not tensor.dtype
        if id(tensor) not in memo and (is_promoted or not tensor.is_leaf):
            value = tensor.detach().clone()
            memo[id(tensor)] = promote_tensor(value) if is_promoted else value
    copied = copy.deepcopy(model, memo)
    rebind(copied, memo)
    return copied


def _held_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """The tensors in attributes of modules, and in the lists, tuples and dicts there; some may come twice."""
    held: list[Any] = [vars(module) for module in model.modules()]
    seen = set[int]()
    while held:
        each = held.pop()
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, (list, tuple, dict)) and id(each) not in seen:
            seen.add(id(each))
            held += each.values() if isinstance(each, dict) else each
