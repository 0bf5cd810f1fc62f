"""Fixtures that all folders share, and what xdist runs together."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from tests.support.captures import keep_captures
from tests.support.ranks import GlooRanks

_GLOO, _FIXTURE = "gloo", "gloo_ranks"

# Traces make objects by the million and keep most of them: a fifth of the suite's time was collections.
gc.set_threshold(20_000, 10, 10)


@pytest.fixture(scope="session", autouse=True)
def captures() -> None:
    keep_captures()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For small ops on busy machines: threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def gloo_ranks() -> Iterator[GlooRanks]:
    ranks = GlooRanks()
    yield ranks
    ranks.stop()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One group for all users of the ranks, who come first, and one for each file, whose tests share fixtures and caches.

    xdist (--dist loadgroup) runs a group in one process. Before xdist reads the marks.
    """
    for item in items:
        if item.get_closest_marker("xdist_group"):
            continue
        group = _GLOO if _is_on_ranks(item) else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: not _is_on_ranks(item))


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stop the ranks when no test for them follows: idle ones poll for every group of ranks they ever made."""
    if _is_on_ranks(item) and (nextitem is None or not _is_on_ranks(nextitem)):
        ranks: GlooRanks | None = getattr(item, "funcargs", {}).get(_FIXTURE)
        if ranks is not None:  # None: the test was skipped
            ranks.stop()


def _is_on_ranks(item: pytest.Item) -> bool:
    return _FIXTURE in getattr(item, "fixturenames", ())
