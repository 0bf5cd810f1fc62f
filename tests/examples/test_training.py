"""The main job: it learns, and its losses agree between plain PyTorch, virtual ranks and real ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# torchrun's own program: the console script may not be on the path of a virtual environment that is not activated.
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
SMALL = ["--layers", "2", "--width", "64", "--heads", "4", "--length", "32", "--batch", "8", "--backend", "aot_eager", "--sample", "20"]


def run_example(name: str, log: Path, *flags: str, launcher: tuple[str, ...] | list[str] = ()) -> tuple[list[float], str]:
    """The losses of `examples/<name>` with these flags, and what it printed."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, *launcher, f"examples/{name}", *flags, "--losses", str(log)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(len(steps)))
    return [step["loss"] for step in steps], done.stdout


def largest_difference(losses: list[float], expected: list[float]) -> float:
    return max(abs(loss - other) for loss, other in zip(losses, expected, strict=True))


@pytest.mark.slow
def test_plain_training_learns_and_repeats_itself(tmp_path: Path) -> None:
    losses, printed = run_example("train_gpt.py", tmp_path / "first", "--single", *SMALL, "--steps", "40")
    assert len(losses) == 40 and abs(losses[0] - 5.545) < 0.1  # ln 256: it knows nothing
    assert losses[-1] < losses[0] - 1.5
    assert "a sample of what it learned" in printed and "import " in printed
    again, _ = run_example("train_gpt.py", tmp_path / "again", "--single", *SMALL, "--steps", "10")
    assert again[0] == losses[0]
    other, _ = run_example("train_gpt.py", tmp_path / "other", "--single", *SMALL, "--steps", "1", "--seed", "1")
    assert other[0] != losses[0]


@pytest.mark.slow
@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("example", ["train_gpt.py", "train_llama.py"])
def test_the_three_ways_to_run_agree(tmp_path: Path, example: str) -> None:
    flags = [*SMALL, "--steps", "50", "--mesh", "dp=2,tp=2"]
    plain, _ = run_example(example, tmp_path / "plain", *flags, "--single")
    virtual, printed = run_example(example, tmp_path / "virtual", *flags)
    assert "a virtual mesh, dp=2 × tp=2" in printed
    assert largest_difference(virtual, plain) <= 1e-4
    real, printed = run_example(example, tmp_path / "real", *flags, launcher=TORCHRUN)
    assert "4 processes, dp=2 × tp=2" in printed
    assert largest_difference(real, plain) <= 1e-4


@pytest.mark.slow
@pytest.mark.xdist_group("gloo")
def test_the_main_job_agrees_at_its_own_size(tmp_path: Path) -> None:
    flags = ["--steps", "50", "--sample", "0"]
    plain, _ = run_example("train_gpt.py", tmp_path / "plain", *flags, "--single")
    assert plain[-1] < plain[0] - 2.0
    virtual, _ = run_example("train_gpt.py", tmp_path / "virtual", *flags)
    assert largest_difference(virtual, plain) <= 1e-4
    real, _ = run_example("train_gpt.py", tmp_path / "real", *flags, launcher=TORCHRUN)
    assert largest_difference(real, plain) <= 1e-4
