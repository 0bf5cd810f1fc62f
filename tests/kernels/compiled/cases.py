"""The default configurations of our kernels: calls, on tensors without storage, that between them launch every one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from autopar.kernels.gpu import softmax

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


CASES: dict[str, Case] = softmax_cases()
