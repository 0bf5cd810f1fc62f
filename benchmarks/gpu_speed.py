"""What is timed on a GPU: attention against baselines that are forced and named, kernels over rows against eager and torch.compile.

TFLOP/s of attention count 4 · B · H · S · T · D for the forward, half of it where causal, and 2.5 times that for the backward (Dao et al.,
2022). GB/s count what the algorithm has to move, each operand read once and each result written once, whoever runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from autopar.kernels.attention import attention
from autopar.kernels.cross_entropy import cross_entropy
from autopar.kernels.gated import gated
from autopar.kernels.normalisation import add_norm, norm
from autopar.kernels.rotary import rotary
from autopar.kernels.softmax import softmax
from benchmarks.gpu_accuracy import EPS, turned
from benchmarks.gpu_case import Case, Contestants, Place, Row, Work, race, seconds_of

BF16, ITEMSIZE = torch.bfloat16, 2
# Tokens of a batch and the width of its heads together, whatever the length: FlashAttention's setting. First what matters most.
NUM_TOKENS, WIDTH = 16_384, 2_048
LENGTHS, SIZES = (4_096, 16_384, 1_024, 2_048, 8_192), (128, 64)
# Where scores are few enough to be in memory, and where a compile of some seconds is worth it.
MATH_LENGTHS, FLEX_LENGTHS = (1_024, 2_048), (4_096, 16_384)
# Elements of a tensor of rows: four times the level-2 cache of an H200.
ROW_ELEMENTS = 1 << 27
COLUMNS = (4_096, 262_144, 1_024, 16_384, 65_536)
VOCABULARIES = (128_256, 32_000, 262_144)
COPY_ELEMENTS, MATMUL_SIZE = 1 << 31, 8_192

Function = Callable[..., Tensor]


def speed_cases(place: Place) -> list[Case]:
    """The ceilings, then what matters most."""
    return [Case("speed", "ceilings", partial(_ceilings, place)), *attention_cases(place), *row_cases(place)]


def _ceilings(place: Place, only_compile: bool) -> list[Row]:
    """Device copy, bytes read and written, and a bf16 matrix product of random numbers."""
    if only_compile:
        return []
    elements, size = (1 << 16, 64) if place.tiny else (COPY_ELEMENTS, MATMUL_SIZE)
    source = torch.ones(elements, dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    copy = seconds_of(place, lambda _: target.copy_(source))
    left, right = (place.draw(size, size, dtype=BF16) for _ in range(2))
    matmul = seconds_of(place, lambda _: left @ right)
    return [
        {"case": "copy", "who": "torch", "direction": "forward", "ms": copy * 1e3, "GB/s": 2 * elements / copy / 1e9},
        {"case": "matmul", "who": "torch", "direction": "forward", "ms": matmul * 1e3, "TFLOP/s": 2 * size**3 / matmul / 1e12},
    ]


# ---- attention


@dataclass(frozen=True)
class Attention:
    """Self-attention of [B, H, S, D]."""

    size: int
    length: int
    is_causal: bool
    num_tokens: int
    width: int

    def __str__(self) -> str:
        return f"attention {self.size} {'causal' if self.is_causal else 'full'} {self.length}"

    @property
    def heads(self) -> int:
        return self.width // self.size

    def work(self) -> Work:
        forward = 4.0 * self.num_tokens * self.width * self.length / (2 if self.is_causal else 1)
        return Work("TFLOP/s", forward, 2.5 * forward)

    def operands(self, place: Place) -> tuple[Tensor, ...]:
        shape = (self.num_tokens // self.length, self.length, self.heads, self.size)
        return tuple(place.draw(*shape, dtype=BF16).transpose(1, 2).requires_grad_() for _ in range(3))

    def contestants(self, place: Place) -> Contestants:
        options: dict[str, Any] = {"is_causal": self.is_causal, "scale": self.size**-0.5, "soft_cap": 0.0, "window": 0}
        options |= {"keep_below": 0, "keep_scale": 1.0, "implementation": "triton"}
        found: dict[str, Function | None] = {"ours": lambda q, k, v: attention(q, k, v, *[None] * 6, **options)[0]}
        for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
            found[name] = partial(self._forced, backend) if place.on_gpu else None
        if self.length in FLEX_LENGTHS or place.tiny:
            found["flex"] = self._flex(place) if place.on_gpu else None
        if self.length in MATH_LENGTHS or place.tiny:
            found["math"] = partial(self._forced, SDPBackend.MATH)
            found["compiled"] = compiled(place, self._written_out)
        return found

    def _forced(self, backend: SDPBackend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)

    def _written_out(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query @ key.mT * self.size**-0.5
        if self.is_causal:
            later = torch.ones(self.length, self.length, dtype=torch.bool, device=query.device).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        return scores.softmax(-1) @ value

    def _flex(self, place: Place) -> Function:
        def sees(batch: Tensor, head: Tensor, s: Tensor, t: Tensor) -> Tensor:
            return t <= s

        blocks = create_block_mask(sees, None, None, self.length, self.length, place.device) if self.is_causal else None
        function = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        return lambda query, key, value: function(query, key, value, block_mask=blocks)


def compiled(place: Place, function: Function) -> Function | None:
    """By Inductor; on a CPU nobody waits for its compiler."""
    return torch.compile(function, dynamic=False, fullgraph=True) if place.on_gpu else None


def attention_cases(place: Place) -> list[Case]:
    lengths, sizes, num_tokens, width = ((8,), (16,), 16, 32) if place.tiny else (LENGTHS, SIZES, NUM_TOKENS, WIDTH)
    shapes = [Attention(d, s, is_causal, num_tokens, width) for s in lengths for d in sizes for is_causal in (True, False)]

    def run(shape: Attention, only_compile: bool) -> list[Row]:
        torch.compiler.reset()
        return race(place, {"case": str(shape)}, shape.contestants(place), shape.operands(place), shape.work(), only_compile)

    return [Case("speed", str(shape), partial(run, shape)) for shape in shapes]


# ---- rows


@dataclass(frozen=True)
class Rows:
    """Ours and plain PyTorch on operands [rows, columns], which `operands` draws; so many whole tensors are moved each way."""

    name: str
    operands: Callable[[Place, int, int], tuple[Tensor, ...]]
    ours: Function
    plain: Function
    moved_forward: int
    moved_backward: int
    columns: tuple[int, ...] = COLUMNS


def _one(place: Place, rows: int, columns: int) -> tuple[Tensor, ...]:
    return (place.draw(rows, columns, dtype=BF16).requires_grad_(),)


def _two(place: Place, rows: int, columns: int) -> tuple[Tensor, ...]:
    return *_one(place, rows, columns), *_one(place, rows, columns)


def _weight(place: Place, columns: int) -> Tensor:
    return place.draw(columns, dtype=BF16).requires_grad_()


def _labelled(place: Place, rows: int, columns: int) -> tuple[Tensor, ...]:
    return *_one(place, rows, columns), torch.randint(0, columns, (rows,), device=place.device)


def _turning(place: Place, rows: int, columns: int) -> tuple[Tensor, ...]:
    """Heads of 128 that are rows of `columns` together, and their angles."""
    size = min(128, columns // 2 * 2)
    angles = torch.arange(rows, device=place.device)[:, None] * torch.ones(size, device=place.device)
    heads = place.draw(1, rows, max(columns // size, 1), size, dtype=BF16).transpose(1, 2)
    return heads.requires_grad_(), angles.cos().to(BF16), angles.sin().to(BF16)


def _our_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    log_sum_exp, picked, _ = cross_entropy(logits, labels, torch.arange(logits.shape[-1], device=logits.device))
    return (log_sum_exp - picked).mean()


ROWS = (
    Rows("softmax", _one, lambda x: softmax(x, None, scale=1.0, dtype=x.dtype), lambda x: x.softmax(-1), 2, 3),
    Rows("cross entropy", _labelled, _our_cross_entropy, functional.cross_entropy, 1, 2, VOCABULARIES),
    Rows(
        "layer norm", lambda place, rows, columns: (*_one(place, rows, columns), _weight(place, columns), _weight(place, columns)),
        lambda x, w, b: norm(x, w, b, eps=EPS, centred=True)[0], lambda x, w, b: functional.layer_norm(x, x.shape[-1:], w, b, EPS), 2, 3,
    ),
    Rows(
        "rms norm", lambda place, rows, columns: (*_one(place, rows, columns), _weight(place, columns)),
        lambda x, w: norm(x, w, None, eps=EPS, centred=False)[0], lambda x, w: functional.rms_norm(x, x.shape[-1:], w, EPS), 2, 3,
    ),
    # The sum is a result, too: the residual stream goes on from there.
    Rows(
        "rms norm of a sum", lambda place, rows, columns: (*_two(place, rows, columns), _weight(place, columns)),
        lambda x, y, w: add_norm(x, y, w, None, eps=EPS, centred=False)[0],
        lambda x, y, w: functional.rms_norm(x + y, x.shape[-1:], w, EPS), 4, 3, (4_096,),
    ),
    Rows("silu, gated", _two, lambda g, u: gated(g, u, activation="silu"), lambda g, u: functional.silu(g) * u, 3, 5, (14_336,)),
    Rows(
        "rotary", _turning, lambda x, cos, sin: rotary(x, cos, sin, interleaved=False),
        lambda x, cos, sin: turned(x, cos, sin, False), 2, 2, (4_096,),
    ),
)  # fmt: skip


def row_cases(place: Place) -> list[Case]:
    """By columns: the first of every kernel, then the second."""
    widest = max(len(each.columns) for each in ROWS)
    pairs = [(each, each.columns[number]) for number in range(widest) for each in ROWS if number < len(each.columns)]
    if place.tiny:
        pairs = [(each, 70) for each in ROWS]

    def run(rows: Rows, columns: int, only_compile: bool) -> list[Row]:
        torch.compiler.reset()
        num_rows = 3 if place.tiny else max(ROW_ELEMENTS // columns, 1)
        operands = rows.operands(place, num_rows, columns)
        contestants = {"ours": rows.ours, "eager": rows.plain, "compiled": compiled(place, rows.plain)}
        moved = operands[0].numel() * ITEMSIZE
        work = Work("GB/s", rows.moved_forward * moved, rows.moved_backward * moved)
        return race(place, {"case": f"{rows.name} {columns}"}, contestants, operands, work, only_compile)

    return [Case("speed", f"{rows.name} {columns}", partial(run, rows, columns)) for rows, columns in pairs]
