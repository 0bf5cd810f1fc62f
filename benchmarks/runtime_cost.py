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
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime.execute.fragments import CompiledFragments
from benchmarks.peer_jobs import SIZES, Size, batch_of, model_of
from benchmarks.peers import compare
from benchmarks.reporting import machine, print_table, write_json

# 12 layers of 16 parameters, and six beside them.
ABOUT_200_PARAMETERS = Size(layers=12, width=64, heads=4, batch=4, length=32, symbols=256)


class Recorded(CompiledFragments):
    """Gives back, run by run, what the fragments gave in one step."""

    def __init__(self, fragments: CompiledFragments) -> None:
        self._real = fragments
        self._results: list[tuple[torch.Tensor, ...]] = []
        self._left: deque[tuple[torch.Tensor, ...]] | None = None

    def run(self, name: str, inputs: Sequence[torch.Tensor], into: Mapping[int, torch.Tensor] | None = None) -> tuple[torch.Tensor, ...]:
        if self._left is not None:
            return self._left.popleft()
        self._results.append(self._real.run(name, inputs))
        return self._results[-1]

    def placeable(self, name: str) -> Sequence[int]:
        return ()

    def rewind(self) -> None:
        """Begin again, with tensors that nobody else holds: what autograd cannot take over as a gradient it copies."""
        self._left = deque(tuple(each.detach() for each in results) for results in self._results)


class Timer:
    """CPU seconds that this thread spends in a function, call by call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self.seconds = function, 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = time.thread_time()
        try:
            return self._function(*args, **kwargs)
        finally:
            self.seconds += time.thread_time() - start

    def taken(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def row(name: str, mesh: Any, repeats: int) -> dict[str, Any]:
    batch = batch_of(ABOUT_200_PARAMETERS)
    parallel = autopar.compile(model_of(ABOUT_200_PARAMETERS), mesh, example_inputs=batch, backend="eager", cluster="cpu")
    parameters = list(parallel.parameters())
    _, captured = parallel.captured((), batch)
    recorded = captured.fragments = Recorded(captured.fragments)

    def step() -> None:
        parallel(**batch).backward()
        for parameter in parameters:
            parameter.grad = None

    step()
    world, guard = parallel._world, parallel._guard
    whole, instructions, guarding = Timer(step), Timer(world.run), Timer(guard.state)
    world.run, guard.state = instructions, guarding
    found: list[tuple[float, float, float]] = []
    for _ in range(repeats):
        recorded.rewind()
        whole()
        found.append((whole.taken(), instructions.taken(), guarding.taken()))
    del world.run, guard.state
    total, executing, in_guard = map(min, zip(*found, strict=True))
    number = len(parallel.compiled.schedule_of(0).instructions)
    return {
        "rank": name,
        "parameters": len(parameters),
        "instructions": number,
        "step (ms)": 1e3 * total,
        "guard (ms)": 1e3 * in_guard,
        "instructions (ms)": 1e3 * executing,
        "an instruction (µs)": 1e6 * executing / number,
        "a parameter (µs)": 1e6 * (total - executing - in_guard) / len(parameters),
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
