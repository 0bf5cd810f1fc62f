"""Whether compiling takes longer on more ranks that do the same: pp4 × dp128 × tp8, 4,096 ranks, beside pp4 × dp1 × tp8.

    python -m benchmarks.world_size
    python -m benchmarks.world_size --dp 1 16 128 --layers 16 --samples 4

A rank's share of the batch is the same on both. Nothing runs: the meshes are virtual and the model has no weights.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

import autopar
from autopar.cost.hardware.cluster import Cluster
from benchmarks.compile_time import gpt2
from benchmarks.reporting import print_table


def compiled_on(dp: int, options: argparse.Namespace) -> dict[str, Any]:
    with torch.device("meta"):
        model = gpt2(options.layers, width=512, num_heads=8, vocabulary=1024)
        ids = torch.empty(options.samples * options.microbatches * dp, 64, dtype=torch.int64)
    mesh = autopar.virtual_mesh(pp=4, dp=dp, tp=8)
    start, start_cpu = time.perf_counter(), time.process_time()
    parallel = autopar.compile(
        model,
        mesh,
        example_inputs={"input_ids": ids, "labels": ids},
        backend="eager",
        cluster=Cluster.named(options.cluster),
        num_microbatches=options.microbatches,
    )
    seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    steps = parallel.compiled.schedule_steps
    return {
        "mesh": str(mesh),
        "ranks": mesh.size,
        "seconds": seconds,
        "CPU seconds": cpu,
        "schedule passes": sum(step.seconds for step in steps),
        "instructions": sum(len(each.instructions) for each in parallel.compiled.schedules),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dp", type=int, nargs="+", default=[1, 128])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--samples", type=int, default=2, help="of a microbatch on a rank")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--cluster", default="8xH100")
    options = parser.parse_args()
    compiled_on(options.dp[0], options)  # what is imported and cached once
    rows = [compiled_on(dp, options) for dp in options.dp]
    print_table("compiling for equal shares", rows)
    print(f"\n{rows[-1]['ranks']} ranks take {rows[-1]['CPU seconds'] / rows[0]['CPU seconds']:.2f} × the CPU time of {rows[0]['ranks']}")


if __name__ == "__main__":
    main()
