"""Collections pause and go on as they were."""

from __future__ import annotations

import gc
import weakref

import pytest

from autopar.driver.garbage import SMALL_PILE, Pile, collection_paused


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


class Ring:
    """A dead one is found by a collection alone."""

    def __init__(self) -> None:
        self.own = self


def test_what_has_piled_up_is_collected_between_passes() -> None:
    old, frozen = Ring(), gc.get_freeze_count()
    before = weakref.ref(old)
    del old
    with collection_paused():
        dead = weakref.ref(Ring())
        pile = Pile()
        pile.collect()
        assert dead() is not None, "too few to look"
        many = [[] for _ in range(2 * SMALL_PILE)]
        pile.collect()
        assert dead() is None and before() is not None, "what was there before is not looked at"
        assert pile.alive > SMALL_PILE and many
        dead = weakref.ref(Ring())
        pile.collect()
        assert dead() is not None
    gc.collect()
    assert before() is None and gc.get_freeze_count() == frozen


def test_where_collections_go_on_nobody_asks_for_more() -> None:
    pile, many = Pile(), [[] for _ in range(2 * SMALL_PILE)]
    pile.collect()
    assert pile.alive == 0 and many
