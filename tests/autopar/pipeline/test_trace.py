"""Timelines in the format that Chrome and Perfetto read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.pipeline.cost import PipelineCost
from autopar.pipeline.schedules import zb_h1
from autopar.pipeline.simulate import Event, simulate
from autopar.pipeline.trace import trace, write_trace


def test_a_simulation_beside_a_measurement(tmp_path: Path) -> None:
    simulation = simulate(zb_h1(2, 2), PipelineCost.uniform(2, communication_seconds=0.25, saved_bytes=10.0))
    measured = [Event(0, "compute", "0F0", 0.0, 1.5), Event(1, "compute", "1F0", 1.75, 2.5)]
    path = tmp_path / "trace.json"
    write_trace(path, {"predicted": simulation, "measured": measured})
    items = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]

    names = {item["pid"]: item["args"]["name"] for item in items if item["name"] == "process_name"}
    assert names == {0: "rank 0 predicted", 1: "rank 0 measured", 2: "rank 1 predicted", 3: "rank 1 measured"}
    threads = {(item["pid"], item["tid"]): item["args"]["name"] for item in items if item["name"] == "thread_name"}
    assert threads[0, 0] == "compute" and threads[0, 1] == "to rank 1" and threads[2, 1] == "to rank 0"

    slices = [item for item in items if item["ph"] == "X"]
    assert len(slices) == len(simulation.events) + len(measured)
    first = next(item for item in slices if item["name"] == "1F0" and item["pid"] == 2)
    assert first["ts"] == pytest.approx(1.25e6) and first["dur"] == pytest.approx(1e6)
    assert {item["pid"] for item in slices if item["name"] == "0F0>1"} == {0}
    assert all(isinstance(item["pid"], int) for item in items)


def test_memory_is_a_counter() -> None:
    simulation = simulate(zb_h1(1, 1), PipelineCost.uniform(1, saved_bytes=10.0, weight_saved_bytes=4.0))
    counters = [(item["ts"], item["args"]["bytes"]) for item in trace({"predicted": simulation})["traceEvents"] if item["ph"] == "C"]
    assert counters == [(0, 10), (1e6, 10), (1e6, 10), (2e6, 4), (2e6, 4), (3e6, 0)]
