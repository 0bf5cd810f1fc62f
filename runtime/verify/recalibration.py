"""What a profile says of the hardware: the cluster that a program was priced by, each of its speeds times one number.

    contractions   FLOP/s, over the fragments of a rank, by least squares of relative errors
    the rest       memory bandwidth and launches, likewise
    links          latency, call and bandwidth of an axis, by the collectives over it whose end is known

`autopar.calibrate` measures ops and messages of all sizes, and sees shapes; this sees the ones that a step is made of, and nothing else.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from autopar.cost.hardware.cluster import Cluster
from autopar.cost.hardware.device import Device
from autopar.cost.hardware.links import Link, Protocol
from autopar.cost.model import CostModel, is_view
from autopar.errors import AutoparError
from autopar.ir.instructions import Copy, Launch, Receive, Run, Send, Wait
from autopar.ir.mesh import MICROBATCHES, parent
from autopar.pipeline.fragment_prices import fragment_seconds
from autopar.runtime.verify.profile import Profile

# Fragments that take less than this share of the compute are not looked at: what they take is calls.
_NOTABLE = 0.01
# How much two numbers that fragments cannot tell apart are drawn to their common one: a tenth of what one fragment weighs.
_DRAWN = 0.1


def recalibrated(profile: Profile) -> Cluster:
    """The cluster that `profile`'s program was priced by, with speeds that explain what was measured. On virtual ranks links stay as they
    are. Raises `AutoparError` for a program that was not priced."""
    if profile.cost is None:
        raise AutoparError("this profile is of a program without prices, so that there is nothing to correct; use autopar.calibrate(mesh)")
    cluster = profile.cost.cluster
    links = dict(cluster.links) if profile.is_virtual else {**dict(cluster.links), **_links(profile, profile.cost)}
    return replace(cluster, device=_device(profile, profile.cost), links=tuple(links.items()))


def _device(profile: Profile, cost: CostModel) -> Device:
    device = cost.cluster.device
    contractions, rest = _slower(profile, cost)
    return replace(
        device,
        flops=tuple((dtype, rate / contractions) for dtype, rate in device.flops),
        memory_bandwidth=device.memory_bandwidth / rest,
        launch_seconds=device.launch_seconds * rest,
        source=_source(profile),
    )


def _slower(profile: Profile, cost: CostModel) -> tuple[float, float]:
    """How many times as long as on paper contractions take, and all else that fragments do."""
    measured = _undisturbed(profile)
    notable = [name for name, seconds in measured.items() if seconds >= _NOTABLE * sum(measured.values())]
    paper = np.array([_on_paper(profile, cost, name) for name in notable])
    seconds = np.array([measured[name] for name in notable])
    common = float(seconds.sum() / paper.sum()) if paper.sum() else 1.0
    rows = np.vstack([paper / seconds[:, None], _DRAWN / common * np.eye(2)])
    found = np.linalg.lstsq(rows, np.array([1.0] * len(notable) + [_DRAWN] * 2), rcond=None)[0]
    contractions, rest = (float(each) for each in found)
    return (contractions, rest) if contractions > 0 and rest > 0 else (common, common)


def _undisturbed(profile: Profile) -> dict[str, float]:
    """The median seconds of each fragment while nothing was under way, which on a CPU slows it down; of one that never runs so, all."""
    alone, beside = dict[str, list[float]](), dict[str, list[float]]()
    for step in profile.steps:
        for rank, row in step.items():
            schedule, under_way = profile.program.schedule_of(rank), set[str]()
            for each in row:
                instruction = schedule.instructions[each.number]
                if isinstance(instruction, Run):
                    (beside if under_way else alone).setdefault(instruction.fragment, []).append(each.seconds)
                elif isinstance(instruction, Wait):
                    under_way.discard(instruction.target)
                elif isinstance(instruction, (Launch, Copy, Send, Receive)):
                    under_way.add(instruction.name)
    return {name: statistics.median(seconds) for name, seconds in (beside | alone).items()}


def _on_paper(profile: Profile, cost: CostModel, name: str) -> tuple[float, float]:
    """Seconds of a fragment: those of its contractions, and the rest."""
    nodes = [node for node in profile.program.fragments[name].module.graph.nodes if node.op == "call_function"]
    contractions = sum(cost.local_contraction(node) for node in nodes if not is_view(node))
    return contractions, sum(cost.local(node).seconds for node in nodes) - contractions


def _links(profile: Profile, cost: CostModel) -> Mapping[str, Link]:
    """By axis of the user's the link over it, as far as collectives over that axis alone were waited for."""
    measured: dict[str, list[tuple[Launch, float]]] = {}
    for launch, seconds in profile.flights():
        along = {parent(axis) for axis in launch.axes if axis != MICROBATCHES}
        if len(along) == 1 and not launch.node_size:  # of what goes by node a link over the axis is no part
            measured.setdefault(next(iter(along)), []).append((launch, seconds))
    found: dict[str, Link] = {}
    for axis, flights in measured.items():
        base = dict(cost.cluster.links).get(axis) or cost.cluster.link(cost.mesh.ranks, flights[0][0].axes)
        # As one link over all of the axis, which is what it will be.
        alone = replace(cost.cluster, links=((axis, base), *((name, link) for name, link in cost.cluster.links if name != axis)))
        price = fragment_seconds(profile.program, CostModel(alone, cost.mesh))
        ratio = sum(seconds for _, seconds in flights) / sum(price(launch) for launch, _ in flights)
        found[axis] = _times(base, ratio, _source(profile))
    return found


def _times(link: Link, ratio: float, source: str) -> Link:
    """Where all takes `ratio` times as long."""

    def slower(protocol: Protocol | None) -> Protocol | None:
        return None if protocol is None else Protocol(protocol.latency_seconds * ratio, protocol.bytes_per_second / ratio)

    return replace(
        link,
        latency_seconds=link.latency_seconds * ratio,
        bytes_per_second=link.bytes_per_second / ratio,
        call_seconds=link.call_seconds * ratio,
        small=slower(link.small),
        in_switch=slower(link.in_switch),
        source=source,
    )


def _source(profile: Profile) -> str:
    return f"corrected by a profile of {len(profile.steps)} steps"
