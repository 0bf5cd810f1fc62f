"""A GPT in plain PyTorch: nothing here knows of meshes or of autopar.

Shapes: B sequences, T positions, H width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x_BTH: Tensor) -> Tensor:
        x_BTH = x_BTH + self._drop(self._attention(self.norm_attention(x_BTH)))
        return x_BTH + self._drop(self.mlp_out(F.gelu(self.mlp_in(self.norm_mlp(x_BTH)))))

    def _attention(self, x_BTH: Tensor) -> Tensor:
        batch, length, width = x_BTH.shape
        query, key, value = (
            part.view(batch, length, self.num_heads, width // self.num_heads).transpose(1, 2)
            for part in self.query_key_value(x_BTH).split(width, dim=2)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))

    def _drop(self, x_BTH: Tensor) -> Tensor:
        return F.dropout(x_BTH, self.dropout, self.training)


class GPT(nn.Module):
    """A decoder-only transformer. Raises `ValueError` when the heads do not divide the width."""

    def __init__(self, num_symbols: int, num_layers: int, width: int, num_heads: int, max_length: int, dropout: float = 0.0) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(f"a width of {width} does not divide over {num_heads} heads")
        self.dropout = dropout
        self.symbols = nn.Embedding(num_symbols, width)
        self.positions = nn.Embedding(max_length, width)
        self.blocks = nn.ModuleList(Block(width, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_symbols, bias=False)
        self.apply(_initialise)
        for name, parameter in self.named_parameters():
            if name.endswith(("attention_out.weight", "mlp_out.weight")):  # GPT-2: the residual stream keeps its variance
                nn.init.normal_(parameter, std=0.02 / (2 * num_layers) ** 0.5)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """tokens, labels int64 [B, T] → the mean cross entropy (nats, a scalar), or without labels the logits [B, T, num_symbols]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x_BTH = F.dropout(self.symbols(tokens) + self.positions(positions), self.dropout, self.training)
        for block in self.blocks:
            x_BTH = block(x_BTH)
        logits = self.head(self.norm(x_BTH))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        for name, parameter in module.named_parameters():
            if name == "bias":
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=0.02)
