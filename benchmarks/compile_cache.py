"""What `autopar.compile(cache=folder)` saves: GPT-2 compiled in fresh processes, without a cache, into an empty one, and from it.

    python -m benchmarks.compile_cache                                  12 and 80 layers, on virtual dp2 × tp2, backend eager
    python -m benchmarks.compile_cache --layers 2 --json compile_cache.json
    python -m benchmarks.compile_cache --layers 12 --on-ranks           on four processes with gloo, of which rank 0 compiles or reads

The peer is the same compile without a cache. Processes run one after another; imports are not counted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import autopar
from benchmarks.compile_time import batch_of, gpt2
from benchmarks.reporting import print_table, write_json


def once(num_layers: int, folder: str | None) -> dict[str, Any]:
    """Seconds of one compile in this process, and digests of the program and of the plan."""
    torch.manual_seed(0)
    with torch.device("meta"):  # values play no part
        model = gpt2(num_layers)
    batch, mesh = batch_of(4, 256), autopar.virtual_mesh(dp=2, tp=2)
    start = time.perf_counter()
    parallel = autopar.compile(model, mesh, example_inputs=batch, backend="eager", cache=folder)
    seconds = time.perf_counter() - start
    text = f"{parallel.compiled.schedule} {parallel.compiled.fingerprint}"
    return {"seconds": seconds, "program": hashlib.sha256(text.encode()).hexdigest(), "plan": parallel.plan.fingerprint}


def in_a_process(num_layers: int, folder: str | None) -> dict[str, Any]:
    script = f"import json; from benchmarks.compile_cache import once; print(json.dumps(once({num_layers}, {folder!r})))"
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return json.loads(answer.stdout.splitlines()[-1])


def compared(num_layers: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        plain, first, *later = [in_a_process(num_layers, each) for each in (None, f"{folder}/cache", f"{folder}/cache", f"{folder}/cache")]
        num_bytes = sum(file.stat().st_size for file in Path(folder, "cache").iterdir())
    read = min(each["seconds"] for each in later)
    return {
        "layers": num_layers,
        "without s": plain["seconds"],
        "writing s": first["seconds"],
        "reading s": read,
        "reading / without": read / plain["seconds"],
        "file kB": num_bytes / 1000,
        "equal": all((each["program"], each["plan"]) == (plain["program"], plain["plan"]) for each in (first, *later)),
    }


def on_rank(num_layers: int, folder: str | None) -> None:
    """On one of four ranks: rank 0 prints the seconds of a compile until all are through, and what the processors of all took."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, mesh = gpt2(num_layers), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    batch = {name: value[:2] for name, value in batch_of(4, 256).items()}
    dist.barrier()
    start, start_cpu = time.perf_counter(), time.process_time()
    autopar.compile(model, mesh, example_inputs=batch, backend="eager", cache=folder)
    dist.barrier()
    seconds, cpu = time.perf_counter() - start, torch.tensor([time.process_time() - start_cpu])
    dist.all_reduce(cpu)
    if dist.get_rank() == 0:
        print(json.dumps({"seconds": seconds, "CPU seconds": cpu.item()}), flush=True)
    dist.destroy_process_group()


def on_ranks(num_layers: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for what, cache in (("without", None), ("writing", f"{folder}/cache"), ("reading", f"{folder}/cache")):
            script = Path(folder, "rank.py")
            script.write_text(f"from benchmarks.compile_cache import on_rank\non_rank({num_layers}, {cache!r})\n")
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", str(script)]
            answer = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": os.getcwd()})
            rows.append({"layers": num_layers, "cache": what} | json.loads(answer.stdout.splitlines()[-1]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", type=int, default=[12, 80])
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--on-ranks", action="store_true", help="on four processes, in place of virtual ranks")
    options = parser.parse_args()
    if options.on_ranks:
        rows, where = [row for each in options.layers for row in on_ranks(each)], "four processes, dp2 × tp2"
    else:
        rows, where = [compared(each) for each in options.layers], "virtual dp2 × tp2, in fresh processes"
    print_table(f"compiles of GPT-2-small's widths on {where}", rows)
    write_json(options.json, {"rows": rows})


if __name__ == "__main__":
    main()
