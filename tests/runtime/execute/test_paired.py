"""Sums of parts: in one order, rounded once."""

from __future__ import annotations

import pytest
import torch

from autopar.runtime.execute.paired import add


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.complex64])
@pytest.mark.parametrize("number", [2, 3, 5])
def test_a_sum_is_rounded_once(number: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(number)
    parts = [torch.randn(257, generator=generator).mul(8).to(dtype) for _ in range(number)]
    given = [part.clone() for part in parts]
    total = torch.empty_like(parts[0])
    assert add(parts, total) is total
    wide = {torch.bfloat16: torch.float32, torch.float16: torch.float32}.get(dtype, dtype)
    expected = parts[0].to(wide)
    for part in parts[1:]:
        expected = expected + part
    assert torch.equal(total, expected.to(dtype))
    assert all(torch.equal(one, other) for one, other in zip(parts, given, strict=True)), "parts are the sender's"
