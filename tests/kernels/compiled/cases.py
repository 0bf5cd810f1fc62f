"""The default configurations of our kernels: calls, on tensors without storage, that between them launch every one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from autopar.kernels.gpu import normalisation, softmax

BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Case:
    """One call of a module of `autopar/kernels/gpu`; `has_matmul` where every kernel it launches multiplies matrices."""

    module: ModuleType
    call: Callable[[], object]
    has_matmul: bool = False


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def softmax_cases() -> dict[str, Case]:
    def both(columns: int, dtype: torch.dtype, mask: Tensor | None) -> Case:
        def call() -> None:
            x = empty(8, 64, columns, dtype=dtype)
            softmax.backward(x, softmax.forward(x, mask, scale=0.5, dtype=dtype), scale=0.5, dtype=dtype)

        return Case(softmax, call)

    cases = {f"softmax {columns} {dtype}": both(columns, dtype, None) for columns in (77, 1024, 8192, 131072) for dtype in (BF16, FP32)}
    cases |= {f"softmax {softmax.MOST_COLUMNS_HELD} {dtype}": both(softmax.MOST_COLUMNS_HELD, dtype, None) for dtype in (BF16, FP32)}
    for name, dtype in (("bool", torch.bool), ("added", BF16)):
        cases |= {f"softmax {columns} {name} mask": both(columns, BF16, empty(64, columns, dtype=dtype)) for columns in (1024, 131072)}
    return cases


def norm_cases() -> dict[str, Case]:
    def both(columns: int, dtype: torch.dtype, centred: bool, residual: bool) -> Case:
        def call() -> None:
            x, weight = empty(8, 512, columns, dtype=dtype), empty(columns, dtype=dtype)
            bias, residue = weight if centred else None, x if residual else None
            out, total, *rows = normalisation.forward(x, residue, weight, bias, eps=1e-5, centred=centred)
            normalisation.backward(out, residue, total, *rows, weight, centred=centred, has_bias=centred)

        return Case(normalisation, call)

    sizes = (96, 1024, normalisation.MOST_COLUMNS_BACKWARD, normalisation.MOST_COLUMNS_FORWARD, 131072)
    return {
        f"{'layer' if centred else 'rms'} norm {columns} {dtype}{' of a sum' if residual else ''}": both(columns, dtype, centred, residual)
        for columns in sizes
        for dtype, centred, residual in ((BF16, False, True), (BF16, True, True), (FP32, True, True), (BF16, False, False))
    }


CASES: dict[str, Case] = softmax_cases() | norm_cases()
