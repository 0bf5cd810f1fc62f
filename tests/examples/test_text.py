"""The data: the same bytes and the same windows on every machine and every rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from text import Windows, read_text


def test_standard_library_is_capped_ordered_and_the_same_each_time() -> None:
    text = read_text(max_bytes=200_000)
    assert text.dtype == torch.uint8 and text.shape == (200_000,)
    assert torch.equal(text, read_text(max_bytes=200_000))
    assert torch.equal(text[:1000], read_text(max_bytes=1000))
    assert b"import" in bytes(text.tolist())


def test_a_text_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_bytes(b"so much depends upon")
    assert bytes(read_text(tmp_path / "own.txt").tolist()) == b"so much depends upon"


def test_an_empty_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(ValueError, match="empty.txt is empty"):
        read_text(tmp_path / "empty.txt")


def test_windows_are_pieces_of_the_text_and_follow_the_seed() -> None:
    text = torch.arange(50, dtype=torch.uint8)
    first, again, other = (Windows(text, num_windows=64, length=5, seed=seed) for seed in (1, 1, 2))
    drawn = first.draw()
    assert drawn.dtype == torch.int64 and drawn.shape == (64, 5)
    assert torch.equal(drawn - drawn[:, :1], torch.arange(5).expand(64, 5))
    assert drawn[:, 0].max() <= 45
    assert torch.equal(drawn, again.draw())
    assert not torch.equal(drawn, other.draw())
    assert not torch.equal(drawn, first.draw())


def test_a_text_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="5 bytes; windows of 5 need at least 6"):
        Windows(torch.zeros(5, dtype=torch.uint8), 1, 5, seed=0)


def test_the_last_batch_of_an_epoch_has_what_is_left() -> None:
    windows = Windows(torch.arange(50, dtype=torch.uint8), num_windows=4, length=5, seed=0, epoch=10)
    assert [len(windows.draw()) for _ in range(6)] == [4, 4, 2, 4, 4, 2]


def test_windows_go_on_where_they_stood() -> None:
    text = torch.arange(50, dtype=torch.uint8)
    first, second = (Windows(text, num_windows=4, length=5, seed=1, epoch=10) for _ in range(2))
    first.draw(), first.draw()
    second.load_state_dict(first.state_dict())
    drawn = [first.draw(), first.draw()]
    assert [len(each) for each in drawn] == [2, 4]
    assert all(torch.equal(each, second.draw()) for each in drawn)
