"""Birth of a Llama on meta as rank 0 of sixty-four: seconds, and memory beside the rank's share.

    python -m benchmarks.birth                                   Llama-3-70B on pp4 × dp2 × tp8
    python -m benchmarks.birth --layers 8 --mesh pp=2 dp=2 tp=8  smaller

The other ranks are torch's fake process group: nothing is sent, and what ranks tell each other is what rank 0 says.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.runtime.execute.distributed_world import DistributedWorld
from autopar.runtime.execute.process_groups import ProcessGroups
from autopar.runtime.execute.world import local_of
from examples.plan_70b import SIZES

GIB = 2**30


def resident(field: str) -> int:
    """Bytes of this process in memory now ("VmRSS") or at most so far ("VmHWM")."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


class Measured:
    """`DistributedWorld.place`, with its seconds and its memory."""

    def __init__(self) -> None:
        self.seconds = self.cpu_seconds = 0.0
        self.bytes = self.peak_bytes = 0
        self._place = DistributedWorld.place

    def __call__(self, world: Any, *args: Any) -> None:
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
        start, cpu_start = time.perf_counter(), time.process_time()
        self._place(world, *args)
        self.seconds, self.cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        self.bytes, self.peak_bytes = resident("VmRSS") - before, resident("VmHWM") - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--mesh", nargs="+", default=["pp=4", "dp=2", "tp=8"], help="sizes of axes: pp=4 dp=2 tp=8")
    options = parser.parse_args()
    axes = {name: int(size) for name, _, size in (each.partition("=") for each in options.mesh)}
    size = torch.Size(axes.values()).numel()
    dist.init_process_group("fake", rank=0, world_size=size)
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=options.layers, use_cache=False, dtype="bfloat16", **SIZES)).bfloat16()
    largest = max(each.nbytes for each in model.parameters())
    ids = torch.zeros(axes["pp"] * 4, 64, dtype=torch.int64)
    measured, start = Measured(), time.perf_counter()

    def alone(groups: ProcessGroups, value: Any, what: str = "") -> list[Any]:
        return [value] * groups.mesh.size

    with (
        mock.patch.object(ProcessGroups, "gather", alone),
        mock.patch.object(ProcessGroups, "is_equal", lambda groups, number, what: True),
        mock.patch.object(DistributedWorld, "place", lambda world, *args: measured(world, *args)),
    ):
        batch = {"input_ids": ids, "labels": ids}
        parallel = autopar.compile(model, mesh, example_inputs=batch, weights="init", backend="eager", cluster="8xH100")
    parts = [local_of(each) for each in parallel.parameters()]
    share = sum(part.nbytes for part in parts)
    compiling = time.perf_counter() - start - measured.seconds
    print(f"{sum(each.numel() for each in model.parameters()) / 1e9:.1f}B parameters, {size} ranks, compiled in {compiling:.0f} s")
    print(f"born in {measured.seconds:.0f} s, {measured.cpu_seconds:.0f} s of CPU: {len(parts)} parts, {share / GIB:.2f} GiB")
    print(f"largest parameter {largest / GIB:.2f} GiB")
    print(f"memory grew by {measured.bytes / GIB:.2f} GiB, by {measured.peak_bytes / GIB:.2f} GiB at its peak")
    print(f"peak above the share: {(measured.peak_bytes - share) / largest:.2f} of the largest parameter")


if __name__ == "__main__":
    main()
