"""Training steps of autopar beside DDP, FSDP2, torch's tensor parallel and torch's pipelining, on two gloo ranks of one thread each.

    python -m benchmarks.peers                                    all sizes, all axes, eager and inductor
    python -m benchmarks.peers --sizes small --axes dp --backends eager --rounds 15 --json peers.json
    python -m benchmarks.peers --sizes compute --axes threads                  two ranks of one thread beside one process with two
    python -m benchmarks.peers --sizes comm --axes buckets                     time in WAIT with and without buckets
    python -m benchmarks.peers --sizes comm --axes "overlap dp" "overlap tp" "overlap pp"   and with no communication moved at all
    python -m benchmarks.peers --sizes small --backends eager --cache compiled/   with compiles that an earlier run wrote

The jobs of one comparison are alive at once, each in processes of its own, and take turns step by step, so that a busy moment of the
machine hits all of them alike. The first peer runs twice: how far the two are apart is the noise. Each line has the median of the
slower rank's steps, its ratio to that peer, CPU time and bytes sent of both ranks a step, how long the rank that waited longest was
blocked in waits (of ours; peers hide it), how far the resident set grew, and the loss of the last step (mean of the ranks that have one).
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.peer_jobs import JOBS, ONE_PROCESS, SIZES, WORLD_SIZE, Size, Step, waited
from benchmarks.reporting import machine, print_table, write_json

MEGABYTE = 1e6


class Turn(NamedTuple):
    """One step of one rank. Seconds; bytes that its resident set has grown by at most since before the model was built."""

    seconds: float
    cpu_seconds: float
    growth: float
    loss: float
    # Seconds blocked in waits; None where the job cannot tell.
    waited: float | None


class Job:
    """One competitor: its ranks sleep until it is their turn."""

    def __init__(self, name: str, build: Callable[[Size, int, str], Step], size: Size, backend: str, num_ranks: int) -> None:
        self.name = name
        self._folder = tempfile.TemporaryDirectory()
        context = get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(name, size, rank, num_ranks, backend, self._folder.name, theirs), daemon=True)
            process.start()
            theirs.close()  # so that a rank that dies ends our wait
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()

    def turn(self) -> tuple[list[Turn], int]:
        """One step on all ranks, and the bytes that went over the wire meanwhile."""
        before = _bytes_sent()
        for pipe in self._pipes:
            pipe.send(True)
        return [pipe.recv() for pipe in self._pipes], _bytes_sent() - before

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(False)
        for process in self._processes:
            process.join(20)
        self._folder.cleanup()


def _serve(name: str, size: Size, rank: int, num_ranks: int, backend: str, folder: str, pipe: Connection) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank)}
    if num_ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=num_ranks)
    build = next(jobs[name.removesuffix(", again")] for jobs in JOBS.values() if name.removesuffix(", again") in jobs)
    before = _peak()
    step = build(size, rank, backend)
    pipe.send(True)
    while pipe.recv():
        start, cpu, blocked = time.perf_counter(), time.process_time(), waited(step)
        loss = float(step())
        seconds, cpu_seconds, blocked_since = time.perf_counter() - start, time.process_time() - cpu, waited(step)
        waits = None if blocked is None or blocked_since is None else blocked_since - blocked
        pipe.send(Turn(seconds, cpu_seconds, _peak() - before, loss, waits))
    if num_ranks > 1:
        dist.destroy_process_group()


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _bytes_sent() -> int:
    """By all processes of this machine, over all interfaces; 0 where the system does not say."""
    table = Path("/proc/net/dev")
    return sum(int(line.split(":")[1].split()[8]) for line in table.read_text().splitlines()[2:]) if table.exists() else 0


def compare(axis: str, size: Size, backend: str, rounds: int, only: list[str] | None = None) -> list[dict[str, Any]]:
    """One table: the jobs of an axis at one size and backend."""
    builds = {name: build for name, build in JOBS[axis].items() if only is None or name in only}
    first = next(iter(builds))
    builds = {first: builds[first], f"{first}, again": builds[first], **builds}
    alone = {name for name in builds if name.removesuffix(", again") in ONE_PROCESS}
    jobs = [Job(name, build, size, backend, 1 if name in alone else WORLD_SIZE) for name, build in builds.items()]
    for job in jobs:
        for _ in range(3):  # compiles, makes the optimizer's state, warms
            job.turn()
    found: dict[str, list[tuple[list[Turn], int]]] = {job.name: [] for job in jobs}
    for _ in range(rounds):
        for job in jobs:
            found[job.name].append(job.turn())
    for job in jobs:
        job.close()
    base = _seconds(found[first])
    return [
        {
            "job": name,
            "ms": 1e3 * _seconds(turns),
            f"× {first}": _seconds(turns) / base,
            "CPU ms": 1e3 * statistics.median(sum(each.cpu_seconds for each in ranks) for ranks, _ in turns),
            "WAIT ms": _waited_ms(turns),
            "sent MB": statistics.median(sent for _, sent in turns) / MEGABYTE,
            "growth MB": max(each.growth for ranks, _ in turns for each in ranks) / MEGABYTE,
            "loss": statistics.fmean(each.loss for each in turns[-1][0] if not math.isnan(each.loss)),
        }
        for name, turns in found.items()
    ]


def _seconds(turns: list[tuple[list[Turn], int]]) -> float:
    return statistics.median(max(each.seconds for each in ranks) for ranks, _ in turns)


def _waited_ms(turns: list[tuple[list[Turn], int]]) -> float | str:
    found = [[each.waited for each in ranks if each.waited is not None] for ranks, _ in turns]
    return 1e3 * statistics.median(map(max, found)) if all(found) else "–"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--axes", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--backends", nargs="+", default=["eager", "inductor"])
    parser.add_argument("--jobs", nargs="+", help="some of the jobs of an axis")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--cache", type=Path, help="read autopar's compiles from this folder, or write them there")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    options = parser.parse_args()
    before, found = machine(), {}
    for size in options.sizes:
        for axis in options.axes:
            for backend in options.backends:
                title = f"{size}, {axis}, {backend}"
                found[title] = compare(axis, replace(SIZES[size], cache=options.cache), backend, options.rounds, options.jobs)
                print_table(title, found[title])
    print(f"load before {before['load']}, after {machine()['load']}: above 1 before it started, the numbers are noise")
    write_json(options.json, {"load_before": before["load"], "tables": found})


if __name__ == "__main__":
    main()
