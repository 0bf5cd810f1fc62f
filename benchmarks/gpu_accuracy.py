"""Every kernel of `kernels/gpu` against float64, by FlashAttention's rule: at most twice PyTorch's own error in the same dtype.

Gradients may have three times it. PyTorch's is that of plain ops on the same device, float64 the same ops again. Attention's forms are
in `gpu_attention_accuracy.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from autopar.kernels.cross_entropy import cross_entropy
from autopar.kernels.gated import ACTIVATIONS, bias_activation, gated
from autopar.kernels.normalisation import add_norm, norm
from autopar.kernels.rotary import rotary
from autopar.kernels.softmax import softmax
from benchmarks.gpu_case import Case, Place, Row
from tests.support.kernels.accuracy import FLOOR, GRADIENT_FACTOR, OUTPUT_FACTOR

Function = Callable[..., Sequence[Tensor]]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EPS = 1e-5
# Columns: no power of two, what a tile holds, a little more, a large vocabulary. Few rows, for float64's sake.
COLUMNS = (130, 4096, 16_384, 16_384 + 77, 262_144)
TINY_COLUMNS = (7, 130)
ROWS = 37


def accuracy_cases(place: Place) -> list[Case]:
    columns = TINY_COLUMNS if place.tiny else COLUMNS
    cases = [_case(place, f"softmax {each}", _softmax, each) for each in columns]
    cases += [_case(place, f"norms {each}", _norms, each) for each in columns]
    cases += [_case(place, f"cross entropy {each}", _cross_entropy, each) for each in columns]
    return [*cases, _case(place, "gated", _gated), _case(place, "bias and activation", _bias_activation), _case(place, "rotary", _rotary)]


def _case(place: Place, name: str, checks: Callable[..., list[Row]], *arguments: Any) -> Case:
    def run(only_compile: bool) -> list[Row]:
        return [row for dtype in DTYPES for row in checks(place, dtype, *arguments)]

    return Case("accuracy", f"accuracy: {name}", run)


def compared(kernel: str, what: str, ours: Function, plain: Function, operands: Sequence[Tensor]) -> list[Row]:
    """A row a result and a row a gradient, all operands having one. `ours` and `plain` take the operands, the latter in float64 too."""
    dtype = operands[0].dtype
    results, gradients, arriving = _ran(ours, operands, dtype, None)
    same_results, same_gradients, _ = _ran(plain, operands, dtype, arriving)
    exact_results, exact_gradients, _ = _ran(plain, operands, torch.float64, arriving)
    largest = max((float(each.abs().max()) for each in exact_gradients), default=0.0)
    rows = [
        _judged(f"result {number}", OUTPUT_FACTOR, 0.0, *each)
        for number, each in enumerate(zip(results, same_results, exact_results, strict=True))
    ]
    rows += [
        _judged(f"gradient {number}", GRADIENT_FACTOR, largest, *each)
        for number, each in enumerate(zip(gradients, same_gradients, exact_gradients, strict=True))
    ]
    return [{"kernel": kernel, "what": what, "dtype": str(dtype).removeprefix("torch.")} | row for row in rows]


def _ran(
    function: Function, operands: Sequence[Tensor], dtype: torch.dtype, arriving: Sequence[Tensor] | None
) -> tuple[list[Tensor], list[Tensor], Sequence[Tensor]]:
    """Results, gradients, and what arrived at the results: drawn where it is not given, in the dtype of the operands."""
    leaves = [operand.detach().to(dtype).requires_grad_() for operand in operands]
    results = list(function(*leaves))
    arriving = [torch.randn_like(each, dtype=dtype) for each in results] if arriving is None else arriving
    gradients = torch.autograd.grad(results, leaves, [item.to(each.dtype) for item, each in zip(arriving, results, strict=True)])
    return [each.detach() for each in results], list(gradients), arriving


def _judged(result: str, factor: float, largest: float, ours: Tensor, plain: Tensor, exact: Tensor) -> Row:
    largest = max(largest, float(exact.abs().max()))
    error, theirs = (float((each.double() - exact).abs().max()) for each in (ours, plain))
    allowed = factor * theirs + FLOOR * largest
    return {"result": result, "error": error, "allowed": allowed, "ok": ours.shape == exact.shape and error <= allowed}


# ---- the kernels


def _softmax(place: Place, dtype: torch.dtype, columns: int) -> list[Row]:
    x = place.draw(2, 3, ROWS, columns, dtype=dtype) if columns < max(COLUMNS) else place.draw(1, 1, 3, columns, dtype=dtype)
    flags = torch.rand(x.shape[-2:], device=place.device) > 0.4
    flags[:1] = False  # a row that attends to nothing
    bias = place.draw(*x.shape[-2:], dtype=dtype)

    def plain(x: Tensor, mask: Tensor | None) -> tuple[Tensor]:
        scores = x * 0.3
        if mask is None or mask.dtype != torch.bool:
            return ((scores if mask is None else scores + mask).softmax(-1),)
        return (scores.masked_fill(~mask, torch.finfo(x.dtype).min).softmax(-1).masked_fill(~mask, 0.0),)

    def ours(x: Tensor, mask: Tensor | None) -> tuple[Tensor]:
        return (softmax(x, mask, scale=0.3, dtype=x.dtype),)

    rows = compared("softmax", f"{columns}, added mask", ours, plain, (x, bias))
    for name, mask in (("", None), (", bool mask", flags)):
        rows += compared("softmax", f"{columns}{name}", lambda x, m=mask: ours(x, m), lambda x, m=mask: plain(x, m), (x,))
    return rows


def _norms(place: Place, dtype: torch.dtype, columns: int) -> list[Row]:
    num_rows = ROWS if columns == max(COLUMNS) else 10 * ROWS
    x, residual = (place.draw(num_rows, columns, dtype=dtype) + 0.3 for _ in range(2))
    weight, bias = (place.draw(columns, dtype=dtype) for _ in range(2))

    def plain(total: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if bias is None:
            return functional.rms_norm(total, total.shape[-1:], weight, EPS)
        return functional.layer_norm(total, total.shape[-1:], weight, bias, EPS)

    rows: list[Row] = []
    for kernel, affine in (("rms norm", (weight,)), ("layer norm", (weight, bias))):
        options: dict[str, Any] = {"eps": EPS, "centred": kernel == "layer norm"}

        def ours(x: Tensor, weight: Tensor, bias: Tensor | None = None, options: dict[str, Any] = options) -> tuple[Tensor]:
            return (norm(x, weight, bias, **options)[0],)

        def ours_of_sum(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None, options: dict[str, Any] = options) -> Any:
            return add_norm(x, y, weight, bias, **options)[:2]

        def of_sum(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
            return plain(x + y, weight, bias), x + y

        rows += compared(kernel, f"{columns}", ours, lambda x, w, b=None: (plain(x, w, b),), (x, *affine))
        rows += compared(f"{kernel} of a sum", f"{columns}", ours_of_sum, of_sum, (x, residual, *affine))
    return rows


def _cross_entropy(place: Place, dtype: torch.dtype, columns: int) -> list[Row]:
    logits, classes = place.draw(ROWS, columns, dtype=dtype) * 4, torch.arange(columns, device=place.device)
    labels = torch.randint(0, columns, (ROWS,), device=place.device)

    def plain(logits: Tensor) -> tuple[Tensor, ...]:
        # Ours sums in float32 whatever the logits.
        scores = logits if logits.dtype == torch.float64 else logits.float()
        return scores.logsumexp(-1), scores.gather(-1, labels.unsqueeze(-1)).squeeze(-1), scores.sum(-1)

    rows: list[Row] = []
    for count, what in ((2, ""), (3, ", smoothed")):
        arguments = (lambda x, n=count: cross_entropy(x, labels, classes)[:n], lambda x, n=count: plain(x)[:n], (logits,))
        rows += compared("cross entropy", f"{columns}{what}", *arguments)
    return rows


def _gated(place: Place, dtype: torch.dtype) -> list[Row]:
    gate, up = (place.draw(*((3, 70) if place.tiny else (513, 2304)), dtype=dtype) * 2 for _ in range(2))
    rows: list[Row] = []
    for name, function in ACTIVATIONS.items():
        ours, plain = (lambda g, u, a=name: (gated(g, u, activation=a),)), (lambda g, u, f=function: (f(g) * u,))
        rows += compared("gated", name, ours, plain, (gate, up))
    return rows


def _bias_activation(place: Place, dtype: torch.dtype) -> list[Row]:
    shape = (70, 33) if place.tiny else (4099, 2304)
    x, bias = place.draw(*shape, dtype=dtype), place.draw(shape[1], dtype=dtype)
    rows: list[Row] = []
    for name, function in ACTIVATIONS.items():
        ours, plain = (lambda x, b, a=name: (bias_activation(x, b, activation=a),)), (lambda x, b, f=function: (f(x + b),))
        rows += compared("bias and activation", name, ours, plain, (x, bias))
    return rows


def _rotary(place: Place, dtype: torch.dtype) -> list[Row]:
    rows: list[Row] = []
    length = 5 if place.tiny else 1000
    for size, rotated, interleaved in ((128, 128, False), (80, 24, False), (64, 64, True)):
        x = place.draw(2, length, 4, size, dtype=dtype).transpose(1, 2)
        cos, sin = (place.draw(length, rotated, dtype=dtype) for _ in range(2))

        def ours(x: Tensor, cos: Tensor = cos, sin: Tensor = sin, interleaved: bool = interleaved) -> tuple[Tensor]:
            return (rotary(x, cos, sin, interleaved=interleaved),)

        def plain(x: Tensor, cos: Tensor = cos, sin: Tensor = sin, interleaved: bool = interleaved) -> tuple[Tensor]:
            return (turned(x, cos.to(x.dtype), sin.to(x.dtype), interleaved),)

        rows += compared("rotary", f"{rotated} of {size}{', interleaved' if interleaved else ''}", ours, plain, (x,))
    return rows


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The rotation in plain ops."""
    turning, tail = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    if interleaved:
        other = torch.stack((-turning[..., 1::2], turning[..., ::2]), -1).flatten(-2)
    else:
        other = torch.cat((-turning.chunk(2, -1)[1], turning.chunk(2, -1)[0]), -1)
    return torch.cat((turning * cos + other * sin, tail), -1)
