"""The longest run of layers of a model, and the model with few of them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn

from autopar.graph.layers import LEAST, SHOWN, LayerRun


def longest_run(model: nn.Module) -> LayerRun | None:
    """The longest `nn.ModuleList` of layers of one class; None where none has `LEAST`."""
    runs = [LayerRun(path, len(row)) for path, row in model.named_modules() if type(row) is nn.ModuleList and _is_run(row)]
    return max(runs, key=lambda run: run.number, default=None)


def _is_run(row: nn.ModuleList) -> bool:
    return len(row) >= LEAST and len({type(layer) for layer in row}) == 1 and len(set(row)) == len(row)


@contextmanager
def few_layers(model: nn.Module, run: LayerRun) -> Generator[None]:
    """While this is entered, `model` has the first `SHOWN` layers of `run` alone."""
    layers = vars(model.get_submodule(run.path))["_modules"]
    all_layers = dict(layers)
    for name in list(layers)[SHOWN:]:
        del layers[name]
    try:
        yield
    finally:
        layers.clear()
        layers.update(all_layers)
