"""Collections pause and go on as they were."""

from __future__ import annotations

import gc

import pytest

from autopar.driver.garbage import collection_paused


@pytest.fixture(autouse=True)
def enabled() -> None:
    gc.enable()


def test_collections_go_on_after_an_error() -> None:
    with pytest.raises(RuntimeError), collection_paused():
        assert not gc.isenabled()
        raise RuntimeError
    assert gc.isenabled()


def test_who_has_paused_them_finds_them_paused() -> None:
    gc.disable()
    with collection_paused():
        pass
    paused = not gc.isenabled()
    gc.enable()
    assert paused


def test_pauses_nest() -> None:
    with collection_paused():
        with collection_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
