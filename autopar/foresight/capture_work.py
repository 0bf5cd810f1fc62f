"""Which layers of a model are equal, and a copy of it on the meta device that has few of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import nn

from autopar.graph.causal_biases import biases_not_copied

# How many of a run of equal layers are kept: the first one and the last one stand for themselves, of two or three the one before the last
# for all others. Where something is added between layers, what stands before the second one reads otherwise than what follows.
KEPT = (3, 4)


@dataclass(frozen=True)
class Layer:
    """The layer at `path` of a model, the `index`-th of the list at `row`. It stands for `count` equal ones of the user's model."""

    path: str
    row: str
    index: int
    count: int = 1


@dataclass(frozen=True)
class Layered:
    """`model` on the meta device, and its layers in order."""

    model: nn.Module
    layers: tuple[Layer, ...]

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(layer.path for layer in self.layers)

    @property
    def counts(self) -> dict[str, int]:
        return {layer.path: layer.count for layer in self.layers}


@dataclass(frozen=True)
class Shortened(Layered):
    """By the path of each layer of the whole model the one that stands for it."""

    shown: Mapping[str, str]


def layered(model: nn.Module, dtype: torch.dtype | None) -> Layered:
    """A copy of `model` without its data, its floating-point tensors in `dtype` where one is given. Its layers are those of every
    `nn.ModuleList` and `nn.Sequential` that no other such list holds."""
    whole = on_meta(model, dtype)
    rows = ((path, index, name) for path, row in _outermost_lists(whole) for index, name in enumerate(_children(row)))
    return Layered(whole, tuple(Layer(f"{path}.{name}", path, index) for path, index, name in rows))


def shortened(whole: Layered) -> Iterator[Shortened]:
    """`whole` with few layers, from few to more: of layers that follow each other and look equal (they print alike, their parameters have
    equal shapes) some are left out.

    The first may make what all others read, and what the last gives may be kept by the head alone. Whether the few do what all do is
    another question: see `autopar.foresight.same_work`.
    """
    few = (_with(whole, most) for most in KEPT)
    return (each for each in few if len(each.layers) < len(whole.layers))


def _with(whole: Layered, most: int) -> Shortened:
    """At most so many of equal layers."""
    model = on_meta(whole.model)
    layers, found = list[Layer](), dict[str, str]()
    for path in dict.fromkeys(layer.row for layer in whole.layers):
        children, paths = _children(model.get_submodule(path)), [layer.path for layer in whole.layers if layer.row == path]
        modules, names, kept = list(children.values()), list(children), _kept(list(children.values()), most)
        is_numbered = names == [str(number) for number in range(len(names))]
        children.clear()
        for index, number in enumerate(dict.fromkeys(kept)):
            name = str(index) if is_numbered else names[number]
            children[name] = modules[number]
            layers.append(Layer(f"{path}.{name}", path, index, kept.count(number)))
            found |= {each: f"{path}.{name}" for each, stands_for in zip(paths, kept, strict=True) if stands_for == number}
    return Shortened(model, tuple(layers), found)


def _kept(row: Sequence[nn.Module], most: int) -> list[int]:
    """For each layer of a list the one that stands for it."""
    if len(set(row)) < len(row):  # the same one again
        return list(range(len(row)))
    found: list[int] = []
    for _, run in groupby(range(len(row)), key=list(map(_description, row)).__getitem__):
        first, *others = run
        found += [first, *(min(index, others[most - 3]) if index < others[-1] else index for index in others)]
    return found


def _children(row: nn.Module) -> dict[str, nn.Module]:
    return vars(row)["_modules"]


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
