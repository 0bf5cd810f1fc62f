"""Whole models on one GPU, rehearsed on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks import gpu_models
from benchmarks.gpu_case import Place
from benchmarks.gpu_models import checked, every_case, show


def test_a_model_that_holds() -> None:
    (row,) = checked(Place("cpu"), "gpt2, zero 3", "eager", False)
    assert row["ok"] and row["split"] == 1.0 and row["promoted"] < 1e-12
    assert show([row], 1) == 0


def test_a_model_that_does_not_hold_is_shown_with_what_verify_says(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(gpu_models, "TOLERANCE", 0.0)
    (row,) = checked(Place("cpu"), "llama", "eager", False)
    assert not row["ok"] and show([row], 1) == 1 and "llama" in capsys.readouterr().out


def test_every_case_has_a_name_of_its_own() -> None:
    names: Sequence[str] = [case.name for case in every_case(Place("cpu"))]
    assert len(set(names)) == len(names) > 60
