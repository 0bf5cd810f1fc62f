"""CPU time of the thread that trains, statement by statement, beside DDP's: what times of whole steps say within their noise, without it.

    python -m benchmarks.training_thread                       "small", dp, two gloo ranks, eager
    python -m benchmarks.training_thread --size comm --backend inductor --rounds 60

Both trainers live in the same two processes and take turns step by step, DDP always eager. Rank 0's medians, in ms; threads of gloo, which
work beside, are not counted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

import autopar
from benchmarks.peer_jobs import SIZES, WORLD_SIZE, adamw, batch_of, model_of, share_of
from benchmarks.reporting import print_table

WARM_UP = 3


def seconds_of_a_step(module: Any, optimizer: torch.optim.Optimizer, share: Mapping[str, torch.Tensor]) -> dict[str, float]:
    times = [time.thread_time()]
    loss = module(**share)
    times.append(time.thread_time())
    loss.backward()
    times.append(time.thread_time())
    optimizer.step()
    times.append(time.thread_time())
    optimizer.zero_grad()
    del loss
    times.append(time.thread_time())
    parts = dict(zip(("forward", "backward", "update", "zero_grad"), (b - a for a, b in zip(times, times[1:], strict=False)), strict=True))
    return {**parts, "step": times[-1] - times[0]}


def medians_of(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {part: statistics.median(1e3 * step[part] for step in steps) for part in steps[0]}


def measure(rank: int, folder: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(WORLD_SIZE), "LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD_SIZE)
    size = SIZES[options.size]
    share, mesh = share_of(batch_of(size), rank), init_device_mesh("cpu", (WORLD_SIZE,), mesh_dim_names=("dp",))
    modules: dict[str, Any] = {
        "DDP": DistributedDataParallel(model_of(size)),
        "autopar": autopar.compile(model_of(size), mesh, example_inputs=share, backend=options.backend),
    }
    optimizers = {name: adamw(module) for name, module in modules.items()}
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for _ in range(options.rounds + WARM_UP):
        for name, module in modules.items():
            dist.barrier()
            found[name].append(seconds_of_a_step(module, optimizers[name], share))
    if rank == 0:
        medians = {name: medians_of(steps[WARM_UP:]) for name, steps in found.items()}
        rows = [{"trainer": name, **parts, "× DDP": parts["step"] / medians["DDP"]["step"]} for name, parts in medians.items()]
        print_table(f"{options.size}, dp, {options.backend}: CPU ms of the training thread", rows)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--rounds", type=int, default=40)
    with tempfile.TemporaryDirectory() as folder:
        start_processes(measure, (folder, parser.parse_args()), nprocs=WORLD_SIZE, start_method="spawn")


if __name__ == "__main__":
    main()
