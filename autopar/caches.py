"""Caches of functions that a trace has filled: what they hold would outlive it."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Generator, Iterable
from typing import Any

import torch

from autopar._torch import is_fake, pytree

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
        for cache in [found for found in gc.get_objects() if type(found) is _CACHE]:
            # Ours hold no tensors, and grow large: to look through them at every capture took longer than the capture.
            if not str(getattr(cache, "__module__", "")).startswith("autopar.") and _holds_fakes(gc.get_referents(cache)):
                cache.cache_clear()


def _holds_fakes(referents: Iterable[Any]) -> bool:
    """Results are referents of a bounded cache; an unbounded one keeps them in a dict."""
    direct = list(referents)
    direct += [value for each in direct if type(each) is dict for value in each.values()]
    leaves = (leaf for each in direct if isinstance(each, (torch.Tensor, tuple, list, dict)) for leaf in pytree.tree_leaves(each))
    return any(isinstance(leaf, torch.Tensor) and is_fake(leaf) for leaf in leaves)
