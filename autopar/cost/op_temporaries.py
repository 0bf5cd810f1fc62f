"""What ops of torch's take inside while they run on a CPU, beside operands and results.

Read off the allocator's events (`autopar.runtime.verify.tracked_memory`); for attention in torch's source: a block of scores a thread.
oneDNN orders the operands of a convolution anew, in channels by four and as it likes: within a tenth on a ResNet. All other ops of the
zoo take next to nothing.
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
    return _ordered(args[0]) + args[1].nbytes if args[8] == 1 else 0


def _convolution_backward(args: tuple[Any, ...]) -> int:
    gradient, x, weight, groups = *args[:3], args[9]
    if groups > 1:  # each group's weight in blocks of sixteen channels by sixteen
        blocks = [math.ceil(size / 16) * 16 for size in (weight.shape[0] // groups, weight.shape[1])]
        return groups * math.prod(blocks) * math.prod(weight.shape[2:]) * weight.element_size() + weight.nbytes
    return _ordered(x) + (max(gradient.nbytes, weight.nbytes) if args[-1][0] else weight.nbytes)


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
