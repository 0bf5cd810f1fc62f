"""Caches of functions that a trace has filled: what they hold would outlive it."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Generator, Iterable
from typing import Any

import torch

from autopar._torch import is_fake

_CACHE = type(functools.lru_cache(lambda: None))


@contextlib.contextmanager
def caches_kept_clean() -> Generator[None]:
    """Empty each `functools.lru_cache` that has a fake tensor as a result when the context ends.

    Models keep tables of positions in such caches (Beit's relative positions): after a run on fake tensors the model itself
    would compute with what has no values. Other caches are left alone.
    """
    try:
        yield
    finally:
        # What refers to the type of all caches: a fifth of the time of looking at every object there is.
        for cache in gc.get_referrers(_CACHE):
            # Ours hold no tensors, and grow large: to look through them at every capture took longer than the capture.
            if type(cache) is _CACHE and not str(getattr(cache, "__module__", "")).startswith("autopar.") and cache.cache_info().currsize:
                if _holds_fakes(gc.get_referents(cache)):
                    cache.cache_clear()


def _holds_fakes(referents: Iterable[Any]) -> bool:
    """Results are referents of a bounded cache; an unbounded one keeps them in a dict. They may stand in tuples, lists and dicts."""
    pending = [value for each in referents for value in (each.values() if type(each) is dict else (each,))]
    seen = set[int]()  # containers may hold themselves
    while pending:
        value = pending.pop()
        if isinstance(value, torch.Tensor):
            if is_fake(value):
                return True
        elif isinstance(value, (dict, tuple, list)) and id(value) not in seen:
            seen.add(id(value))
            pending += value.values() if isinstance(value, dict) else value
    return False
