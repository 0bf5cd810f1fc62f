"""The door to measurements: what the program takes that drives a CPU is measured, too, and is the same on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import autopar
import autopar.cost.hardware.calibrate as measuring
import autopar.doors.calibrate as door
from autopar.cost.hardware.cluster import Cluster, Host
from autopar.cost.hardware.kept import FOLDER


def small(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setenv(FOLDER, str(folder))
    patch.setattr(door, "_LAYERS", 3)
    patch.setattr(door, "_REPEATS", 3)
    patch.setattr(measuring, "_NUM_COLLECTIVES", 3)
    patch.setattr(measuring, "_UPDATED", 1 << 12)


def test_one_process_measures_its_own_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, tmp_path)
    host = door.host_of_runtime()
    assert 0 < host.instruction_seconds < 1e-2 and 0 < host.parameter_seconds < 1e-1 and 0 <= host.update_seconds < 1e-2
    assert host.launch_seconds == 0.0, "there is nobody to talk to"


def measured(folder: str) -> Host:
    with pytest.MonkeyPatch.context() as patch:
        small(patch, Path(folder))
        patch.setattr(measuring, "_measure_device", lambda *_, **__: Cluster.named("cpu").device)
        patch.setattr(measuring, "_measure_links", lambda *_: [measuring.Sample("all_reduce", 4, 1e6, 1e6, 1e-3)])
        patch.setattr(measuring, "_measure_busy", lambda *_: 0.5)
        cluster = autopar.calibrate(path=Path(folder) / "mine.yaml")
    dist.barrier()
    return cluster.device.host


def test_ranks_measure_launches_and_parameters_and_agree(gloo_ranks: Any, tmp_path: Path) -> None:
    hosts = gloo_ranks.run(measured, str(tmp_path))
    assert len(set(hosts)) == 1
    assert Cluster.from_yaml(tmp_path / "mine.yaml").device.host == hosts[0]
    assert 0 < hosts[0].launch_seconds < 1 and 0 < hosts[0].parameter_seconds < 1 and hosts[0].update_bandwidth > 1e6
