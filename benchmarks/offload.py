"""What offload brings on a CPU, whose allocator stands in for the device's: six cases, the peak of a rank and the time of a step.

    python -m benchmarks.offload                      docs/offload.md
    python -m benchmarks.offload --steps 3 --json offload.json

Of each case the same model is compiled without and with `offload=`; peaks are those of the allocator's events in forward and backward,
the fullest rank's, and steps of both are timed in turn. Virtual ranks share one thread that computes; another copies.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import autopar
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.model import CostModel
from autopar.ir.instructions import Copy
from autopar.pipeline.exposure import predicted_exposure
from autopar.pipeline.fragment_prices import fragment_seconds
from autopar.pipeline.simulate import simulate
from autopar.pipeline.stays import STAGED
from benchmarks.reporting import print_table, write_json

LAYERS, WIDTH, HEADS, VOCABULARY, BATCH, LENGTH = 4, 128, 4, 512, 8, 256


@dataclass(frozen=True)
class Case:
    name: str
    model: str
    place: str
    axes: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    # A memory budget with offload, as a share of the step without.
    budget: float | None = None


CASES = (
    Case("GPT-2, host", "gpt2", "host", {"tp": 1}),
    Case("Llama, host", "llama", "host", {"tp": 1}),
    Case("GPT-2, file", "gpt2", "file", {"tp": 1}),
    Case("GPT-2, host, 2 stages, 4 microbatches", "gpt2", "host", {"pp": 2}, {"num_microbatches": 4}),
    Case("GPT-2, host, selective recomputation", "gpt2", "host", {"tp": 1}, {"recompute": "selective"}),
    Case("GPT-2, host, a budget of 85 %", "gpt2", "host", {"tp": 1}, budget=0.85),
)


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_layer=LAYERS, n_embd=WIDTH, n_head=HEADS, vocab_size=VOCABULARY, n_positions=LENGTH, use_cache=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        num_hidden_layers=LAYERS, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_attention_heads=HEADS, num_key_value_heads=HEADS,
        vocab_size=VOCABULARY, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def measured(case: Case, num_steps: int) -> dict[str, Any]:
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    with tempfile.TemporaryDirectory() as folder:
        offload = autopar.Offload(activations=case.place, folder=folder if case.place == "file" else None)  # pyright: ignore[reportArgumentType]
        options: dict[str, Any] = {"example_inputs": batch, "backend": "eager", "cluster": "cpu", **case.options}
        plain = autopar.compile(model_of(case.model), autopar.virtual_mesh(**case.axes), **options)
        budget: dict[str, Any] = {} if case.budget is None else {"memory_budget": case.budget * plain.memory().peak_bytes}
        pair = [plain, autopar.compile(model_of(case.model), autopar.virtual_mesh(**case.axes), offload=offload, **options, **budget)]
        memories = [each.memory(measure=batch) for each in pair]
        peaks = [{rank: found.tracked_bytes for rank, found in each.measured.items()} for each in memories]
        milliseconds: list[list[float]] = [[], []]
        for step in range(num_steps + 1):
            for number, parallel in enumerate(pair):
                begin = time.perf_counter()
                parallel(**batch).loss.backward()
                if step:  # the first makes gradients, and pools
                    milliseconds[number].append(1e3 * (time.perf_counter() - begin))
    # Of the place at which least is left of what is moved.
    rows = [(peaks[0][rank] - peaks[1][rank], rank) for rank in peaks[0]]
    fall, rank = min(rows)
    place = pair[1].compiled.schedule.place_of(rank)
    away = memories[1].places[place].parked_bytes.get(case.place, 0.0)  # pyright: ignore[reportCallIssue, reportArgumentType]
    schedule = pair[1].compiled.schedules[place]
    copies = [sum(map(schedule.bytes_of, each.sources)) for each in schedule.instructions if isinstance(each, Copy)]
    staging = 2 * STAGED * max(copies, default=0)  # on their way out, and on their way back
    before, after = (statistics.median(each) for each in milliseconds)
    return {
        "case": case.name,
        "peak, MB": peaks[0][rank] / 1e6,
        "with offload": peaks[1][rank] / 1e6,
        "falls by": fall / 1e6,
        "away": away / 1e6,
        "staging": staging / 1e6,
        "falls enough": "yes" if fall >= away - staging else "NO",
        "step, ms": before,
        "with offload, ms": after,
        "ratio": after / before,
        "waits on paper": _waits(pair[1], options["cluster"]),
    }


def _waits(parallel: Any, cluster: str) -> str:
    program = parallel.compiled.schedule
    seconds = fragment_seconds(program, CostModel(Cluster.named(cluster), program.mesh))
    found = predicted_exposure(program, simulate(program, seconds, has_memory=False))
    return f"{found.copy_seconds / found.step_seconds:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--cases", type=int, nargs="*", default=list(range(len(CASES))))
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    rows = [measured(CASES[number], options.steps) for number in options.cases]
    print_table(f"{LAYERS} layers of {WIDTH}, {BATCH} × {LENGTH} tokens, float32", rows)
    write_json(options.json, {"rows": rows})


if __name__ == "__main__":
    main()
