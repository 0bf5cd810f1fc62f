"""What stays exposed of the communication of large models, on paper, after each schedule pass, beside what no order can go below.

    python -m benchmarks.overlap                                     Llama-70B and GPT-175B on 64 to 1,024 H100s: docs/overlap.md
    python -m benchmarks.overlap --models llama-70b --layers 4 --json overlap.json

Parameters on meta, in bf16; each model is traced once, for its whole batch. Seconds are those of the cost model: collectives over one link
go one at a time, sends of a pipeline on channels of their own, compute is never slowed down by communication.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from autopar.compiler import Options, default_passes
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.model import CostModel
from autopar.driver.compiled import SchedulePassRun
from autopar.driver.manager import History, run_passes
from autopar.frontend.capture import capture
from autopar.graph.autocast import autocast_off
from autopar.ir.instructions import Launch, Run
from autopar.ir.mesh import Mesh, virtual_mesh
from autopar.ir.program import Program
from autopar.ir.zero import ZeRO
from autopar.passes.global_.find_atoms import FindAtoms
from autopar.passes.local.chunk_collectives import ChunkCollectives
from autopar.passes.schedule.overlap_communication import links_of
from autopar.pipeline.exposure import predicted_exposure
from autopar.pipeline.fragment_prices import fragment_seconds
from autopar.pipeline.order import chosen_schedule, pipeline_order
from autopar.pipeline.simulate import simulate
from autopar.plans.pins import freedom_of
from benchmarks.planning import default_dtype
from benchmarks.reporting import print_table, write_json

CLUSTER = "8xH100"
AFTER = ("hand out", "gather ahead", "bucket collectives", "overlap communication")


@dataclass(frozen=True)
class Trial:
    """A model on a mesh: its level of ZeRO, its microbatches."""

    axes: tuple[tuple[str, int], ...]
    zero: int
    num_microbatches: int


@dataclass(frozen=True)
class Size:
    """A model, the sequences of a step on all ranks, and the meshes that it is tried on."""

    num_layers: int
    num_sequences: int
    length: int
    runs: tuple[Trial, ...]


DATA_PARALLEL = (Trial((("dp", 8), ("tp", 8)), 3, 4), Trial((("dp", 128), ("tp", 8)), 3, 1))
SIZES = {
    "llama-70b": Size(80, 128, 4096, (*DATA_PARALLEL, Trial((("pp", 4), ("dp", 8), ("tp", 8)), 1, 8))),
    "gpt-175b": Size(96, 128, 2048, (*DATA_PARALLEL, Trial((("pp", 8), ("dp", 8), ("tp", 8)), 1, 8))),
}


def model(name: str, num_layers: int) -> nn.Module:
    if name == "llama-70b":
        config = transformers.LlamaConfig(
            num_hidden_layers=num_layers, hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8,
            vocab_size=128_256, max_position_embeddings=8192, use_cache=False,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)
    config = transformers.GPT2Config(
        n_layer=num_layers, n_embd=12_288, n_head=96, n_positions=2048, vocab_size=51_200,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def traced(name: str, size: Size, num_layers: int) -> Program:
    """GLOBAL, before anything is decided."""
    with default_dtype(torch.bfloat16), torch.device("meta"):
        whole = model(name, num_layers)
    tokens = torch.zeros(size.num_sequences, size.length, dtype=torch.int64)
    forward = capture(whole, (), {"input_ids": tokens, "labels": tokens}, virtual_mesh(dp=1), None, {0: 0, 1: 0})
    with autocast_off():
        return run_passes(forward, _passes(Options(Cluster.named(CLUSTER)), before=True))


def _passes(options: Options, before: bool) -> tuple[Any, ...]:
    """Those that know nothing of the mesh, or the others."""
    passes = default_passes(options, True, None)
    first = next(number for number, each in enumerate(passes) if isinstance(each, FindAtoms))
    return passes[:first] if before else passes[first:]


def scheduled(program: Program, run: Trial, num_sequences: int, chunks: str = "auto") -> History:
    """What the passes made of `program` on that mesh, one after another."""
    mesh = virtual_mesh(**dict(run.axes))
    schedule, number = chosen_schedule(None, run.num_microbatches, None, mesh, [num_sequences])
    freedom = freedom_of(None, None, mesh, False, ZeRO.of(run.zero))
    options = Options(Cluster.named(CLUSTER), freedom=freedom, num_microbatches=run.num_microbatches, collective_chunks=chunks)
    history, order = History(), pipeline_order(schedule, mesh.with_microbatches(number))
    with autocast_off():
        run_passes(program.copy(mesh=mesh.with_microbatches(1), freedom=freedom, order=order), _passes(options, before=False), (history,))
    return history


def measured(step: SchedulePassRun) -> dict[str, float]:
    """Seconds of a step on paper after a pass, what of it is exposed, and the seconds below which no order gets."""
    program = step.program
    cost = CostModel(Cluster.named(CLUSTER), program.mesh)
    seconds, links = fragment_seconds(program, cost), links_of(cost.cluster, program.mesh)
    found = predicted_exposure(program, simulate(program, seconds, links, has_memory=False))
    bound = 0.0
    for schedule in program.places:
        totals: dict[str, float] = {}
        for each in schedule.instructions:
            if isinstance(each, (Run, Launch)):
                key = "compute" if isinstance(each, Run) else links(each.axes)
                totals[key] = totals.get(key, 0.0) + seconds(each)
        bound = max(bound, *totals.values())
    return {"seconds": found.step_seconds, "exposed": found.exposed_share, "bubble": found.bubble_share, "bound": bound}


def rows(name: str, num_layers: int | None, chunks: str) -> Iterator[dict[str, Any]]:
    size = SIZES[name]
    begin = time.perf_counter()
    program = traced(name, size, num_layers or size.num_layers)
    trace_seconds = time.perf_counter() - begin
    for run in size.runs:
        begin = time.perf_counter()
        history = scheduled(program, run, size.num_sequences, chunks)
        steps = {step.name: step for step in history.schedule_steps}
        after = {each: measured(steps[each]) for each in AFTER}
        mesh = Mesh(run.axes)
        row: dict[str, Any] = {"model": name, "layers": num_layers or size.num_layers, "ranks": mesh.size, "mesh": str(mesh)}
        row |= {"zero": run.zero, "microbatches": run.num_microbatches}
        row |= {f"exposed % after {each}": 100 * found["exposed"] for each, found in after.items()}
        last = after[AFTER[-1]]
        row |= {"bubble %": 100 * last["bubble"], "step s": last["seconds"], "bound s": last["bound"]}
        row |= {"before s": after[AFTER[-2]]["seconds"], "pass s": steps[AFTER[-1]].seconds}
        row |= {"instructions": steps[AFTER[-1]].program.num_instructions, "decision": str(steps[AFTER[-1]].decision)}
        row |= {"chunks": str(history.decision(ChunkCollectives)), "trace s": trace_seconds, "passes s": time.perf_counter() - begin}
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--layers", type=int, help="instead of each model's own number")
    parser.add_argument("--chunks", default="auto", choices=["auto", "off"], help="collectives and the products beside them in pieces")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    for name in options.models:
        for row in rows(name, options.layers, options.chunks):
            found.append(row)
            write_json(options.json, {"cluster": CLUSTER, "overlap": found})
            print_table(f"{name} on {CLUSTER}", [row])


if __name__ == "__main__":
    main()
