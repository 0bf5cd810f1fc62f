"""`autopar estimate-memory` says what `autopar.estimate_memory` says, and what to change first where that does not fit."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import autopar
from autopar.cli.main import main
from autopar.ir.units import in_bytes
from benchmarks.published_models import GPT
from tests.autopar.cli.test_main import check_plans

MODEL = ["estimate-memory", "--model", f"{__name__}:small", "--batch", "8"]


def small() -> Any:
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    return GPT(96, 4, 64, 4, 32), {"tokens": tokens, "labels": tokens}


def values(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    main([*MODEL, *arguments, "--json"])
    found = json.loads(capsys.readouterr().out)
    if "--cluster" in arguments:
        check_plans(found, frozenset({"largest", "formulas"}))
    return found["plans"][0]


def test_bytes_are_those_of_estimate_memory(capsys: pytest.CaptureFixture[str]) -> None:
    found = values(capsys, "--mesh", "dp=2,tp=2", "--cluster", "4xh100:4", "--zero", "1", "--optimizer", "sgd")
    with torch.device("meta"):
        model, tokens = GPT(96, 4, 64, 4, 32), torch.zeros(8, 32, dtype=torch.int64)
    wanted = autopar.estimate_memory(
        model, {"dp": 2, "tp": 2}, {"tokens": tokens, "labels": tokens}, cluster="4xh100", optimizer="sgd", precision="bf16", zero=1
    )
    assert found["memory_bytes"][0]["total"] == wanted.peak_bytes
    assert found["memory_bytes"][0]["parameters"] == wanted.places[0].kinds["parameters"]
    assert found["fits"] and found["reasons"] == [f"fits into {wanted.limit}, {in_bytes(wanted.margin_bytes)} to spare"]
    assert found["step_seconds"] > 0 and any(item["line"] for item in found["largest"])
    assert "L" in found["formulas"]["sizes"] and "b" in found["formulas"]["saved_bytes"]


def test_what_to_change_is_priced_and_saves_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    whole = values(capsys, "--mesh", "dp=4", "--cluster", "4xh100:4")
    capacity = 0.85 * whole["memory_bytes"][0]["total"]
    main([*MODEL, "--mesh", "dp=4", "--cluster", "4xh100:4", "--memory", str(int(capacity))])
    text = capsys.readouterr().out
    assert "does NOT fit into --memory" in text and "a microbatch keeps, in bytes of a rank: " in text
    assert "change first: " in text and " less, " in text and " a step" in text


def test_without_a_cluster_nothing_is_priced(capsys: pytest.CaptureFixture[str]) -> None:
    found = values(capsys, "--mesh", "pp=2,dp=2")
    assert found["step_seconds"] is None and found["capacity_bytes"] is None and found["fits"] and len(found["memory_bytes"]) == 2
    assert found["num_microbatches"] == 4 and found["microbatch"] == 1


def test_devices_without_a_mesh_get_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    found = values(capsys, "--cluster", "4xh100:4")
    sizes = list(found["mesh"].values())
    assert torch.tensor(sizes).prod() == 4 and found["fits"]
