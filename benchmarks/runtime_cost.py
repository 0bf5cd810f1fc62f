"""What the runtime itself takes of a step: Python between ops, and the whole step of one rank beside plain PyTorch's.

    python -m benchmarks.runtime_cost                          both tables
    python -m benchmarks.runtime_cost --sizes small --rounds 15 --backends eager --json cost.json

The first table runs a GPT of about 200 parameters whose fragments compute nothing: each gives back what it gave in a step that was
recorded. What is left is the runtime: the guard of the model, inputs into buffers, the instructions, autograd's tape, gradients handed
out. It does so on a virtual rank and on a process of a world of one, whose parameters are DTensors. CPU time of this thread; of each
the least of all steps, since nothing but other work on the machine makes one take longer.

The second has the training step on one virtual rank beside plain PyTorch's, which runs twice, in turns, each in a process of its own
with one thread: `benchmarks.peers --axes one`.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime.verify.host_seconds import runtime_seconds
from benchmarks.peer_jobs import SIZES, Size, batch_of, model_of
from benchmarks.peers import compare
from benchmarks.reporting import machine, print_table, write_json

# 12 layers of 16 parameters, and six beside them.
ABOUT_200_PARAMETERS = Size(layers=12, width=64, heads=4, batch=4, length=32, symbols=256)


def row(name: str, mesh: Any, repeats: int) -> dict[str, Any]:
    batch = batch_of(ABOUT_200_PARAMETERS)
    parallel = autopar.compile(model_of(ABOUT_200_PARAMETERS), mesh, example_inputs=batch, backend="eager", cluster="cpu")
    found = runtime_seconds(parallel, batch, repeats, min)
    return {
        "rank": name,
        "parameters": found.num_parameters,
        "instructions": found.num_instructions,
        "step (ms)": 1e3 * found.step,
        "guard (ms)": 1e3 * found.guard,
        "instructions (ms)": 1e3 * found.instructions,
        "an instruction (µs)": 1e6 * found.instruction_seconds,
        "a parameter (µs)": 1e6 * (found.step - found.instructions - found.guard) / found.num_parameters,
    }


def runtime_alone(repeats: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    rows = [row("virtual", autopar.virtual_mesh(dp=1), repeats)]
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        rows.append(row("a process", init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), repeats))
        dist.destroy_process_group()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", choices=SIZES, default=list(SIZES), help="of the second table; none leaves it out")
    parser.add_argument("--backends", nargs="+", default=["eager", "inductor"])
    parser.add_argument("--rounds", type=int, default=11, help="steps of each job of the second table")
    parser.add_argument("--repeats", type=int, default=100, help="steps of the first table")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    before, tables = machine(), {"runtime alone": runtime_alone(options.repeats)}
    print_table("The runtime alone, CPU time a step", tables["runtime alone"])
    for size in options.sizes:
        for backend in options.backends:
            title = f"{size}, one rank, {backend}"
            tables[title] = compare("one", SIZES[size], backend, options.rounds)
            print_table(title, tables[title])
    print(f"load before {before['load']}, after {machine()['load']}: above 1 before it started, the numbers are noise")
    write_json(options.json, {"load_before": before["load"], "tables": tables})


if __name__ == "__main__":
    main()
