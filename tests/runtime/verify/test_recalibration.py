"""Speeds corrected by a profile: what a step took is explained by them, and only what was seen is corrected."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.model import CostModel
from autopar.errors import AutoparError
from autopar.pipeline.exposure import predicted_intervals
from autopar.pipeline.fragment_prices import fragment_seconds, on_paper
from autopar.runtime.verify.profile import Profile

WIDTH = 2048
A100 = Cluster.named("8xa100")
ASSUMED = replace(A100, inner=replace(A100.inner, small=None))  # with one protocol, which one number corrects


class Mixed(torch.nn.Module):
    """Layers of products, and some without, so that fragments differ in what they are made of."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            for _ in range(8 * number):
                x = torch.tanh(x)
        return x.square().mean()


def slower(cluster: Cluster, products: float, rest: float, link: float) -> Cluster:
    device, inner = cluster.device, cluster.inner
    return replace(
        cluster,
        device=replace(
            device,
            flops=tuple((dtype, rate / products) for dtype, rate in device.flops),
            memory_bandwidth=device.memory_bandwidth / rest,
            launch_seconds=device.launch_seconds * rest,
        ),
        inner=replace(
            inner,
            latency_seconds=inner.latency_seconds * link,
            bytes_per_second=inner.bytes_per_second / link,
            call_seconds=inner.call_seconds * link,
        ),
    )


def measured_on(truth: Cluster, is_virtual: bool = False) -> Profile:
    """The profile of a program that was priced by `ASSUMED`, and ran where all is as `truth` says."""
    with torch.device("meta"):
        model, batch = Mixed(), torch.ones(WIDTH, WIDTH)
    parallel = autopar.compile(model, autopar.virtual_mesh(dp=2), backend="eager", cluster=ASSUMED, zero=3, example_inputs=(batch,))
    program = parallel.compiled.schedule
    cost = CostModel(ASSUMED, parallel.compiled.mesh)
    (row,) = predicted_intervals(on_paper(program, CostModel(truth, parallel.compiled.mesh)))
    return Profile(program, ({0: tuple(row), 1: tuple(row)},), is_virtual, fragment_seconds(program, cost), on_paper(program, cost), cost)


def test_what_was_measured_is_explained() -> None:
    truth = slower(ASSUMED, products=6.0, rest=2.0, link=3.0)
    profile = measured_on(truth)
    found = autopar.calibrate(profile=profile)
    for (dtype, rate), (_, true) in zip(found.device.flops, truth.device.flops, strict=True):
        assert rate == pytest.approx(true, rel=0.05), dtype
    assert found.device.memory_bandwidth == pytest.approx(truth.device.memory_bandwidth, rel=0.05)
    assert found.device.launch_seconds == pytest.approx(truth.device.launch_seconds, rel=0.05)
    link = dict(found.links)["dp"]
    assert link.bytes_per_second == pytest.approx(truth.inner.bytes_per_second, rel=0.1)
    assert (found.inner, found.outer, found.ranks_per_node) == (ASSUMED.inner, ASSUMED.outer, 8), "other axes were not seen"
    assert "profile of 1 steps" in found.device.source
    step = on_paper(profile.program, CostModel(found, profile.program.mesh)).step_seconds
    assert step == pytest.approx(on_paper(profile.program, CostModel(truth, profile.program.mesh)).step_seconds, rel=0.05)


def test_a_cluster_that_is_right_stays_as_it_is() -> None:
    found = autopar.calibrate(profile=measured_on(ASSUMED))
    assert found.device.memory_bandwidth == pytest.approx(ASSUMED.device.memory_bandwidth)
    assert dict(found.device.flops) == pytest.approx(dict(ASSUMED.device.flops))


def test_virtual_ranks_say_nothing_of_links_and_are_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "kept"))
    truth = slower(ASSUMED, products=2.0, rest=2.0, link=9.0)
    found = autopar.calibrate(path=tmp_path / "mine.yaml", profile=measured_on(truth, is_virtual=True))
    assert found.links == ASSUMED.links
    assert Cluster.from_yaml(tmp_path / "mine.yaml") == found
    assert not (tmp_path / "kept").exists()


def test_those_of_processes_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    autopar.calibrate(profile=measured_on(ASSUMED))
    assert [each.suffix for each in tmp_path.iterdir()] == [".yaml"]


def test_a_real_profile_corrects_prices_that_are_far_off() -> None:
    """From an A100's to this machine's, which no test knows: only that they are those of a slower one."""
    batch = torch.ones(2, WIDTH)
    parallel = autopar.compile(Mixed(1), autopar.virtual_mesh(dp=2), backend="eager", cluster="a100", example_inputs=(batch,))
    found = autopar.calibrate(profile=parallel.profile(batch))
    assert found.device.memory_bandwidth < Cluster.named("a100").device.memory_bandwidth


def test_what_cannot_be_is_refused() -> None:
    profile = measured_on(ASSUMED)
    with pytest.raises(AutoparError, match=r"leave out one of the two"):
        autopar.calibrate(autopar.virtual_mesh(dp=2), profile=profile)
    with pytest.raises(AutoparError, match="a program without prices"):
        autopar.calibrate(profile=replace(profile, cost=None))


def recalibrates() -> str:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    batch = torch.ones(4, WIDTH)
    parallel = autopar.compile(Mixed(2), mesh, backend="eager", cluster="a100", example_inputs=(batch,))
    found = autopar.calibrate(profile=parallel.profile(batch))
    return found.to_yaml()


def test_all_ranks_find_the_same_cluster(gloo_ranks: Any) -> None:
    first, *others = gloo_ranks.run(recalibrates)
    assert others == [first] * 3 and "profile of 3 steps" in first
