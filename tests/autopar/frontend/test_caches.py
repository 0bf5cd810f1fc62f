"""Caches that a trace has filled are empty after it; others keep what they hold."""

from __future__ import annotations

import gc
from functools import cache, lru_cache

import torch
from torch import Tensor, nn

import autopar
from autopar._torch import fake_mode
from autopar.frontend.caches import caches_kept_clean


@lru_cache(maxsize=4)
def positions(length: int) -> Tensor:
    return torch.arange(length, dtype=torch.float32)


@cache
def tables(length: int) -> tuple[dict[str, Tensor], int]:
    return {"table": torch.arange(length)}, length


@cache
def numbers(length: int) -> int:
    return length + 1


def test_caches_that_hold_tensors_of_the_trace_are_emptied() -> None:
    for function in (positions, tables, numbers):
        function.cache_clear()
    with caches_kept_clean(), fake_mode():
        positions(3), tables(3), numbers(3)
    assert positions.cache_info().currsize == tables.cache_info().currsize == 0
    assert numbers.cache_info().currsize == 1


def test_caches_of_real_tensors_are_kept() -> None:
    positions.cache_clear()
    kept = positions(5)
    with caches_kept_clean(), fake_mode():
        numbers(5)
    assert positions(5) is kept


def test_caches_made_in_the_trace_or_before_it_are_emptied_wherever_they_are() -> None:
    with caches_kept_clean():
        pass  # the caches of this moment are known
    before = lru_cache(torch.zeros)
    with caches_kept_clean(), fake_mode():
        within = [cache(torch.ones)]
        before(2), within[0](3)
    assert before.cache_info().currsize == within[0].cache_info().currsize == 0


def test_a_cache_that_takes_the_place_of_a_forgotten_one_is_emptied() -> None:
    forgotten = lru_cache(torch.zeros)
    with caches_kept_clean():
        pass
    del forgotten
    instead = lru_cache(torch.zeros)
    with caches_kept_clean(), fake_mode():
        instead(2)
    assert instead.cache_info().currsize == 0


def test_frozen_caches_are_emptied() -> None:
    """A compile freezes what was there before it: the cycle collector finds none of it."""
    frozen = lru_cache(torch.zeros)
    gc.freeze()
    try:
        with caches_kept_clean(), fake_mode():
            frozen(2)
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
    assert frozen.cache_info().currsize == 0


class Positioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight * positions(4)).sum()


def test_a_compiled_model_still_runs_by_itself() -> None:
    positions.cache_clear()
    model, x = Positioned(), torch.ones(8, 4)
    parallel = autopar.compile(model, autopar.virtual_mesh(dp=2), example_inputs=(x,), backend="eager")
    assert model(x).item() == 48.0 and parallel(x).item() == 48.0
