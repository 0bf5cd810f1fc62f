"""Empties each `functools.lru_cache` in which a trace has left fake tensors, which later calls of the model would be given."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Generator, Iterable
from typing import Any
from weakref import WeakSet

import torch

from autopar._torch import is_fake
from autopar.driver.garbage import is_frozen_by_us

_CACHE: Any = type(functools.lru_cache(lambda: None))


@contextlib.contextmanager
def caches_kept_clean() -> Generator[None]:
    """Empty each `functools.lru_cache` that was given a fake tensor as a result when the context ends.

    Models keep tables of positions in such caches (Beit's relative positions): after a run on fake tensors the model itself
    would compute with what has no values. Other caches are left alone.
    """
    before = {cache: cache.cache_info() for cache in _every.known}  # those that nobody knows yet count as asked
    try:
        yield
    finally:
        for cache in _every.caches():
            info = cache.cache_info()
            # A cache that nobody asked was given nothing, one that is empty holds nothing; ours hold no tensors, and grow large.
            if info.currsize and info != before.get(cache) and not str(getattr(cache, "__module__", "")).startswith("autopar."):
                if _holds_fakes(gc.get_referents(cache)):
                    cache.cache_clear()


class _Every:
    """All caches there are. To find them, every object of the process is looked at: a tenth of a second and more."""

    def __init__(self) -> None:
        self.known = WeakSet[Any]()
        self._others = -1

    def caches(self) -> list[Any]:
        # Each cache holds one reference to its type, and so do few others, always the same ones.
        if sys.getrefcount(_CACHE) - len(self.known) != self._others:
            self.known = WeakSet(found for found in _referrers(_CACHE) if type(found) is _CACHE)
            self._others = sys.getrefcount(_CACHE) - len(self.known)
        return list(self.known)


def _referrers(of: object) -> list[Any]:
    """Frozen objects too (a compile freezes what was there before it), at which `gc.get_referrers` does not look."""
    is_frozen = is_frozen_by_us() or gc.get_freeze_count() > 0  # the count looks at every frozen object
    if is_frozen:
        gc.unfreeze()
    try:
        return gc.get_referrers(of)
    finally:
        if is_frozen:
            gc.freeze()


_every = _Every()


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
