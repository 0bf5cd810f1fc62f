"""Step times of the main job (examples/gpt.py, AdamW, clipping): plain PyTorch, virtual ranks, four gloo ranks, and DDP on the same four.

    python -m benchmarks.step_time
    python -m benchmarks.step_time --layers 1 --width 64 --steps 2 --rounds 2 --backend eager --json step_time.json

All take turns within one run, a few steps at a time, so that a busy moment of the machine hits each of them; medians are of
single steps. Every rank has one thread; plain PyTorch and virtual ranks have `--threads`. The global batch is the same for all.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import autopar
from benchmarks.reporting import machine, print_table, write_json
from examples.gpt import GPT

WORLD_SIZE = 4
NUM_SYMBOLS = 256

Step = Callable[[], float]


def build(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    return GPT(NUM_SYMBOLS, options.layers, options.width, options.heads, options.length)


def global_batch(options: argparse.Namespace) -> dict[str, Tensor]:
    windows = torch.randint(0, NUM_SYMBOLS, (options.batch, options.length + 1), generator=torch.Generator().manual_seed(1))
    return {"tokens": windows[:, :-1].contiguous(), "labels": windows[:, 1:].contiguous()}


def share(batch: dict[str, Tensor], index: int, count: int) -> dict[str, Tensor]:
    return {name: value.chunk(count)[index] for name, value in batch.items()}


def training_step(module: nn.Module, batch: dict[str, Tensor], clip: Callable[[float], Any]) -> Step:
    """One step of the main job; its loss is of this process's part of the batch for DDP, of the global batch for the others."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, foreach=True)

    def step() -> float:
        loss = module(**batch)
        loss.backward()
        clip(1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def torch_step(module: nn.Module, batch: dict[str, Tensor], backend: str) -> Step:
    """Plain PyTorch's, compiled by the same backend."""
    called = module if backend == "eager" else torch.compile(module, backend=backend)
    assert isinstance(called, nn.Module)
    return training_step(called, batch, lambda bound: nn.utils.clip_grad_norm_(module.parameters(), bound))


def autopar_step(model: nn.Module, mesh: Any, batch: dict[str, Tensor], backend: str) -> Step:
    parallel = autopar.compile(model, mesh, example_inputs=batch, backend=backend, timeout=600)
    return training_step(parallel, batch, parallel.clip_grad_norm_)


def seconds_of(step: Step, num_steps: int) -> list[float]:
    found: list[float] = []
    for _ in range(num_steps):
        start = time.perf_counter()
        step()
        found.append(time.perf_counter() - start)
    return found


# ---- the ranks


def serve(rank: int, folder: str, options: argparse.Namespace, pipe: Connection) -> None:
    """Answer (name of a step, number of steps) with the seconds of each, until None comes."""
    join(rank, WORLD_SIZE, folder)
    batch, steps = global_batch(options), dict[str, Step]()
    for dp, tp in options.meshes:
        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        steps[ranks_name(dp, tp)] = autopar_step(build(options), mesh, share(batch, rank // tp, dp), options.backend)
    replica = DistributedDataParallel(build(options))
    steps["DDP, 4 gloo ranks"] = torch_step(replica, share(batch, rank, WORLD_SIZE), options.backend)
    answer(steps, pipe)


def join(rank: int, world_size: int, folder: str) -> None:
    """Become one of the gloo ranks that meet in `folder`, on one thread."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)


def answer(steps: dict[str, Step], pipe: Connection) -> None:
    pipe.send(list(steps))
    while (order := pipe.recv()) is not None:
        name, num_steps = order
        pipe.send(seconds_of(steps[name], num_steps))
    dist.destroy_process_group()


def ranks_name(dp: int, tp: int) -> str:
    return f"autopar, 4 gloo ranks, dp{dp} × tp{tp}"


class Ranks:
    """Processes that sleep until they are asked for steps; each runs `serve`."""

    def __init__(self, options: argparse.Namespace, world_size: int = WORLD_SIZE, serve: Callable[..., None] = serve) -> None:
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, self._folder.name, options, theirs), daemon=True)
            process.start()
            theirs.close()  # so that a rank that dies ends our wait
            self._pipes.append(ours)
            self._processes.append(process)
        self.names: list[str] = [pipe.recv() for pipe in self._pipes][0]

    def seconds_of(self, name: str, num_steps: int) -> list[float]:
        """Of each step, on the slowest rank."""
        for pipe in self._pipes:
            pipe.send((name, num_steps))
        return [max(each) for each in zip(*(pipe.recv() for pipe in self._pipes), strict=True)]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)
        self._folder.cleanup()


# ---- the run


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    torch.set_num_threads(options.threads)
    batch = global_batch(options)
    local = {f"plain PyTorch, {options.threads} threads": torch_step(build(options), batch, options.backend)}
    for dp, tp in options.meshes:
        local[f"autopar, virtual, dp{dp} × tp{tp}"] = autopar_step(
            build(options), autopar.virtual_mesh(dp=dp, tp=tp), batch, options.backend
        )
    ranks = Ranks(options)
    runners: dict[str, Callable[[int], list[float]]] = {
        **{name: lambda count, step=step: seconds_of(step, count) for name, step in local.items()},
        **{name: lambda count, name=name: ranks.seconds_of(name, count) for name in ranks.names},
    }
    first = {name: run(1)[0] for name, run in runners.items()}  # compiles
    found: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(options.rounds):
        for name, run in runners.items():
            run(1)  # warms caches that the others left cold
            found[name] += run(options.steps)
    ranks.close()
    base = statistics.median(next(iter(found.values())))
    return [
        {
            "job": name,
            "median ms": 1e3 * statistics.median(times),
            "fastest ms": 1e3 * min(times),
            "× plain": statistics.median(times) / base,
            "first step s": first[name],
            "steps": len(times),
        }
        for name, times in found.items()
    ]


def mesh_of(text: str) -> tuple[int, int]:
    """`"2x2"` → (2, 2): dp × tp."""
    dp, _, tp = text.partition("x")
    if not (dp.isdigit() and tp.isdigit()) or int(dp) * int(tp) != WORLD_SIZE:
        raise argparse.ArgumentTypeError(f"{text!r} is no mesh of {WORLD_SIZE} ranks; write dp x tp as in 2x2")
    return int(dp), int(tp)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--meshes", nargs="+", type=mesh_of, default=[(2, 2), (4, 1)], help="dp x tp, as in 2x2 4x1")
    parser.add_argument("--backend", default="inductor", help="torch.compile backend for all, peers too; eager compiles nothing")
    parser.add_argument("--threads", type=int, default=2, help="of plain PyTorch and of virtual ranks")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16, help="sequences in the global batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="steps of each job in a round")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    options = parser.parse_args()
    before = machine()
    rows = measure(options)
    print_table(f"{options.layers} layers, width {options.width}, {options.batch} × {options.length} tokens, {options.backend}", rows)
    print(f"load before {before['load']}, after {machine()['load']}: above 1 before it started, the numbers are noise")
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    write_json(options.json, {"settings": settings, "load_before": before["load"], "steps": rows})


if __name__ == "__main__":
    main()
