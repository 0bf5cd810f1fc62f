"""The models of the published tables, in plain PyTorch: GPTs as Megatron-LM writes them, Llamas as nanotron does.

Shapes: B sequences, T positions, H width, N heads, D head size. Nothing here knows of meshes; the plans that people wrote by hand for them
are `MEGATRON` and `LLAMA`, as pins.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class GPTBlock(nn.Module):
    """Pre-norm attention, written out, and MLP."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.norm_attention = nn.LayerNorm(width)
        self.attention = GPTAttention(width, num_heads, dropout)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = GPTMLP(width)

    def forward(self, x_BTH: Tensor) -> Tensor:
        x_BTH = x_BTH + F.dropout(self.attention(self.norm_attention(x_BTH)), self.dropout, self.training)
        return x_BTH + F.dropout(self.mlp(self.norm_mlp(x_BTH)), self.dropout, self.training)


class GPTAttention(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x_BTH: Tensor) -> Tensor:
        batch, length, width = x_BTH.shape
        query, key, value = (
            each(x_BTH).view(batch, length, self.num_heads, width // self.num_heads).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        future = torch.ones(length, length, dtype=torch.bool, device=x_BTH.device).triu(1)
        scores = (query @ key.transpose(2, 3)) * (width // self.num_heads) ** -0.5
        weights = F.dropout(scores.masked_fill(future, -10000.0).softmax(-1), self.dropout, self.training)
        return self.out((weights @ value).transpose(1, 2).reshape(batch, length, width))


class GPTMLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTH: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BTH), approximate="tanh"))


class GPT(nn.Module):
    """Embeddings tied with the head, as Megatron's are."""

    def __init__(self, vocabulary: int, num_layers: int, width: int, num_heads: int, length: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.symbols, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(GPTBlock(width, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """tokens, labels int64 [B, T] → the mean cross entropy, in float32."""
        x_BTH = self.symbols(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x_BTH = block(x_BTH)
        logits = F.linear(self.norm(x_BTH), self.symbols.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


COLUMN, ROW = ("tp", None), (None, "tp")
# Megatron's split: columns, then rows; what both leave is whole on every rank, or, with sequence parallelism, split by positions.
MEGATRON = {
    "*": (),
    "symbols.weight": COLUMN,
    **{f"blocks.*.attention.{name}.weight": COLUMN for name in ("query", "key", "value")},
    **{f"blocks.*.attention.{name}.bias": ("tp",) for name in ("query", "key", "value")},
    "blocks.*.attention.out.weight": ROW,
    "blocks.*.mlp.up.weight": COLUMN,
    "blocks.*.mlp.up.bias": ("tp",),
    "blocks.*.mlp.down.weight": ROW,
}
RESIDUAL = ("blocks.*.norm_attention", "blocks.*.attention", "blocks.*.norm_mlp", "blocks.*.mlp")
WHOLE_OUTPUTS = {name: (None, None, None) for name in RESIDUAL}
SPLIT_SEQUENCE = {name: (None, "tp", None) for name in RESIDUAL}


class LlamaAttention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x_BTH: Tensor, cosine_TD: Tensor, sine_TD: Tensor) -> Tensor:
        batch, length, width = x_BTH.shape
        query, key, value = (
            each(x_BTH).view(batch, length, self.num_heads, width // self.num_heads).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        query, key = (_turned(each, cosine_TD, sine_TD) for each in (query, key))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


def _turned(x_BNTD: Tensor, cosine_TD: Tensor, sine_TD: Tensor) -> Tensor:
    """Rotary position embedding."""
    first, second = x_BNTD.chunk(2, -1)
    return x_BNTD * cosine_TD + torch.cat((-second, first), -1) * sine_TD


class LlamaMLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x_BTH: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BTH)) * self.up(x_BTH))


class LlamaBlock(nn.Module):
    def __init__(self, width: int, num_heads: int, hidden: int) -> None:
        super().__init__()
        self.norm_attention, self.attention = nn.RMSNorm(width), LlamaAttention(width, num_heads)
        self.norm_mlp, self.mlp = nn.RMSNorm(width), LlamaMLP(width, hidden)

    def forward(self, x_BTH: Tensor, cosine_TD: Tensor, sine_TD: Tensor) -> Tensor:
        x_BTH = x_BTH + self.attention(self.norm_attention(x_BTH), cosine_TD, sine_TD)
        return x_BTH + self.mlp(self.norm_mlp(x_BTH))


class Llama(nn.Module):
    """As many key heads as query heads."""

    def __init__(self, vocabulary: int, num_layers: int, width: int, num_heads: int, hidden: int, is_tied: bool) -> None:
        super().__init__()
        self.head_size = width // num_heads
        self.symbols = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, num_heads, hidden) for _ in range(num_layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        if is_tied:
            self.head.weight = self.symbols.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """tokens, labels int64 [B, T] → the mean cross entropy, in float32."""
        x_BTH = self.symbols(tokens)
        positions_T = torch.arange(tokens.shape[1], device=tokens.device)
        rates = 10000.0 ** (-torch.arange(0, self.head_size, 2, device=tokens.device) / self.head_size)
        angles_TD = (positions_T[:, None] * rates).repeat(1, 2)
        cosine_TD, sine_TD = angles_TD.cos().to(x_BTH.dtype), angles_TD.sin().to(x_BTH.dtype)
        for block in self.blocks:
            x_BTH = block(x_BTH, cosine_TD, sine_TD)
        return F.cross_entropy(self.head(self.norm(x_BTH)).flatten(0, 1).float(), labels.flatten())


# nanotron's split, whose sequence is split, too, between the products.
LLAMA = {
    "*": (),
    "symbols.weight": COLUMN,
    "head.weight": COLUMN,
    **{f"blocks.*.attention.{name}.weight": COLUMN for name in ("query", "key", "value")},
    "blocks.*.attention.out.weight": ROW,
    "blocks.*.mlp.gate.weight": COLUMN,
    "blocks.*.mlp.up.weight": COLUMN,
    "blocks.*.mlp.down.weight": ROW,
    **SPLIT_SEQUENCE,
}
