"""Step times of a GPT on two pipeline stages: autopar against the schedules of torch.distributed.pipelining, on two gloo ranks.

    python -m benchmarks.pipelines
    python -m benchmarks.pipelines --layers 4 --width 64 --steps 2 --rounds 2 --json pipelines.json

One run, all take turns. Both sides compute the same: the same model, batch, number of microbatches and optimizer, one thread a
rank. Torch's schedules get the blocks cut evenly, the embedding on the first stage and the head on the last. The best of them is
listed twice, as two jobs of their own: how far these two are apart is the noise of the run.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional as F

import autopar
from benchmarks.reporting import machine, print_table, write_json
from benchmarks.step_time import Ranks, Step, answer, build, global_batch, join
from examples.gpt import GPT

WORLD_SIZE = 2

# Torch's schedules, and the stages of each of two ranks.
TORCH: dict[str, tuple[Any, tuple[tuple[int, ...], ...]]] = {
    "gpipe": (schedules.ScheduleGPipe, ((0,), (1,))),
    "1f1b": (schedules.Schedule1F1B, ((0,), (1,))),
    "interleaved": (schedules.ScheduleInterleaved1F1B, ((0, 2), (1, 3))),
    "zero bubble": (schedules.ScheduleInterleavedZeroBubble, ((0, 2), (1, 3))),
    "zero bubble V": (schedules.ScheduleZBVZeroBubble, ((0, 3), (1, 2))),
}
OURS = ("1f1b", "gpipe", "zb-h1", "interleaved", "zb-v")


class Part(nn.Module):
    """The blocks of one stage; the first embeds, the last makes logits."""

    def __init__(self, model: GPT, stage: int, num_stages: int) -> None:
        super().__init__()
        size = len(model.blocks) // num_stages
        self.blocks = nn.ModuleList(model.blocks[stage * size : (stage + 1) * size])
        self.symbols, self.positions = (model.symbols, model.positions) if stage == 0 else (None, None)
        self.norm, self.head = (model.norm, model.head) if stage == num_stages - 1 else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.symbols is not None and self.positions is not None:
            x = self.symbols(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.norm is not None and self.head is not None else x


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def torch_step(name: str, rank: int, batch: dict[str, Tensor], options: argparse.Namespace) -> Step:
    kind, stages = TORCH[name]
    model = build(options)
    assert isinstance(model, GPT)
    num_stages = sum(len(each) for each in stages)
    parts = [Part(model, stage, num_stages) for stage in stages[rank]]
    called = [part if options.backend == "eager" else torch.compile(part, backend=options.backend) for part in parts]
    found = [PipelineStage(part, stage, num_stages, torch.device("cpu")) for part, stage in zip(called, stages[rank], strict=True)]  # type: ignore[arg-type]
    schedule = kind(found if len(found) > 1 or "ZeroBubble" in kind.__name__ else found[0], options.microbatches, loss_fn=loss_of)
    optimizer = torch.optim.AdamW([each for part in parts for each in part.parameters()], lr=1e-4, foreach=True)
    is_first, is_last = 0 in stages[rank], num_stages - 1 in stages[rank]

    def step() -> float:
        losses: list[Tensor] = []
        target = {"target": batch["labels"], "losses": losses} if is_last else {}
        schedule.step(*((batch["tokens"],) if is_first else ()), **target)
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).mean()) if losses else 0.0

    return step


def autopar_step(schedule: str, mesh: Any, batch: dict[str, Tensor], options: argparse.Namespace) -> Step:
    parallel = autopar.compile(
        build(options),
        mesh,
        example_inputs=batch,
        backend=options.backend,
        num_microbatches=options.microbatches,
        schedule=schedule,
        cluster="cpu",
        timeout=600,
    )
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-4, foreach=True)

    def step() -> float:
        loss = parallel(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def serve(rank: int, folder: str, options: argparse.Namespace, pipe: Connection) -> None:
    warnings.simplefilter("ignore")
    join(rank, WORLD_SIZE, folder)
    batch, mesh = global_batch(options), init_device_mesh("cpu", (WORLD_SIZE,), mesh_dim_names=("pp",))
    steps: dict[str, Step] = {}
    for name in options.torch:
        steps[f"torch, {name}"] = torch_step(name, rank, batch, options)
        steps[f"torch, {name}, again"] = torch_step(name, rank, batch, options)
    for name in options.autopar:
        steps[f"autopar, {name}"] = autopar_step(name, mesh, batch, options)
    answer(steps, pipe)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    ranks = Ranks(options, WORLD_SIZE, serve)
    found: dict[str, list[float]] = {name: [] for name in ranks.names}
    for name in found:
        ranks.seconds_of(name, 2)  # compiles
    for _ in range(options.rounds):
        for name in found:
            ranks.seconds_of(name, 1)  # warms caches that the others left cold
            found[name] += ranks.seconds_of(name, options.steps)
    ranks.close()
    medians = {name: statistics.median(times) for name, times in found.items()}
    best = min(value for name, value in medians.items() if name.startswith("torch"))
    rows = [
        {"job": name, "median ms": 1e3 * medians[name], "fastest ms": 1e3 * min(times), "× best of torch": medians[name] / best}
        for name, times in found.items()
    ]
    return sorted(rows, key=lambda row: float(str(row["median ms"])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="+", choices=TORCH, default=list(TORCH))
    parser.add_argument("--autopar", nargs="+", default=list(OURS))
    parser.add_argument("--backend", default="eager", help="torch.compile backend of both sides")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=32, help="sequences in the global batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps of each job in a round")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    options = parser.parse_args()
    before = machine()
    rows = measure(options)
    size = f"{options.layers} layers, width {options.width}, {options.batch} × {options.length} tokens"
    print_table(f"{size}, {options.microbatches} microbatches, {options.backend}", rows)
    print(f"load before {before['load']}, after {machine()['load']}: above 1 before it started, the numbers are noise")
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    write_json(options.json, {"settings": settings, "load_before": before["load"], "steps": rows})


if __name__ == "__main__":
    main()
