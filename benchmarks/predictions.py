"""Steps on paper beside steps on two gloo ranks of one thread each: three models × dp, tp, a pipeline, ZeRO 3.

    python -m benchmarks.predictions
    python -m benchmarks.predictions --sizes small comm --rounds 15 --json predictions.json

Two processes measure this machine (`autopar.calibrate`) before and after the jobs of each size; what a step takes on paper is said from
each of the two files alone, on a mesh of virtual ranks, and `on paper` is their mean: how far the two are apart is what the machine itself
did meanwhile. A step is forward, backward and the update of a fused AdamW. The jobs of a size are alive at once and take turns step by
step; measured is the median of the slower rank's steps. `order` counts, of the pairs of jobs of a size that differ by more than 15 %, those
of which paper and clock agree which is slower. `load` is that of the machine behind the steps of a size: two processes work in turns, so
that more than 2 is others' work.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.cost.model import CostModel
from autopar.pipeline.fragment_prices import on_paper
from autopar.pipeline.report import StepOnPaper
from benchmarks.peer_jobs import SIZES, WORLD_SIZE, Size, Step, batch_of, model_of, options_of, share_of, training_step
from benchmarks.reporting import machine, print_table, write_json

# By name the axis, and what is asked for besides.
JOBS: dict[str, tuple[str, dict[str, Any]]] = {"dp": ("dp", {}), "tp": ("tp", {}), "1F1B": ("pp", {}), "ZeRO 3": ("dp", {"zero": 3})}
_NOTABLE = 0.15


def compiled(name: str, size: Size, mesh: Any, inputs: Any, cluster: str, backend: str) -> autopar.ParallelModule:
    axis, more = JOBS[name]
    options: dict[str, Any] = {"backend": backend, "cluster": cluster, "timeout": 600, **options_of(axis, size), **more}
    return autopar.compile(model_of(size), mesh, example_inputs=inputs, **options)


def predicted(name: str, size: Size, clusters: Sequence[str]) -> list[float]:
    """Seconds of a step on paper, by each of `clusters`; nothing runs. The program is what the first leads to, as ranks run it."""
    found = compiled(name, size, autopar.virtual_mesh(**{JOBS[name][0]: WORLD_SIZE}), batch_of(size), clusters[0], "eager").compiled
    prices = [CostModel(autopar.Cluster.from_yaml(each), found.local.mesh, found.budget.optimizer) for each in clusters]
    return [
        on_paper(found.schedule, cost, has_memory=False).step_seconds + StepOnPaper(found.program, cost, found.order).beside_seconds
        for cost in prices
    ]


def calibrated(cluster: Path) -> str:
    """Where two ranks have written what they measured."""
    Job("", next(iter(SIZES.values())), str(cluster), "eager").close()
    return str(cluster)


class Job:
    """A plan on its two ranks, which sleep until it is their turn. Without a name they measure the machine and write `cluster`."""

    def __init__(self, name: str, size: Size, cluster: str, backend: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        context = get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(WORLD_SIZE):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(name, size, rank, cluster, backend, self._folder.name, theirs), daemon=True)
            process.start()
            theirs.close()  # so that a rank that dies ends our wait
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()

    def turn(self) -> float:
        for pipe in self._pipes:
            pipe.send(True)
        return max(pipe.recv() for pipe in self._pipes)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(False)
        for process in self._processes:
            process.join(20)
        self._folder.cleanup()


def _serve(name: str, size: Size, rank: int, cluster: str, backend: str, folder: str, pipe: Connection) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(WORLD_SIZE), "LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD_SIZE)
    step = _step(name, size, rank, cluster, backend) if name else _measured(cluster)
    pipe.send(True)
    while pipe.recv():
        dist.barrier()
        start = time.perf_counter()
        step()
        pipe.send(time.perf_counter() - start)
    dist.destroy_process_group()


def _measured(cluster: str) -> Step:
    autopar.calibrate(path=cluster)
    return lambda: torch.zeros(())


def _step(name: str, size: Size, rank: int, cluster: str, backend: str) -> Step:
    axis, batch = JOBS[name][0], batch_of(size)
    mine = share_of(batch, rank) if axis == "dp" else batch
    mesh = init_device_mesh("cpu", (WORLD_SIZE,), mesh_dim_names=(axis,))
    parallel = compiled(name, size, mesh, mine, cluster, backend)
    return training_step(parallel, torch.optim.AdamW(parallel.parameters(), lr=1e-4, fused=True), mine)


def measured(size: Size, cluster: str, backend: str, rounds: int) -> dict[str, float]:
    jobs = {name: Job(name, size, cluster, backend) for name in JOBS}
    found: dict[str, list[float]] = {name: [] for name in JOBS}
    for count in range(3 + rounds):  # the first three compile, make the optimizer's state, warm
        for name, job in jobs.items():
            seconds = job.turn()
            if count >= 3:
                found[name].append(seconds)
    for job in jobs.values():
        job.close()
    return {name: statistics.median(row) for name, row in found.items()}


def order(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """Of the pairs of a size that differ by more than 15 % as measured: how many paper has in the same order, and how many there are."""
    agreed = total = 0
    for one, other in itertools.combinations(rows, 2):
        if one["size"] == other["size"] and max(one["measured ms"], other["measured ms"]) > (1 + _NOTABLE) * min(
            one["measured ms"], other["measured ms"]
        ):
            total += 1
            agreed += (one["measured ms"] < other["measured ms"]) == (one["on paper ms"] < other["on paper ms"])
    return agreed, total


def row(size: str, job: str, papers: Sequence[float], seconds: float) -> dict[str, Any]:
    before, after = papers
    paper = statistics.mean(papers)
    return {
        "size": size,
        "job": job,
        "paper before ms": 1e3 * before,
        "paper after ms": 1e3 * after,
        "on paper ms": 1e3 * paper,
        "measured ms": 1e3 * seconds,
        "error": paper / seconds - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path, help="write the numbers here")
    options = parser.parse_args()
    before, rows = machine(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        clusters = [calibrated(Path(folder) / "first.yaml")]
        print(autopar.Cluster.from_yaml(clusters[0]))
        for name in options.sizes:
            clock = measured(SIZES[name], clusters[-1], options.backend, options.rounds)
            load = machine()["load"]
            clusters.append(calibrated(Path(folder) / f"after_{name}.yaml"))
            for job, seconds in clock.items():
                rows.append(row(name, job, predicted(job, SIZES[name], clusters[-2:]), seconds) | {"load": load})
        print(autopar.Cluster.from_yaml(clusters[-1]))
    print_table(f"a step on paper and as measured, {options.backend}", rows)
    errors = [abs(row["error"]) for row in rows]
    agreed, total = order(rows)
    apart = statistics.median(abs(row["paper after ms"] / row["paper before ms"] - 1) for row in rows)
    print(f"calibrations before and after are {apart:.1%} apart on paper (median)")
    print(f"error: median {statistics.median(errors):.1%}, worst {max(errors):.1%}; order: {agreed} of {total}")
    print(f"load before {before['load']}, after {machine()['load']}: above 1 before it started, the numbers are noise")
    write_json(options.json, {"load_before": before["load"], "rows": rows})


if __name__ == "__main__":
    main()
