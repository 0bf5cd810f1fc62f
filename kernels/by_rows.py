"""Runs an elementwise computation of several plain ops block by block, so that what is between stays in a core's cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# 128 KiB of float32 for each value between: a few of them fit into the second-level cache of one core.
_BLOCK_ELEMENTS = 1 << 15


def by_rows(function: Callable[..., Sequence[Tensor]], results: Sequence[Tensor], operands: Sequence[Tensor]) -> None:
    """Fill `results`, contiguous, with what `function` makes of `operands`, all of one shape [..., N]; it gets some rows [r, N] at a time.

    What it returns is rounded to the dtypes of `results`; of fake tensors one block is made.

    Fresh memory for each value between would cost more than the arithmetic.
    """
    if results[0].numel() == 0:
        return
    num_columns = results[0].shape[-1] if results[0].dim() else 1
    rows = [each.reshape(-1, num_columns) for each in (*results, *operands)]
    step = max(_BLOCK_ELEMENTS * torch.get_num_threads() // num_columns, 1)
    # Results of a subclass have no values (torch's fake tensors): there a block is asked for what it takes, and all take the same.
    end = rows[0].shape[0] if type(results[0]) is Tensor else 1
    for start in range(0, end, step):
        block = [each[start : start + step] for each in rows]
        for result, value in zip(block, function(*block[len(results) :]), strict=False):
            result.copy_(value)
