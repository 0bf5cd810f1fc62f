"""What gathers and scatters by node save of a step of ZeRO 3 on many nodes, on paper: docs/overlap.md, "Gathers and scatters by node".

    python -m benchmarks.by_node

Each model is compiled twice, the second time with collectives by node priced out. One sequence a rank, parameters on meta in bfloat16.
"""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import torch
import transformers
from torch import nn

import autopar
from autopar import ParallelModule
from autopar.cost import model as prices
from autopar.ir.instructions import Launch
from autopar.pipeline.fragment_prices import on_paper
from benchmarks.reporting import print_table

LENGTH = 2048
SIZES: dict[str, dict[str, Any]] = {
    "Llama-160M, 12 layers": {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "num_hidden_layers": 12},
    "Llama-1B, 4 layers": {
        "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 4, "num_hidden_layers": 4,
    },
}  # fmt: skip
TRIALS = [
    ("Llama-160M, 12 layers", 256, "8xH100"),
    ("Llama-1B, 4 layers", 256, "8xH100"),
    ("Llama-160M, 12 layers", 256, "8xA100"),
    ("Llama-1B, 4 layers", 512, "8xA100"),
]


def compiled(name: str, num_ranks: int, cluster: str) -> ParallelModule:
    config = transformers.LlamaConfig(vocab_size=32_000, use_cache=False, dtype="bfloat16", **SIZES[name])
    with torch.device("meta"):
        model: nn.Module = transformers.LlamaForCausalLM(config).bfloat16()
    tokens = torch.zeros(num_ranks, LENGTH, dtype=torch.int64)
    batch = {"input_ids": tokens, "labels": tokens}
    return autopar.compile(model, autopar.virtual_mesh(dp=num_ranks), example_inputs=batch, cluster=cluster, zero=3, backend="eager")


def step_of(parallel: ParallelModule) -> tuple[float, list[Launch]]:
    """Seconds on paper, and the collectives of a rank."""
    found = parallel.compiled
    assert found.cost is not None
    launches = [each for each in found.schedules[0].instructions if isinstance(each, Launch)]
    return on_paper(found.schedule, found.cost, has_memory=False).step_seconds, launches


def main() -> None:
    rows: list[dict[str, Any]] = []
    for name, num_ranks, cluster in TRIALS:
        with mock.patch.object(prices, "by_node_seconds", lambda *_: math.inf):
            as_one, _ = step_of(compiled(name, num_ranks, cluster))
        seconds, launches = step_of(compiled(name, num_ranks, cluster))
        counts = {"collectives": len(launches), "by node": sum(each.node_size > 0 for each in launches)}
        rows.append({"model": name, "ranks": num_ranks, "cluster": cluster, **counts, "as one ms": 1e3 * as_one, "now ms": 1e3 * seconds})
    print_table("a step of ZeRO 3 on paper", rows)


if __name__ == "__main__":
    main()
