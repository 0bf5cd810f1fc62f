"""What attention refuses, when it is traced or runs: by its messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar._torch import fake_mode
from autopar.kernels.attention import attention, attention_backward, attention_mask_gradient
from tests.support.kernels.attention import DROPS, NOTHING, PLAIN


def test_dropout_that_is_not_drawn_yet_traces_and_does_not_run() -> None:
    inputs = [torch.randn(2, heads, length, 8) for heads, length in ((4, 6), (2, 7), (2, 7))]
    with fake_mode():
        out, log_sum_exp = attention(*(torch.empty(item.shape) for item in inputs), *NOTHING, **PLAIN | DROPS)
        assert out.shape == (2, 4, 6, 8) and log_sum_exp.shape == (2, 4, 6)
    message = "needs drop_rows, drop_second and drop_columns to run"
    with pytest.raises(ValueError, match=message):
        attention(*inputs, *NOTHING, **PLAIN | DROPS)
    results = (torch.zeros(2, 4, 6, 8), torch.zeros(2, 4, 6))
    with pytest.raises(ValueError, match=message):
        attention_backward(results[0], None, *inputs, *NOTHING, *results, **PLAIN | DROPS)
    with pytest.raises(ValueError, match=message):
        attention_mask_gradient(results[0], None, *inputs, torch.zeros(6, 7), *NOTHING[1:], *results, **PLAIN | DROPS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": (2, 3, 7, 8)}, "H a multiple of G"),
        ({"value": (2, 2, 6, 8)}, "H a multiple of G"),
        ({"mask": (2, 4, 6, 6)}, r"mask \(2, 4, 6, 6\) does not broadcast to \(2, 4, 6, 7\)"),
        ({"drop_rows": (2, 4, 7, 1)}, r"drop_rows are \(2, 4, 7, 1\), which do not broadcast to \(2, 4, 6, 1\)"),
        ({"drop_second": (6, 7)}, r"drop_second are \(6, 7\), which do not broadcast to \(2, 4, 6, 1\)"),
        ({"drop_columns": (7, 1)}, r"drop_columns are \(7, 1\), not \(7,\)"),
        ({"drop_columns": (1,)}, r"drop_columns are \(1,\), not \(7,\)"),
    ],
)
def test_wrong_shapes_are_refused_when_traced(change: dict[str, tuple[int, ...]], message: str) -> None:
    tensors = {"query": (2, 4, 6, 8), "key": (2, 2, 7, 8), "value": (2, 2, 7, 8), "mask": (6, 7)}
    draws = {"drop_rows": (2, 1, 6, 1), "drop_second": (), "drop_columns": (7,)}
    with fake_mode(), pytest.raises((ValueError, RuntimeError), match=message):
        operands = [torch.empty(change.get(name, shape)) for name, shape in tensors.items()]
        places = [torch.empty(change.get(name, shape), dtype=torch.int64) for name, shape in draws.items()]
        attention(*operands, None, None, *places, **PLAIN | DROPS)


@pytest.mark.parametrize(
    ("missing", "options", "message"),
    [
        ((0,), DROPS, "attention lacks drop_rows: dropout is drawn from drop_rows, drop_second and drop_columns together"),
        ((1, 2), DROPS, "attention lacks drop_second and drop_columns"),
        ((), {}, r"keep_below is 0: draws are in \[0, 2\*\*32\), and it is from 1"),
        ((), {"keep_below": 2**32 + 1}, "keep_below is 4294967297"),
        ((0, 1, 2), {"keep_below": -1}, "keep_below is -1"),
        ((), DROPS | {"implementation": "flash"}, "implementation is 'flash': it is one of 'triton', 'aten'"),
    ],
)
def test_draws_and_options_that_do_not_fit_are_refused_when_traced(missing: tuple[int, ...], options: dict[str, Any], message: str) -> None:
    with torch.device("meta"), pytest.raises((ValueError, RuntimeError), match=message):
        operands = [torch.empty(1, 1, 2, 4)] * 3
        draws = [None if i in missing else torch.zeros((2,) if i == 2 else (), dtype=torch.int64) for i in range(3)]
        attention(*operands, None, None, None, *draws, **PLAIN | options)


def test_draws_of_another_dtype_are_refused_when_traced() -> None:
    with (
        torch.device("meta"),
        pytest.raises((ValueError, RuntimeError), match="drop_columns are of torch.int32: positions are torch.int64"),
    ):
        place = torch.zeros((), dtype=torch.int64)
        columns = torch.zeros(2, dtype=torch.int32)
        attention(*[torch.empty(1, 1, 2, 4)] * 3, None, None, None, place, place, columns, **PLAIN | DROPS)
