"""What takes long is shown on a terminal, and on nothing else; what is quick is never shown."""

from __future__ import annotations

import io
import sys
import time

import pytest

from autopar.driver import progress as module
from autopar.driver.progress import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def attached(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal in place of standard error; not by a fixture, since pytest puts its own there behind them."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.delenv("RANK", raising=False)
    return stream


def long_ago() -> float:
    return time.perf_counter() - 10


def shown(stream: Terminal, text: str) -> bool:
    """Whether it comes to be shown: another thread writes."""
    for _ in range(3000):
        if text in stream.getvalue():
            return True
        time.sleep(0.01)
    return False


def test_what_takes_long_is_shown_with_what_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = attached(monkeypatch)
    with progress("compiling", long_ago()) as show:
        show("choose shardings")
        assert shown(terminal, "compiling")
        with progress("capturing the model"):
            assert shown(terminal, "autopar  compiling: choose shardings: capturing the model  1")
    assert not module._current and terminal.getvalue().endswith("\x1b[2K")  # the line is gone


def test_what_is_quick_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = attached(monkeypatch)
    with progress("compiling"):
        pass
    assert not terminal.getvalue()


def test_nothing_is_shown_in_a_file_nor_by_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = attached(monkeypatch)
    monkeypatch.setenv("RANK", "1")
    with progress("compiling", long_ago()) as show:
        show("lower")
        time.sleep(0.05)
    assert not terminal.getvalue()
    monkeypatch.delenv("RANK")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress("compiling", long_ago()):
        time.sleep(0.05)
    assert not sys.stderr.getvalue()


def test_an_error_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    attached(monkeypatch)
    with pytest.raises(ValueError, match="broken"), progress("compiling", long_ago()):
        raise ValueError("broken")
    assert not module._current
