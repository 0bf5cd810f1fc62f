"""The acceptance run on several GPUs, rehearsed on gloo."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import gpu_multi
from benchmarks.gpu_case import Row
from benchmarks.gpu_features import is_low
from benchmarks.gpu_multi import SIZES, jobs_of, main, measured, summary
from benchmarks.gpu_place import is_good

TINY = replace(SIZES["tiny"], num_ranks=4, layers=4)


def of_this_rank(jobs: list[tuple[str, str]]) -> list[Row]:
    gpu_multi.WARM_UP, gpu_multi.BLOCKS, gpu_multi.STEPS = 2, 1, 1
    torch.set_num_threads(1)
    return [measured(axis, name, TINY, "eager", dist.get_rank()) for axis, name in jobs]


def lines(jobs: list[tuple[str, str]], gloo_ranks: Any, monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    rows = gloo_ranks.run(of_this_rank, jobs)
    monkeypatch.setattr(gpu_multi, "WARM_UP", 2)
    monkeypatch.setattr(gpu_multi, "BLOCKS", 1)
    monkeypatch.setattr(gpu_multi, "STEPS", 1)
    alone = measured("one", "plain torch", replace(TINY, num_ranks=1), "eager", 0)
    return [summary(name, [each[number] for each in rows], alone["losses"]) for number, (_, name) in enumerate(jobs)]


def test_jobs_on_four_ranks_have_the_losses_of_one_process(gloo_ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [("dp", "DDP"), ("pp", "torch 1F1B"), ("zero", "autopar, zero=3"), ("features", "autopar dp, checkpoint")]
    for line in lines(jobs, gloo_ranks, monkeypatch):
        assert not line["error"] and line["off by"] < 1e-5 and line["ms"] > 0, line
        assert is_good(line, torch.float32)


@pytest.mark.slow
def test_every_job(gloo_ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [(axis, name) for axis in (*gpu_multi.AXES, "features") for name in gpu_multi.EVERY_JOB[axis]]
    for line in lines(jobs, gloo_ranks, monkeypatch):
        assert not line["error"] and line["off by"] < (1e-2 if is_low(line["job"]) else 1e-5), line


def test_the_first_peer_runs_twice() -> None:
    assert jobs_of("dp") == ["DDP", "FSDP2", "autopar dp", "DDP, again"]


def test_a_job_that_fails_is_a_line_that_says_why() -> None:
    good = {"seconds": [1.0], "peak": 1, "losses": [1.0]}
    line = summary("autopar tp", [{"error": "no answer"}, {"error": "ValueError: on rank 1"}, good], [1.0])
    assert line["error"] == "ValueError: on rank 1" and math.isnan(line["ms"])
    assert not is_good(line, torch.float32) and is_good(line | {"job": "DDP"}, torch.float32)


@pytest.mark.parametrize(("losses", "holds"), [([1.0, 0.9], True), ([1.0, 0.95], False), ([1.0, math.nan], False)])
def test_other_losses_are_no_success(losses: list[float], holds: bool) -> None:
    """A rank without a loss leaves it to the others; where none has one, nothing holds."""
    rows = [{"seconds": [1.0, 3.0, 2.0], "peak": 2e6, "losses": each} for each in (losses, [math.nan, math.nan])]
    line = summary("autopar pp", rows, [1.0, 0.9])
    assert line["ms"] == 2000 and line["peak MB"] == 2
    assert is_good(line, torch.float32) is holds


def test_too_few_devices(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.device_count() < 2:
        assert main(["--ranks", "2"]) == 2
        assert "need as many devices" in capsys.readouterr().err
