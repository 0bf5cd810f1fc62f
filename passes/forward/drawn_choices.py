"""Choices by chance as plain ops on keyed draws: orders, and picks by weight."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from autopar.graph.draws import Draws
from autopar.graph.emit import Emitter, tensor_of
from autopar.ir.arguments import all_named

aten = torch.ops.aten


def permutation(draws: Draws, emit: Emitter, node: Node) -> Node:
    """`torch.randperm`: the order of as many draws. Equal ones are told apart by their places, so that every rank sorts alike."""
    shape = list(tensor_of(node).shape)
    drawn = emit.call(aten.bitwise_right_shift.Tensor_Scalar, draws.bits(emit, shape), 1)
    places = emit.call(aten.arange.default, shape[0], device=torch.device("cpu"))
    keys = emit.call(aten.bitwise_or.Tensor, emit.call(aten.bitwise_left_shift.Tensor_Scalar, drawn, 32), places)
    order = emit.call(operator.getitem, emit.call(aten.sort.default, keys), 1)
    return emit.cast(order, tensor_of(node).dtype)


def picks(draws: Draws, emit: Emitter, node: Node) -> Node:
    """`torch.multinomial`: by the exponential races of its weights (Efraimidis and Spirakis, Weighted random sampling with a reservoir,
    2006), as torch does; with replacement by the place of a draw in the sums of weights."""
    given = all_named(node)
    number, weights = given["num_samples"], given["self"]
    weights = emit.cast(weights, torch.float64 if tensor_of(weights).dtype == torch.float64 else torch.float32)
    shape, dtype = list(tensor_of(weights).shape), tensor_of(weights).dtype
    if number == 1 or not given["replacement"]:
        race = emit.call(aten.div.Tensor, weights, draws.exponential(emit, shape, dtype))
        return emit.call(operator.getitem, emit.call(aten.topk.default, race, number, -1), 1)
    sums = emit.call(aten.cumsum.default, weights, -1)
    drawn = draws.uniform(emit, [*shape[:-1], number], dtype)
    drawn = emit.call(aten.mul.Tensor, drawn, emit.call(aten.slice.Tensor, sums, -1, shape[-1] - 1))
    # Right of all sums that are not above the draw: what has no weight is not picked.
    found = emit.call(aten.searchsorted.Tensor, sums, drawn, right=True)
    return emit.call(aten.clamp_max.default, found, shape[-1] - 1)
