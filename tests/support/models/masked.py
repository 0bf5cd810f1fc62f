"""Layers that all read a mask of the inputs: what stages of a pipeline make for themselves."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn, tanh


class MaskedLayers(nn.Module):
    """Two layers behind an embedding, and a mask that both read; `loss` takes the module, the last value and the mask."""

    def __init__(self, loss: Callable[[MaskedLayers, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.symbols = nn.Embedding(6, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.loss = loss

    def forward(self, ids: Tensor) -> Tensor:
        mask = (ids > 2).unsqueeze(-1)
        x = self.symbols(ids)
        for layer in self.layers:
            x = x + tanh(layer(x)) * mask
        return self.loss(self, x, mask)


def tied(model: MaskedLayers, x: Tensor, mask: Tensor) -> Tensor:
    """The embedding's weight is that of the head, too."""
    return (x @ model.symbols.weight.t()).square().sum()


def over_count(model: MaskedLayers, x: Tensor, mask: Tensor) -> Tensor:
    """Over the number of elements that the mask keeps."""
    return x.square().sum() / mask.sum()
