"""What crashes, hangs or raises in a child leaves the parent as it was."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from autopar.ops.probing.isolated import isolated


def raising() -> None:
    raise ValueError("in the child")


@pytest.mark.parametrize(
    "function", [os.abort, raising, lambda: os._exit(3), lambda: lambda: 1], ids=["crash", "raise", "exit", "unpicklable"]
)
def test_no_result(function: Callable[[], Any]) -> None:
    assert isolated(function, 30) is None


def test_the_result_comes_back_however_long_it_is() -> None:
    assert isolated(lambda: list(range(100_000)), 30) == list(range(100_000))


def test_a_child_that_does_not_end_is_ended() -> None:
    start = time.monotonic()
    assert isolated(lambda: time.sleep(60), 0.2) is None
    assert time.monotonic() - start < 30


def test_the_child_computes_and_the_parent_is_not_changed() -> None:
    values = torch.zeros(4)

    def function() -> float:
        values.add_(torch.randn(200, 200).mm(torch.randn(200, 200)).abs().sum())
        return float(values[0])

    state = torch.get_rng_state()
    found = isolated(function, 30)
    assert found is not None and found > 0
    assert not values.any() and torch.equal(state, torch.get_rng_state())


def test_no_child_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[int] = []
    fork = os.fork

    def recorded() -> int:
        children.append(fork())
        return children[-1]

    monkeypatch.setattr(os, "fork", recorded)
    isolated(raising, 30)
    with pytest.raises(ChildProcessError):
        os.waitpid(children[0], os.WNOHANG)
