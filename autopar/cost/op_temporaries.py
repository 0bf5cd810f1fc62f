"""What ops of torch's take inside while they run on a CPU, beside operands and results.

Read off the allocator's events (`autopar.runtime.verify.tracked_memory`); for attention in torch's source: a block of scores a thread.
oneDNN orders the operands of a convolution anew, in channels by four and as it likes: within a tenth on a ResNet. It has none in float64:
torch's own make columns of the input there, a window an output (`ConvolutionMM2d.cpp`). All other ops of the zoo take next to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from autopar.kernels.registration import INSIDE

aten = torch.ops.aten


def _flash(args: tuple[Any, ...]) -> int:
    query, key = args[0], args[1]
    rows, columns, width = _block(query), min(key.shape[2], 512), query.shape[3]
    return torch.get_num_threads() * 4 * (rows * columns + 2 * rows + rows * width)


def _flash_backward(args: tuple[Any, ...]) -> int:
    query, key = args[1], args[2]
    rows, columns = _block(query), min(key.shape[2], 512)
    return torch.get_num_threads() * 4 * (2 * rows * columns + rows)


def _block(query: torch.Tensor) -> int:
    length = query.shape[2]
    return min(length, 256 if length >= 768 else 64 if length >= 192 else 32)


def _convolution(args: tuple[Any, ...]) -> int:
    x, weight, groups = *args[:2], args[8]
    if x.dtype == torch.float64 and not args[6]:
        positions = math.prod(_positions(x, weight, *args[3:6]))
        result = x.shape[0] * weight.shape[0] * positions * x.element_size()
        columns = _columns(x, weight, positions, *args[3:6])
        return columns if groups == 1 else max(columns + x.nbytes // groups, result)
    return _ordered(args[0]) + args[1].nbytes if args[8] == 1 else 0


def _convolution_backward(args: tuple[Any, ...]) -> int:
    gradient, x, weight, groups = *args[:3], args[9]
    if x.dtype == torch.float64 and not args[7]:
        columns = _columns(x, weight, math.prod(gradient.shape[2:]), *args[4:7]) if args[-1][1] or x.ndim > 4 else 0
        return columns if groups == 1 else max(columns + (x.nbytes + gradient.nbytes) // groups, x.nbytes if args[-1][0] else 0)
    if groups > 1:  # each group's weight in blocks of sixteen channels by sixteen
        blocks = [math.ceil(size / 16) * 16 for size in (weight.shape[0] // groups, weight.shape[1])]
        return groups * math.prod(blocks) * math.prod(weight.shape[2:]) * weight.element_size() + weight.nbytes
    return _ordered(x) + (max(gradient.nbytes, weight.nbytes) if args[-1][0] else weight.nbytes)


def _columns(x: torch.Tensor, weight: torch.Tensor, positions: int, stride: list[int], padding: list[int], dilation: list[int]) -> int:
    """Of the windows of one group, of one sample after the other where they have gaps."""
    if {*weight.shape[2:], *stride} == {1} and not any(padding) and x.ndim < 5:
        return 0  # the input is its windows
    samples = x.shape[0] if set(dilation) == {1} else 1
    return samples * weight[0].numel() * positions * x.element_size()


def _positions(x: torch.Tensor, weight: torch.Tensor, stride: list[int], padding: list[int], dilation: list[int]) -> list[int]:
    dims = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    return [(size + 2 * pad - gap * (kernel - 1) - 1) // step + 1 for size, kernel, step, pad, gap in dims]


def _ordered(x: torch.Tensor) -> int:
    return x.nbytes // max(x.shape[1], 1) * 4 * math.ceil(x.shape[1] / 4)


# Bytes by the op, of its arguments.
_INSIDE: dict[Any, Callable[[tuple[Any, ...]], int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _flash,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _flash_backward,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
}


def temporary_bytes(op: Any, args: tuple[Any, ...]) -> int:
    """Of a call of `op`; 0 of one that is not known to take any, and off a CPU."""
    if op in INSIDE:
        return INSIDE[op](*args) if next(each for each in args if each is not None).device.type == "cpu" else 0
    found = _INSIDE.get(op)
    return 0 if found is None or args[0].device.type != "cpu" else found(args)
