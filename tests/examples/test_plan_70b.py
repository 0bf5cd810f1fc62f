"""The plan for a model too large for this machine."""

from __future__ import annotations

from pathlib import Path

import plan_70b
import pytest

import autopar


def test_it_plans_and_explains_and_keeps_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    plan_70b.main(["--layers", "1", "--mesh", "dp=2", "tp=8", "--sequences", "4", "--plan", str(file)])
    printed = capsys.readouterr().out
    assert "dp=2 × tp=8" in printed and " on 8xH100" in printed and "lm_head.weight" in printed and "[128256@tp, 8192" in printed
    assert autopar.Plan.load(file).parameters["lm_head.weight"]


@pytest.mark.slow
def test_all_eighty_layers(capsys: pytest.CaptureFixture[str]) -> None:
    parallel = plan_70b.plan(80, {"pp": 4, "dp": 2, "tp": 8}, 64, "8xH100")
    summary = parallel.summary()
    assert summary["flops_split"] > 0.99
    assert sum(parameter.numel() for parameter in parallel.parameters()) == 70_553_706_496
