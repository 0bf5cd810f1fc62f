"""Measuring the hardware that this program runs on: what one device does, and what collectives along each mesh axis take.

Every number is a median. All ranks measure at once, as they would be working in training, and start each
collective together. Rank 0's numbers are everyone's.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from autopar.cost.hardware.cluster import Cluster, Device, built_in_for
from autopar.cost.hardware.device import UPDATE_PASSES
from autopar.cost.hardware.device_fit import fit_rates, run_trials
from autopar.cost.hardware.host import Host
from autopar.cost.hardware.kept import keep
from autopar.cost.hardware.link_fit import Sample, fit_link
from autopar.cost.hardware.links import CommunicationKind
from autopar.errors import MeshError
from autopar.ir.mesh import Mesh

_TRANSFERS: tuple[CommunicationKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
# Those that the runtime does on a CPU in a way of its own.
_BY_THE_RUNTIME = ("all_gather", "reduce_scatter")
_REPEATS = 5
_WORLD = "world"
_MEASURED = "measured by autopar.cost.hardware.calibrate"
# What begins one and waits for it, by its kind, all ranks' memory, this rank's part of that, and the process group.
Runner = Callable[[Any, torch.Tensor, torch.Tensor, Any], Callable[[], object]]


@dataclass(frozen=True)
class _Sizes:
    """How large the trials are. `messages` has bytes and how often a collective runs between two looks at the clock."""

    matmul: tuple[int, ...]
    copy_bytes: int
    messages: tuple[tuple[int, int], ...]
    dtypes: tuple[torch.dtype, ...]


_ON_CPU = _Sizes(
    (256, 512, 1024),
    64 << 20,
    ((4 << 10, 1), (64 << 10, 1), (256 << 10, 1), (1 << 20, 1), (8 << 20, 1), (32 << 20, 1)),
    (torch.bfloat16, torch.float32, torch.float64),
)
_ON_CUDA = _Sizes(
    (2048, 4096, 8192),
    1 << 30,
    ((4 << 10, 20), (64 << 10, 20), (512 << 10, 20), (4 << 20, 10), (32 << 20, 5), (256 << 20, 2)),
    (torch.bfloat16, torch.float16, torch.float32, torch.float64),
)
# Larger matmuls than one that takes this long tell nothing new.
_LONG_SECONDS = 0.1
_NUM_LAUNCHES = 1000
_TINY = 8
_NUM_COLLECTIVES = 30
# Elements of a tensor that an optimizer passes over, and how many of them.
_UPDATED, _NUM_UPDATED = 1 << 20, 8
# Between two collectives a CPU does this square product so often, as long as the threads of the library take to fall asleep, and writes so
# many bytes, so that what is sent is in no cache.
_BETWEEN, _TIMES, _WRITTEN = 512, 4, 16 << 20
# What runs beside a collective is so much longer than it, by what one of so many products takes.
_LONGER, _TRIED = 2.0, 20


def calibrate(
    mesh: Any = None, path: str | Path | None = None, measure_host: Callable[[], Host] = Host, on_cpu: Runner | None = None
) -> Cluster:
    """The cluster that this process runs on, measured; written as YAML to `path`, where given. `measure_host` says what the program that
    drives a CPU takes (`autopar.doors.calibrate`), but for what is measured here of it. By `on_cpu` ranks of a CPU gather and scatter
    (`autopar.runtime.execute.distributed`), in place of torch's own collectives.

    Call it on every rank of `torch.distributed` with the same DeviceMesh (named axes), all ranks of the world on it:
    links are then measured along each axis. Without a mesh the whole world is one group. In a process without
    `torch.distributed` the device alone is measured; links that were not measured are a built-in cluster's, and their source
    says so. All ranks get the same cluster. Takes seconds. What was measured is kept on this machine: `explain()` says seconds by it.

    Raises `MeshError` for a mesh without names, of virtual ranks, or of a part of the world.
    """
    axes = _axes(mesh)
    device = _device(mesh)
    sizes = _ON_CUDA if device.type == "cuda" else _ON_CPU
    hosts = _hosts()
    measured = _measure_device(device, sizes, ranks_on_host=hosts.count(socket.gethostname()))
    samples = {name: _measure_links(group, device, sizes, measured.launch_seconds, on_cpu) for name, group in axes.items()}
    busy = {name: _measure_busy(group, device, sizes) for name, group in axes.items()}
    if device.type == "cpu":  # elsewhere kernels run meanwhile, and hide what the host takes
        measured = replace(measured, host=_measure_host(measure_host(), axes.values(), device))
    cluster = cluster_of(measured, samples, Mesh.of(mesh) if mesh is not None else None, hosts, busy)
    cluster = _from_first(cluster, device)
    write(cluster, path, device.type)
    return cluster


def write(cluster: Cluster, path: str | Path | None, kept_for: str | None) -> None:
    """By the first process: to `path`, where given, and to this machine's own file for devices of a type, where said."""
    if _is_distributed() and dist.get_rank() != 0:
        return
    if kept_for is not None:
        keep(cluster, kept_for)
    if path is not None:
        cluster.to_yaml(path)


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _axes(mesh: Any) -> dict[str, Any]:
    """The process group of each axis with several ranks, by the axis's name."""
    if mesh is None:
        return {_WORLD: dist.group.WORLD} if _is_distributed() and dist.get_world_size() > 1 else {}
    described = Mesh.of(mesh)
    if isinstance(mesh, Mesh) or not _is_distributed():
        raise MeshError(f"the ranks of the mesh ({described}) are virtual and have no links to measure; call calibrate() without a mesh")
    if described.size != dist.get_world_size():
        raise MeshError(f"the mesh ({described}) has {described.size} ranks, the world {dist.get_world_size()}; calibrate needs all on it")
    return {name: mesh.get_group(name) for name, size in described.axes if size > 1}


def _device(mesh: Any) -> torch.device:
    if mesh is not None:
        kind = mesh.device_type
    elif _is_distributed():
        kind = "cuda" if "nccl" in dist.get_backend_config() and torch.cuda.is_available() else "cpu"
    else:
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")


def _hosts() -> list[str]:
    """The host of every rank, in their order."""
    if not _is_distributed():
        return [socket.gethostname()]
    hosts = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    return hosts


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _start_together(device: torch.device) -> None:
    """All ranks; on a CPU some products later, as a collective follows compute in a program and finds no thread awake for it."""
    if _is_distributed():
        dist.all_reduce(torch.zeros(1, device=device))
    if device.type == "cpu":
        _compute_between()
    _synchronise(device)


def _compute_between() -> None:
    square = torch.ones(_BETWEEN, _BETWEEN)
    for _ in range(_TIMES):
        square.mm(square)
    torch.ones(_WRITTEN, dtype=torch.uint8)


def _seconds(run: Callable[[], Any], device: torch.device, count: int, together: bool = False) -> float:
    """Median seconds of one `run`, of which `count` follow each other unwaited for; once to warm up. `together`: all ranks at once."""
    run()
    trials: list[float] = []
    for _ in range(_REPEATS):
        if together:
            _start_together(device)
        else:
            _synchronise(device)
        start = time.perf_counter()
        for _ in range(count):
            run()
        _synchronise(device)
        trials.append((time.perf_counter() - start) / count)
    return median(trials)


def _measure_device(device: torch.device, sizes: _Sizes, ranks_on_host: int) -> Device:
    _start_together(device)
    tiny = torch.zeros(_TINY, device=device)
    launch = _seconds(lambda: tiny.add_(1.0), device, _NUM_LAUNCHES)
    source = torch.empty(sizes.copy_bytes, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    bandwidth = 2 * sizes.copy_bytes / _seconds(lambda: target.copy_(source), device, 1)
    flops = {dtype: _matmul_flops(device, dtype, sizes.matmul) for dtype in sizes.dtypes}
    if device.type == "cuda":
        name, memory = torch.cuda.get_device_name(device), float(torch.cuda.get_device_properties(device).total_memory)
    else:
        name, memory = "cpu", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks_on_host
        rates = fit_rates(run_trials(torch.float32, device, dist.get_rank() if _is_distributed() else 0))
        if rates is not None:
            flops = {dtype: rate * rates.flops / flops[torch.float32] for dtype, rate in flops.items()}
            bandwidth, launch = rates.memory_bandwidth, rates.launch_seconds
    named = tuple((str(dtype).removeprefix("torch."), rate) for dtype, rate in flops.items())
    return Device(name, named, memory, bandwidth, launch, f"{_MEASURED}, {ranks_on_host} rank(s) on a host, torch {torch.__version__}")


def _matmul_flops(device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...]) -> float:
    """FLOP/s of the best of some square matmuls."""
    best = 0.0
    for size in sizes:
        left = torch.ones(size, size, dtype=dtype, device=device)
        product = torch.empty_like(left)
        seconds = _seconds(lambda left=left, product=product: torch.mm(left, left, out=product), device, 1)
        best = max(best, 2 * size**3 / seconds)
        if seconds > _LONG_SECONDS:
            break
    return best


def _measure_host(host: Host, groups: Iterable[Any], device: torch.device) -> Host:
    """`host` with what a launch takes of its thread, along the dearest axis, and how quickly an optimizer passes over large tensors."""
    launches = [_launch_seconds(group, device) for group in groups]
    _start_together(device)
    return replace(host, launch_seconds=max(launches, default=0.0), update_bandwidth=_update_bandwidth(device), source=_MEASURED)


def _launch_seconds(group: Any, device: torch.device) -> float:
    """CPU time of the thread that launches an all-reduce of a few bytes after compute, and waits for it: blocked it takes none."""
    few, trials = torch.zeros(_TINY, device=device), list[float]()
    for _ in range(_NUM_COLLECTIVES):
        _compute_between()  # one right after another takes a quarter
        start = time.thread_time()
        work = dist.all_reduce(few, group=group, async_op=True)
        assert work is not None
        work.wait()
        trials.append(time.thread_time() - start)
    return median(trials)


def _update_bandwidth(device: torch.device) -> float:
    """Bytes a second of a fused AdamW over tensors that no cache holds: what updates are priced by."""
    tensors = [torch.nn.Parameter(torch.ones(_UPDATED, device=device)) for _ in range(_NUM_UPDATED)]
    for each in tensors:
        each.grad = torch.ones_like(each)
    optimizer = torch.optim.AdamW(tensors, fused=True)
    return UPDATE_PASSES * sum(each.nbytes for each in tensors) / _seconds(optimizer.step, device, 1)


def _measure_links(group: Any, device: torch.device, sizes: _Sizes, launch_seconds: float, on_cpu: Runner | None) -> list[Sample]:
    """Every collective at every size over the ranks of `group`; the groups along an axis work at the same time."""
    num_ranks = dist.get_world_size(group)
    samples: list[Sample] = []
    for num_bytes, count in sizes.messages:
        part = torch.zeros(max(num_bytes // torch.float32.itemsize // num_ranks, 1), device=device)
        whole = torch.zeros(part.numel() * num_ranks, device=device)
        for transfer in _TRANSFERS:
            runner = on_cpu if on_cpu is not None and device.type == "cpu" and transfer in _BY_THE_RUNTIME else _runner
            seconds = _seconds(runner(transfer, whole, part, group), device, count, together=True)
            sizes_bytes = _local_bytes(transfer, whole.nbytes, part.nbytes)
            # The launch is priced apart.
            samples.append(Sample(transfer, num_ranks, *sizes_bytes, max(seconds - launch_seconds, seconds / 10)))
    return samples


def _measure_busy(group: Any, device: torch.device, sizes: _Sizes) -> float:
    """By how much of its time an all-reduce makes products slower that run meanwhile, which take longer than it."""
    whole = torch.zeros(sizes.messages[-1][0] // torch.float32.itemsize, device=device)
    square = torch.ones(sizes.matmul[0], sizes.matmul[0], device=device)

    def multiply(times: int) -> None:
        for _ in range(times):
            square.mm(square)

    def both(times: int) -> None:
        work = dist.all_reduce(whole, group=group, async_op=True)
        multiply(times)
        assert work is not None
        work.wait()

    alone = _seconds(_runner("all_reduce", whole, whole, group), device, 1, together=True)
    one = _seconds(lambda: multiply(_TRIED), device, 1, together=True) / _TRIED
    counts = [0] * dist.get_world_size()
    dist.all_gather_object(counts, math.ceil(_LONGER * alone / one))
    products = _seconds(lambda: multiply(max(counts)), device, 1, together=True)
    return min(max((_seconds(lambda: both(max(counts)), device, 1, together=True) - products) / alone, 0.0), 1.0)


def _local_bytes(transfer: CommunicationKind, whole: float, part: float) -> tuple[float, float]:
    return (part, whole) if transfer == "all_gather" else (whole, part) if transfer == "reduce_scatter" else (whole, whole)


def _runner(transfer: CommunicationKind, whole: torch.Tensor, part: torch.Tensor, group: Any) -> Callable[[], object]:
    if transfer == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if transfer == "all_gather":
        gather = _renamed("all_gather_single", "all_gather_into_tensor")
        return lambda: gather(whole, part, group=group)
    if transfer == "reduce_scatter":
        scatter = _renamed("reduce_scatter_single", "reduce_scatter_tensor")
        return lambda: scatter(part, whole, group=group)
    arrived = torch.empty_like(whole)
    return lambda: dist.all_to_all_single(arrived, whole, group=group)


def _renamed(new: str, old: str) -> Callable[..., Any]:
    """torch 2.13 renamed these and warns of the old names."""
    return getattr(dist, new if hasattr(dist, new) else old)


def cluster_of(
    device: Device, samples: dict[str, list[Sample]], mesh: Mesh | None, hosts: list[str], busy: Mapping[str, float] | None = None
) -> Cluster:
    """What the samples of each axis say: a link for each, one for the axes within a node, one for those that leave it.

    `hosts` is where each rank is, `busy` the share of the device that collectives along an axis take.
    """
    busy = busy or {}
    ranks_per_node = min(Counter(hosts).values())
    built_in = built_in_for(device.name) or Cluster.named("cpu" if device.name == "cpu" else "a100")
    note = f"not measured: as in the built-in cluster {built_in.name}"
    bare = Cluster("calibrated", device, replace(built_in.inner, source=note), replace(built_in.outer, source=note), ranks_per_node)
    bare = replace(bare, copies=built_in.copies)
    described = mesh if mesh is not None else Mesh(((_WORLD, len(hosts)),))
    routes = {name: bare.route(described, (name,)) for name in samples}
    within = [sample for name, each in samples.items() if routes[name].num_nodes == 1 for sample in each]
    between = [name for name in samples if routes[name].num_nodes > 1]
    is_nccl = device.name != "cpu"
    along = tuple(
        (name, replace(fit_link(each, f"{_MEASURED} along {name}", is_nccl), busy=busy.get(name, 0.0))) for name, each in samples.items()
    )
    inner = fit_link(within, f"{_MEASURED} within a node", is_nccl) if within else bare.inner
    inner = replace(inner, busy=max((busy[name] for name in busy if name not in between), default=inner.busy))
    outer = bare.outer
    if between:
        fitted = fit_link([sample for name in between for sample in samples[name]], f"{_MEASURED} between nodes", is_nccl)
        # Of a group with several ranks on a node each has an adapter of its own.
        share = min(routes[name].ranks_on_node for name in between)
        small = fitted.small and replace(fitted.small, bytes_per_second=fitted.small.bytes_per_second / share)
        outer = replace(
            fitted, bytes_per_second=fitted.bytes_per_second / share, small=small, busy=max(busy.get(name, 0.0) for name in between)
        )
    return replace(bare, inner=inner, outer=outer, links=along if mesh is not None else ())


def _from_first(cluster: Cluster, device: torch.device) -> Cluster:
    """Rank 0's cluster, on every rank."""
    if not _is_distributed():
        return cluster
    texts: list[str] = [cluster.to_yaml()]
    dist.broadcast_object_list(texts, src=0, device=device)
    return Cluster.from_text(texts[0], "rank 0's measurements")
