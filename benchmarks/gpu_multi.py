"""Training steps of autopar on all GPUs of a machine, beside DDP, FSDP2, torch's tensor parallel and pipelining. Not run on
several GPUs yet; two ranks that share one have.

    python -m benchmarks.gpu_multi                                             all GPUs here, eager and inductor
    python -m benchmarks.gpu_multi --ranks 2 --backends eager --json gpu_multi.json
    torchrun --nproc-per-node 4 -m benchmarks.gpu_multi                        ranks that are there, one job after another in them
    torchrun --nproc-per-node 2 -m benchmarks.gpu_multi --share --size tiny --axes dp zero tp pp features     on one GPU: losses alone
    python -m benchmarks.gpu_multi --device cpu --size tiny --ranks 2          the rehearsal: gloo, sizes that say nothing of speed

Without torchrun each job has processes of its own, one job after another, so that what fails or hangs ends with them. Each line has the
median over blocks of steps of the slowest rank's seconds a step, its ratio to the first peer of its table, the most memory that a rank's
allocator gave since before the model was built (on a CPU what its resident set grew by), and how far the losses of the first steps are
from those of one process. The first peer runs twice, first and last: how far the two are apart is the noise.

Exits with 0 when every job of autopar ran and had the losses of one process, with 1 when not, with 2 where there are too few devices.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu_case import Place, Row, first_line
from benchmarks.gpu_features import JOBS as FEATURES
from benchmarks.gpu_features import dtype_of
from benchmarks.gpu_place import allocated_peak, begin_peak, environment, is_good, largest_difference, without_nan
from benchmarks.peer_jobs import JOBS, ONE_PROCESS, Size, Step
from benchmarks.reporting import print_table, write_json

# All layers and heads are divided by 2, 4 and 8 ranks, and so is the batch, by microbatches of the pipelines as well.
SIZES = {
    "1b": Size(layers=16, width=2048, heads=16, batch=8, length=2048, symbols=32000, dtype=torch.bfloat16),
    "200m": Size(layers=16, width=1024, heads=16, batch=16, length=1024, symbols=16384, dtype=torch.bfloat16),
    "tiny": Size(layers=2, width=32, heads=4, batch=8, length=16, symbols=64),
}
AXES = ("dp", "zero", "tp", "pp")
EVERY_JOB = {**JOBS, "features": FEATURES}
WARM_UP, BLOCKS, STEPS = 3, 5, 5
PATIENCE_SECONDS = 1800


def jobs_of(axis: str) -> list[str]:
    """Of one table; the first peer twice."""
    names = list(EVERY_JOB[axis])
    return [*names, f"{names[0]}, again"]


def measured(axis: str, name: str, size: Size, backend: str, rank: int) -> Row:
    """One job on this rank, in a world that is there: seconds a step by block, bytes, losses. What it raises is a row."""
    place = Place(size.device)
    try:
        before = begin_peak(place)
        step = EVERY_JOB[axis][name.removesuffix(", again")](size, rank, backend)
        losses = [step() for _ in range(WARM_UP)]
        blocks = [_seconds(place, step) for _ in range(BLOCKS)]
        return {"seconds": blocks, "peak": allocated_peak(place, before), "losses": [float(each) for each in losses]}
    except Exception as error:  # one job that fails must not hide the others
        return {"error": first_line(error)}
    finally:
        gc.collect()


def _seconds(place: Place, step: Step) -> float:
    """Of one step, in a block of them, so that the host may run ahead of its device."""
    if dist.is_initialized():
        dist.barrier()
    place.finish()
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    place.finish()
    return (time.perf_counter() - start) / STEPS


def share_device(size: Size, rank: int) -> None:
    """Where ranks outnumber GPUs each says that it is a host of its own: NCCL refuses two of one host on a device. It goes by sockets."""
    if size.device == "cuda" and size.num_ranks > torch.cuda.device_count():
        os.environ |= {"NCCL_HOSTID": f"rank {rank}", "NCCL_SOCKET_IFNAME": "lo"}


def join_world(size: Size, rank: int, address: str | None = None) -> None:
    """Of `size.num_ranks`; by the launcher's environment where there is no `address`."""
    if size.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
    backend = "cpu:gloo,cuda:nccl" if size.device == "cuda" else "gloo"
    where: dict[str, Any] = {} if address is None else {"init_method": address, "rank": rank, "world_size": size.num_ranks}
    dist.init_process_group(backend, timeout=timedelta(seconds=PATIENCE_SECONDS / 3), **where)


def _serve(axis: str, name: str, size: Size, backend: str, rank: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size.num_ranks), "LOCAL_RANK": str(rank)}
    share_device(size, rank)
    if size.device == "cpu":
        torch.set_num_threads(1)
    if size.num_ranks > 1:
        join_world(size, rank, f"file://{folder}/rendezvous")
    row = measured(axis, name, size, backend, rank)
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(row))
    if "error" in row:
        os._exit(1)  # peers may wait for this rank: it leaves without them
    if size.num_ranks > 1:
        dist.destroy_process_group()


def in_own_processes(axis: str, name: str, size: Size, backend: str) -> list[Row]:
    """The rows of all ranks; those that left without one, or did not come to an end, say so."""
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_serve, args=(axis, name, size, backend, rank, folder)) for rank in range(size.num_ranks)]
        for process in ranks:
            process.start()
        end = time.monotonic() + PATIENCE_SECONDS
        while any(process.is_alive() for process in ranks) and time.monotonic() < end:
            if any(process.exitcode for process in ranks):
                end = min(end, time.monotonic() + 20)  # the others may find out by themselves
            time.sleep(0.05)
        for process in ranks:
            process.kill()
            process.join()
        files = [Path(folder) / f"rank{rank}.json" for rank in range(size.num_ranks)]
        return [json.loads(file.read_text()) if file.exists() else {"error": "no answer"} for file in files]


def in_this_world(axis: str, name: str, size: Size, backend: str) -> list[Row]:
    """The same in a launcher's ranks, for all of them."""
    mine = measured(axis, name, size, backend, dist.get_rank())
    rows: list[Any] = [None] * size.num_ranks
    dist.all_gather_object(rows, mine)
    return rows


def summary(name: str, rows: list[Row], wanted: list[float] | None) -> Row:
    """One line of all ranks; `wanted` are the losses of one process."""
    failed = next((row["error"] for row in rows if "error" in row and row["error"] != "no answer"), None)
    if failed is not None or any("error" in row for row in rows):
        return {"job": name, "ms": math.nan, "peak MB": math.nan, "loss": math.nan, "off by": math.nan, "error": failed or "no answer"}
    blocks = [max(each) for each in zip(*(row["seconds"] for row in rows), strict=True)]
    losses = [_mean(each) for each in zip(*(row["losses"] for row in rows), strict=True)]
    off = math.nan if wanted is None else largest_difference(losses, wanted)
    peak = max(row["peak"] for row in rows) / 1e6
    return {"job": name, "ms": 1e3 * statistics.median(blocks), "peak MB": peak, "loss": losses[-1], "off by": off, "error": ""}


def _mean(losses: tuple[float, ...]) -> float:
    there = [each for each in losses if not math.isnan(each)]
    return statistics.fmean(there) if there else math.nan


def table(axis: str, size: Size, backend: str, run: Any, wanted: list[float] | None) -> list[Row]:
    rows = [summary(name, run(axis, name, size, backend), wanted) for name in jobs_of(axis)]
    first = rows[0]
    return [{"job": row["job"], "ms": row["ms"], f"× {first['job']}": row["ms"] / first["ms"], **row} for row in rows]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--ranks", type=int, help="so many processes; all GPUs if it is left out")
    parser.add_argument("--axes", nargs="+", choices=(*AXES, "features"), default=list(AXES))
    parser.add_argument("--share", action="store_true", help="fewer GPUs than ranks are enough: losses count, times say nothing")
    parser.add_argument("--backends", nargs="+", default=["eager", "inductor"])
    parser.add_argument("--json", type=Path, help="write the numbers here")
    options = parser.parse_args(arguments)
    is_launched = "TORCHELASTIC_RUN_ID" in os.environ
    num_ranks = int(os.environ["WORLD_SIZE"]) if is_launched else options.ranks or max(torch.cuda.device_count(), 2)
    if num_ranks < 2 or (options.device == "cuda" and torch.cuda.device_count() < (1 if is_launched or options.share else num_ranks)):
        print(f"{num_ranks} ranks need as many devices, and at least 2; there are {torch.cuda.device_count()} GPUs here", file=sys.stderr)
        return 2
    size = replace(SIZES[options.size], num_ranks=num_ranks, device=options.device)
    if is_launched:
        share_device(size, int(os.environ["RANK"]))
        join_world(size, int(os.environ["RANK"]))
    is_first = not is_launched or dist.get_rank() == 0
    about = environment(Place(options.device), num_ranks=num_ranks, size=options.size, dtype=str(size.dtype))
    if is_first:
        print(json.dumps(about))
    found, wanted = compare(size, options, is_launched, is_first)
    if is_first:
        write_json(
            options.json,
            {"about": about, "losses of one process": wanted, "tables": {title: without_nan(rows) for title, rows in found.items()}},
        )
    if is_launched:
        dist.destroy_process_group()
    return 0 if all(is_good(row, dtype_of(row["job"], size)) for rows in found.values() for row in rows) else 1


def compare(size: Size, options: argparse.Namespace, is_launched: bool, is_first: bool) -> tuple[dict[str, list[Row]], list[float] | None]:
    """The tables, and the losses of one process on the whole batch, where it has room for that."""
    (name,) = ONE_PROCESS & JOBS["one"].keys() - {"autopar, one rank"}
    alone = (
        in_own_processes("one", name, replace(size, num_ranks=1), "eager") if not is_launched else [measured("one", name, size, "eager", 0)]
    )
    wanted = alone[0].get("losses")
    if wanted is None and is_first:
        print(f"one process has no losses to compare with: {alone[0]['error']}", file=sys.stderr)
    found: dict[str, list[Row]] = {}
    for axis in options.axes:
        for backend in options.backends:
            title = f"{axis}, {backend}"
            found[title] = table(axis, size, backend, in_this_world if is_launched else in_own_processes, wanted)
            if is_first:
                print_table(title, found[title])
    return found, wanted


if __name__ == "__main__":
    sys.exit(main())
