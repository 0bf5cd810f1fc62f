"""The bytes that levels of ZeRO are published to take are those of captured graphs."""

from __future__ import annotations

import pytest

from benchmarks.zero_bytes import Entry, entries, gigabytes

QUICK = ("7.5B", 64, "Pos+g")
CASES = [
    pytest.param(
        each,
        marks=() if (each.model, each.num_ranks, each.stage) == QUICK else pytest.mark.slow,
        id=f"{each.model}, dp {each.num_ranks}, {each.stage}",
    )
    for each in entries()
]


@pytest.mark.parametrize("entry", CASES)
def test_as_published(entry: Entry) -> None:
    parts = gigabytes(entry)
    assert entry.agrees(sum(parts.values())), f"{entry.printed} GB are printed, here it is {parts}"
