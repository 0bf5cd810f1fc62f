"""The plans that people ran (arXiv:2104.04473, Table 1) beside those that `autopar.rank_plans` finds for the same devices and batch.

    python -m benchmarks.best_meshes                         all rows
    python -m benchmarks.best_meshes --rows 1.7 7.5          some of them, by billions of parameters

Both are priced alike (profile "megatron", A100 80 GB); what is said of the better one is why, part by part. CPU seconds are of all
captures and the search.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path
from typing import Any

import torch

import autopar
from benchmarks.foresight import PUBLISHED, tables
from benchmarks.published_gpts import CLUSTER, megatron_step, megatron_work
from benchmarks.published_models import GPT
from benchmarks.published_rows import Row
from benchmarks.reporting import print_table, write_json


def compared(row: Row) -> tuple[dict[str, Any], autopar.RankedPlans]:
    theirs = megatron_step(row, megatron_work(row)).prediction()
    width, heads, layers, length, symbols, gpus = (int(row[name]) for name in ("hidden", "heads", "layers", "seq", "vocab", "gpus"))
    cpu, start = time.process_time(), time.perf_counter()
    with torch.device("meta"):
        model = GPT(symbols, layers, width, heads, length)
        tokens = torch.zeros(2, length, dtype=torch.int64)
    found = autopar.rank_plans(
        model,
        cluster=f"{CLUSTER}:{gpus}",
        global_batch=int(row["global_batch"]),
        example_inputs={"tokens": tokens, "labels": tokens},
        precision="fp16",
        profile="megatron",
    )
    ours, plan = found.plans[0], found.plans[0].plan
    line = {
        "B": row["params_B"],
        "GPUs": gpus,
        "theirs": " × ".join(f"{axis}{size}" for axis, size in theirs.mesh.items() if size > 1),
        "s": f"{theirs.step_seconds:.2f}",
        "GB": f"{theirs.peak_bytes / 1e9:.0f}",
        "ours": f"{ours.mesh}, {ours.schedule}, {plan.num_microbatches} of {plan.microbatch}, {plan.recompute}, zero {plan.zero}",
        "s, ours": f"{ours.prediction.step_seconds:.2f}",
        "GB, ours": f"{ours.prediction.peak_bytes / 1e9:.0f}",
        "faster": f"{theirs.step_seconds / ours.prediction.step_seconds:.2f}",
        "because": because(theirs, ours.prediction),
        "CPU s": f"{time.process_time() - cpu:.0f}",
        "wall s": f"{time.perf_counter() - start:.0f}",
    }
    return line, found


def because(theirs: autopar.Prediction, ours: autopar.Prediction) -> str:
    """The parts that differ most."""
    apart = {name: ours.seconds[name] - theirs.seconds[name] for name in ours.seconds}
    return ", ".join(f"{name} {apart[name]:+.2f} s" for name in sorted(apart, key=lambda name: -abs(apart[name]))[:3])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--published", type=Path, default=PUBLISHED)
    parser.add_argument("--rows", nargs="+", help="billions of parameters")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [row for row in tables(options.published)["megatron_2021_table1"] if options.rows is None or row["params_B"] in options.rows]
    lines = []
    for row in rows:
        line, found = compared(row)
        lines.append(line)
        print(found, flush=True)
    print_table("the paper's plans and ours", lines)
    print(f"peak memory of this process {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB")
    write_json(options.json, {"rows": lines})


if __name__ == "__main__":
    main()
