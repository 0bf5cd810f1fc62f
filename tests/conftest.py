"""Fixtures that all folders share, and what xdist runs together."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.captures import keep_captures
from tests.support.ranks import GlooRanks
from tests.support.stored import FOLDER

_GLOO, _FIXTURE = "gloo", "gloo_ranks"
_TESTS = Path(__file__).parent
_EQUIVALENCE = _TESTS / "equivalence"
# Cases that a quicker one of the same test, or a quicker test, stands for in `make test`.
_SLOW = frozenset((_TESTS / "slow.txt").read_text().splitlines())

# Traces make objects by the million and keep most of them: a fifth of the suite's time was collections.
gc.set_threshold(20_000, 10, 10)


@pytest.fixture(scope="session", autouse=True)
def captures(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One folder of captures for all processes of this run; those of xdist have temporary folders in one."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "captures"
    folder.mkdir(exist_ok=True)
    os.environ[FOLDER] = str(folder)
    keep_captures()


@pytest.fixture(scope="session", autouse=True)
def cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A calibration that a user keeps stays theirs, and is not what tests read."""
    os.environ["AUTOPAR_CACHE"] = str(tmp_path_factory.mktemp("cache"))


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
    """Cases of `slow.txt` are slow; users of the ranks, other tests of `equivalence`, and of the rest those of the default backend, are
    marked so. One group for all users of the ranks, who come first, one for those of Inductor, which takes ten seconds to get ready, and
    one for each file, whose tests share fixtures and caches.

    xdist (--dist loadgroup) runs a group in one process. Before xdist reads the marks.
    """
    for item in items:
        if item.nodeid.removeprefix(f"{_TESTS.name}/") in _SLOW:
            item.add_marker(pytest.mark.slow)
        if _is_on_ranks(item):
            item.add_marker(pytest.mark.ranks)
        elif _EQUIVALENCE in item.path.parents:
            item.add_marker(pytest.mark.equivalence)
        elif _is_of_default_backend(item) and not item.get_closest_marker("equivalence"):
            item.add_marker(pytest.mark.backends)
        if item.get_closest_marker("xdist_group"):
            continue
        uses_inductor = _is_of_default_backend(item) or item.path.name == "test_readme.py"
        group = _GLOO if _is_on_ranks(item) else "inductor" if uses_inductor else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
    # Of Inductor's, the models that ranks compile as well come first: those read its cache.
    items.sort(key=lambda item: (not _is_on_ranks(item), item.path.name != "test_backends.py"))


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stop the ranks when no test for them follows: idle ones poll for every group of ranks they ever made."""
    if _is_on_ranks(item) and (nextitem is None or not _is_on_ranks(nextitem)):
        ranks: GlooRanks | None = getattr(item, "funcargs", {}).get(_FIXTURE)
        if ranks is not None:  # None: the test was skipped
            ranks.stop()


def _is_of_default_backend(item: pytest.Item) -> bool:
    """By its name, or that of its case. What Inductor takes to compile is of another order than what a test of parts takes."""
    return "default_backend" in item.name or "inductor" in item.name


def _is_on_ranks(item: pytest.Item) -> bool:
    """Whether it uses processes of this run, or starts some of its own."""
    group = item.get_closest_marker("xdist_group")
    return _FIXTURE in getattr(item, "fixturenames", ()) or (group is not None and group.args == (_GLOO,))
