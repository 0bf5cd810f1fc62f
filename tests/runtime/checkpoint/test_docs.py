"""The script of the documentation reads a checkpoint without autopar."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import autopar
from tests.support.checkpoints import are_equal, parallel_on, share
from tests.support.models.trained import batch

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "checkpoints.md"


def saves(folder: str) -> dict[str, Any]:
    axes = {"dp": 2, "tp": 2}
    parallel = parallel_on(axes, real=True)
    parallel.train_step(**share(batch(0), axes))
    autopar.save(folder, parallel)
    return dict(parallel.full_state_dict())


def test_ten_lines_read_a_checkpoint(gloo_ranks: Any, tmp_path: Path) -> None:
    weights = gloo_ranks.run(saves, str(tmp_path))[0]
    (script,) = re.findall(r"```python\n(import json.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert len([line for line in script.splitlines() if line]) == 11
    found: dict[str, Any] = {}
    exec(script, found)
    assert are_equal(found["read"](tmp_path / "00000001"), weights)
    assert "blocks.0.qkv.0.weight/exp_avg" in found["read"](tmp_path / "00000001", "optimizer")
