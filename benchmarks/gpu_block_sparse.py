"""Block-sparse attention on a GPU: against float64, and timed beside FlexAttention with the same blocks and dense attention with none.

The layout that is timed is causal: a window of blocks before the diagonal and the first block, which all see. TFLOP/s count the blocks
that there are, 4 · D · block² each for the forward and 2.5 times that for the backward; dense attention's rate counts the same, so that
rates compare as times do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from autopar.kernels.attention import attention
from autopar.kernels.block_sparse import block_sparse_attention
from benchmarks.gpu_accuracy import compared
from benchmarks.gpu_case import Case, Contestants, Place, Row, Work, race

BF16 = torch.bfloat16
NUM_TOKENS, WIDTH = 16_384, 2_048
LENGTHS, SIZES, BLOCK_SIZES, WINDOW_BLOCKS = (16_384, 4_096), (128, 64), (128, 64), 8
# Head size, block size, causal.
CHECKED = [(64, 64, True), (64, 16, False), (128, 128, True), (128, 64, False), (128, 32, True), (80, 64, True), (256, 64, True)]


def block_sparse_cases(place: Place) -> list[Case]:
    checks = [
        Case("accuracy", f"accuracy: block-sparse {size}, blocks of {block_size}{', causal' if is_causal else ''}", run)
        for size, block_size, is_causal in CHECKED
        for run in [partial(_check, place, size, block_size, is_causal)]
    ]
    lengths, sizes, block_sizes = ((64,), (16,), (16,)) if place.tiny else (LENGTHS, SIZES, BLOCK_SIZES)
    shapes = [Timed(length, size, block_size) for length in lengths for size in sizes for block_size in block_sizes]
    return [*checks, *(Case("speed", str(shape), partial(_race, place, shape)) for shape in shapes)]


def _check(place: Place, size: int, block_size: int, is_causal: bool, only_compile: bool) -> list[Row]:
    """Both results and all gradients; lengths end inside a block, and some rows attend to nothing."""
    length, key_length = (2 * block_size + 3, 3 * block_size + 5) if place.tiny else (777, 901)
    query, key, value = (
        place.draw(2, rows, heads, size, dtype=BF16).transpose(1, 2) for rows, heads in ((length, 4), (key_length, 2), (key_length, 2))
    )
    layout = torch.rand(4, -(-length // block_size), -(-key_length // block_size), device=place.device) < 0.4
    layout[0, 0] = False
    mask = layout.repeat_interleave(block_size, -2).repeat_interleave(block_size, -1)[..., :length, :key_length]
    mask = mask.tril() if is_causal else mask

    def ours(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return block_sparse_attention(query, key, value, layout, block_size=block_size, is_causal=is_causal)

    def plain(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        scores = query @ key.repeat_interleave(2, 1).mT * size**-0.5
        empty = ~mask.any(-1, keepdim=True)
        weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~mask, 0.0)
        # -inf only where the row has a key: the gradient of a logarithm of nothing is NaN.
        log_sum_exp = scores.masked_fill(~mask & ~empty, -torch.inf).logsumexp(-1).masked_fill(empty.squeeze(-1), 0.0)
        return weights @ value.repeat_interleave(2, 1), log_sum_exp

    return compared("block-sparse attention", f"{size}, blocks of {block_size}", ours, plain, (query, key, value))


@dataclass(frozen=True)
class Timed:
    length: int
    size: int
    block_size: int

    def __str__(self) -> str:
        return f"block-sparse {self.size} causal {self.length}, blocks of {self.block_size}"

    def layout(self, device: str) -> Tensor:
        """[1, N, N]."""
        blocks = torch.arange(self.length // self.block_size, device=device)
        distance = blocks[:, None] - blocks
        return ((distance >= 0) & ((distance < WINDOW_BLOCKS) | (blocks == 0))).unsqueeze(0)


def _race(place: Place, shape: Timed, only_compile: bool) -> list[Row]:
    torch.compiler.reset()
    num_tokens, width = (shape.length, 2 * shape.size) if place.tiny else (NUM_TOKENS, WIDTH)
    layout = shape.layout(place.device)
    each = 4.0 * shape.size * shape.block_size**2
    forward = each * int(layout.sum()) * (num_tokens // shape.length) * (width // shape.size)
    dims = (num_tokens // shape.length, shape.length, width // shape.size, shape.size)
    operands = tuple(place.draw(*dims, dtype=BF16).transpose(1, 2).requires_grad_() for _ in range(3))
    work = Work("TFLOP/s", forward, 2.5 * forward)
    return race(place, {"case": str(shape)}, _contestants(place, shape, layout), operands, work, only_compile)


def _contestants(place: Place, shape: Timed, layout: Tensor) -> Contestants:
    options = {"is_causal": True, "scale": shape.size**-0.5, "soft_cap": 0.0, "window": 0, "keep_below": 0, "keep_scale": 1.0}
    return {
        "ours": lambda q, k, v: block_sparse_attention(q, k, v, layout, block_size=shape.block_size, is_causal=True)[0],
        "ours, dense": lambda q, k, v: attention(q, k, v, *[None] * 6, **options, implementation="triton")[0],
        "flex": _flex(place, shape, layout[0]) if place.on_gpu else None,
    }


def _flex(place: Place, shape: Timed, layout: Tensor) -> Callable[..., Tensor]:
    def sees(batch: Tensor, head: Tensor, s: Tensor, t: Tensor) -> Tensor:
        return (t <= s) & layout[s // shape.block_size, t // shape.block_size]

    blocks = create_block_mask(sees, None, None, shape.length, shape.length, place.device, BLOCK_SIZE=shape.block_size)
    function = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return lambda query, key, value: function(query, key, value, block_mask=blocks)
