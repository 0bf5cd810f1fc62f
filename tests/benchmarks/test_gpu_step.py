"""The acceptance run on one GPU, rehearsed on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_step
from benchmarks.gpu_case import Place
from benchmarks.gpu_step import SIZES, flops_of_a_token, llama, main

ASKED = ["--device", "cpu", "--size", "tiny", "--rounds", "1", "--jobs", "plain, eager", "autopar, eager"]


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_step, "WARM_UP", 1)
    monkeypatch.setattr(gpu_step, "STEPS", 1)


def test_rehearsal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--json", str(tmp_path / "step.json")]) == 0
    found = json.loads((tmp_path / "step.json").read_text())
    assert [row["job"] for row in found["rows"]] == ["plain, eager", "autopar, eager", "plain, eager, again"]
    assert found["verify"] == {} and all(row["off by"] < 1e-5 and row["tokens/s"] > 0 for row in found["rows"])
    assert found["rows"][0]["MFU"] is None and "autopar, eager" in capsys.readouterr().out


def test_other_losses_are_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(model: torch.nn.Module, batch: Any, backend: str) -> Any:
        def call(**batch: Any) -> Any:
            output = model(**batch)
            output.loss = output.loss * 1.01
            return output

        return call

    monkeypatch.setitem(gpu_step.JOBS, "autopar, eager", (scaled, "eager"))
    assert main(ASKED) == 1


def test_flops_of_a_token() -> None:
    size = SIZES["tiny"]
    model = llama(size, Place("cpu"))
    layer = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 64 + 2 * 32
    assert flops_of_a_token(model, size) == 6 * (64 * 32 + 2 * layer + 32) + 12 * 2 * 32 * 16
