"""Which layers of a model are equal, and a copy of it on the meta device that has few of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from autopar.graph.causal_biases import biases_not_copied

# Of a run of equal layers the first stands for itself, the second for all others.
KEPT = 2


@dataclass(frozen=True)
class Shortened:
    """`model` on the meta device; `layers` are the paths of its layers in order, `counts` how many equal ones of the user's model a path
    stands for."""

    model: nn.Module
    layers: tuple[str, ...]
    counts: dict[str, int]


def shortened(model: nn.Module, dtype: torch.dtype | None) -> Shortened:
    """A copy of `model` without its data, its floating-point tensors in `dtype` where one is given, in which a run of equal layers of an
    `nn.ModuleList` or `nn.Sequential` has two: layers are equal whose modules print alike and whose parameters have equal shapes.

    What equal layers compute, send and keep is equal, but that the first may be the one that makes what all read; so the second stands
    for all that follow.
    """
    short = on_meta(model, dtype)
    layers: list[str] = []
    counts: dict[str, int] = {}
    for path, row in list(_outermost_lists(short)):
        kept: list[nn.Module] = []
        run = 0
        for layer in row:
            run = run + 1 if kept and _description(layer) == _description(kept[-1]) else 1
            if run > KEPT:
                counts[f"{path}.{len(kept) - 1}"] += 1
                continue
            kept.append(layer)
            counts[f"{path}.{len(kept) - 1}"] = 1
        layers += [f"{path}.{number}" for number in range(len(kept))]
        if len(kept) < len(row):
            _replace(short, path, type(row)(kept) if isinstance(row, nn.ModuleList) else nn.Sequential(*kept))
    return Shortened(short, tuple(layers), counts)


def on_meta(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy without data; ties stay ties."""
    known: dict[int, object] = {**biases_not_copied(model)}
    for tensor in (*model.parameters(), *model.buffers()):
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        empty = torch.empty_like(tensor, device="meta", dtype=kind)
        known[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, known)


def _outermost_lists(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.ModuleList | nn.Sequential]]:
    """Lists of two or more layers that no other such list holds."""
    for name, child in module.named_children():
        where = f"{path}.{name}" if path else name
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child) > 1:
            yield where, child
        else:
            yield from _outermost_lists(child, where)


def _description(layer: nn.Module) -> tuple[object, ...]:
    """Layers whose numbers differ beside their shapes (a rate of dropout, a kind of attention) print differently, or have it as an
    attribute; `layer_idx` and its like are where a layer stands."""
    shapes = tuple((name, tuple(each.shape), each.dtype, each.requires_grad) for name, each in layer.named_parameters())
    return type(layer), repr(layer), shapes, tuple(_numbers(layer))


def _numbers(layer: nn.Module) -> Iterator[tuple[str, str, object]]:
    for path, module in layer.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, (bool, float, str)) and not name.startswith("_"):
                yield path, name, value


def _replace(model: nn.Module, path: str, row: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, row)
