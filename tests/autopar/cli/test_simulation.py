"""A plan of a file is clocked again: the pipeline takes what was predicted, and its timeline is one that browsers draw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.cli.main import main
from autopar.cli.simulation import clocked, shares
from autopar.doors.measure_work import measure_work
from autopar.doors.predict import step_of
from autopar.foresight.ranking import plan_values
from autopar.foresight.step import Step
from benchmarks.published_models import GPT, MEGATRON
from tests.autopar.cli.test_main import check_plans


def small() -> Any:
    tokens = torch.zeros(4, 32, dtype=torch.int64)
    return GPT(96, 4, 64, 4, 32), {"tokens": tokens, "labels": tokens}


@pytest.fixture(scope="module")
def work() -> Any:
    with torch.device("meta"):
        model, batch = small()
    return measure_work(model, batch, "4xA100")


def step(work: Any, schedule: str = "1f1b", **changes: Any) -> Step:
    options: dict[str, Any] = {"cluster": "2xA100", "mesh": {"pp": 2, "dp": 2}, "global_batch": 16, "profile": "megatron"}
    return step_of(work, **options | changes, schedule=schedule)


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("zb-h1", 1), ("zb-v", 1), ("interleaved", 2)])
def test_the_timeline_takes_what_was_predicted(work: Any, schedule: str, chunks: int) -> None:
    at = step(work, schedule, num_chunks=chunks)
    values = json.loads(json.dumps(plan_values(at.plan, at.prediction(), 0.0, ())))
    found = clocked(values)
    after = values["seconds"]["gradients"] + values["seconds"]["update"]
    assert after > 0 and max(found.span_seconds) == pytest.approx(values["step_seconds"], rel=0.03)
    for rank, memory in enumerate(found.memory):
        held = values["memory_bytes"][rank]
        assert memory.held_bytes == pytest.approx(held["parameters"] + held["gradients"] + held["optimizer_state"])
    by_class = shares(values["seconds"])
    assert sum(by_class.values()) == pytest.approx(1.0) and by_class["bubble"] > 0 and by_class["exposed_communication"] > 0


def test_a_file_of_plans_gives_a_timeline_of_a_rank_of_each_stage(work: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at = step(work)
    plans = [plan_values(each.plan, each.prediction(), 0.0, ("because",)) for each in (step(work, mesh={"dp": 4}), at)]
    (tmp_path / "plans.json").write_text(json.dumps({"version": 1, "plans": plans}))
    main(["simulate", f"{tmp_path / 'plans.json'}:2", "--trace", str(tmp_path / "trace.json")])
    text = capsys.readouterr().out
    assert "exposed communication" in text and "pp 1: computes" in text
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = [each for each in events if each["ph"] == "X"]
    assert {each["pid"] for each in rows} == {0, 1}
    actions = [each for each in rows if each["name"].startswith("0F") and each["cat"] == "compute"]
    assert len(actions) == at.plan.num_microbatches and {each["name"] for each in rows} >= {"update", "sum of gradients"}
    assert all(each["dur"] > 0 for each in actions)


def test_a_saved_plan_is_simulated_with_its_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with torch.device("meta"):
        model, batch = small()
    options: dict[str, Any] = {"example_inputs": batch, "backend": "eager", "cluster": "4xA100", "pins": MEGATRON}
    parallel = autopar.compile(model, autopar.virtual_mesh(pp=2, tp=2), **options)
    path = tmp_path / "plan.json"
    parallel.plan.save(path)
    arguments = ["simulate", str(path), "--model", f"{__name__}:small", "--cluster", "4xA100", "--global-batch", "4"]
    main([*arguments, "--json", "--trace", str(tmp_path / "trace.json")])
    values = json.loads(capsys.readouterr().out)
    check_plans(values, frozenset({"simulation"}))
    plan = values["plans"][0]
    assert plan["mesh"] == {"pp": 2, "dp": 1, "tp": 2} and len(plan["memory_bytes"]) == 2 and plan["fits"]
    assert plan["seconds"]["collectives"] > 0 and 0 < plan["mfu"] < 1
    assert plan["memory_bytes"][0]["total"] == parallel.memory().places[0].peak_bytes
    assert sum(plan["simulation"]["shares"].values()) == pytest.approx(1.0)
    streams = {
        each["args"]["name"] for each in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if each["name"] == "thread_name"
    }
    assert streams >= {"compute", "tp", "to rank 1"}
    for given, told in (([], "needs the model and the cluster"), (["--model", f"{__name__}:small"], "--cluster, --global-batch")):
        with pytest.raises(SystemExit) as caught:
            main(["simulate", str(path), *given])
        assert caught.value.code == 2 and told in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["explain", str(path)])
    assert "autopar simulate" in capsys.readouterr().err
