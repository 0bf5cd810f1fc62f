"""Rows that wait for each other, done in turn."""

from __future__ import annotations

from autopar.ir.turns import take_turns

# What an item waits for.
NEEDS = {"b": "x", "y": "a", "c": "y"}


def done(rows: dict[str, str]) -> tuple[bool, list[str], dict[str, int]]:
    order: list[str] = []

    def step(who: str, item: str) -> bool:
        ready = NEEDS.get(item) in (None, *order)
        order.extend([item] * ready)
        return ready

    at = dict.fromkeys(rows, 0)
    return take_turns(rows, step, at), order, at


def test_each_runs_until_it_must_wait() -> None:
    assert done({"one": "abc", "two": "xy"}) == (True, ["a", "x", "y", "b", "c"], {"one": 3, "two": 2})


def test_it_ends_where_nobody_can_go_on() -> None:
    assert done({"one": "cab", "two": "xyz"}) == (False, ["x"], {"one": 0, "two": 1})


def test_no_rows_are_at_their_ends() -> None:
    assert take_turns({}, lambda who, item: False, {})
