"""Seconds to save and load a checkpoint on gloo ranks, beside torch.distributed.checkpoint in the same run.

    python -m benchmarks.checkpoint [--gigabytes 1] [--ranks 2] [--repeats 5] [--folder /tmp]

Parameters and Adam's state of a stack of layers in float32, in parts over dp (zero=3), as DTensors: DCP is given the same. Both sync what
they write; only ours hashes it, at save and at load. A save with blocking=False counts for as long as it keeps the
step: the first one, which needs new memory for its copy, and the next one. Turns are interleaved; medians and minima over the repeats are
printed, of rank 0's seconds between two barriers.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn

import autopar
from benchmarks.reporting import print_table

LAYERS = 8
BEHIND = "autopar save, blocking=False"


class Stack(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def seconds(call: Callable[[], Any]) -> float:
    dist.barrier()
    begun = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - begun


def dcp_state(parallel: autopar.ParallelModule) -> dict[str, Any]:
    """What `autopar.save` saves of it."""
    optimizer = parallel.optimizer
    assert optimizer is not None
    names = {id(each): name for name, each in parallel.named_parameters()}
    return {"model": dict(parallel.state_dict()), "optimizer": {names[id(each)]: dict(state) for each, state in optimizer.state.items()}}


def turn(parallel: autopar.ParallelModule, folder: Path) -> dict[str, float]:
    ours, theirs, behind = folder / "autopar", folder / "dcp", folder / "behind"
    found = {"dcp save": seconds(lambda: dcp_save(dcp_state(parallel), checkpoint_id=str(theirs)))}
    found["autopar save"] = seconds(lambda: autopar.save(ours, parallel))
    found["dcp load"] = seconds(lambda: dcp_load(dcp_state(parallel), checkpoint_id=str(theirs)))
    found["autopar load"] = seconds(lambda: autopar.load(ours, parallel))
    for what in (BEHIND, f"{BEHIND}, again"):
        started: list[Any] = []
        found[what] = seconds(lambda started=started: started.append(autopar.save(behind, parallel, blocking=False)))
        started[0].result()
        dist.barrier()
    if dist.get_rank() == 0:
        for each in (ours, theirs, behind):
            shutil.rmtree(each)
    return found


def rank_main(rank: int, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=options.ranks)
    width = int((options.gigabytes * 1e9 / 12 / LAYERS) ** 0.5) // 64 * 64
    mesh = init_device_mesh("cpu", (options.ranks,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    example = {"x": torch.randn(4, width)}
    parallel = autopar.compile(
        Stack(width), mesh, example_inputs=example, backend="eager", optimizer=(torch.optim.AdamW, {"lr": 1e-3}), zero=3
    )
    parallel.train_step(**example)
    turn(parallel, Path(folder))
    turns = [turn(parallel, Path(folder)) for _ in range(options.repeats)]
    if rank == 0:
        report(turns, 12 * sum(each.numel() for each in parallel.parameters()) / 1e9)
    dist.destroy_process_group()


def report(turns: list[dict[str, float]], gigabytes: float) -> None:
    medians = {name: statistics.median(each[name] for each in turns) for name in turns[0]}
    least = {name: min(each[name] for each in turns) for name in turns[0]}
    beside = {"autopar save": "dcp save", "autopar load": "dcp load", BEHIND: "autopar save", f"{BEHIND}, again": "autopar save"}
    rows = [
        {
            "what": name,
            "seconds (median)": f"{medians[name]:.2f}",
            "least": f"{least[name]:.2f}",
            "beside": beside.get(name, ""),
            "ratio of medians": f"{medians[name] / medians[beside[name]]:.2f}" if name in beside else "",
            "of least": f"{least[name] / least[beside[name]]:.2f}" if name in beside else "",
        }
        for name in turns[0]
    ]
    print_table(f"{gigabytes:.2f} GB on {dist.get_world_size()} ranks", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder in it is removed at the end")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        spawn(rank_main, (options, folder), nprocs=options.ranks)


if __name__ == "__main__":
    main()
