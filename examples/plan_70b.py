"""Plan Llama-3-70B for sixty-four H100s on a laptop: the model is on meta, and takes no memory.

    python examples/plan_70b.py                                     pp=4 × dp=2 × tp=8, a minute or two
    python examples/plan_70b.py --layers 8 --mesh pp=2 dp=2 tp=8    quicker
    python examples/plan_70b.py --plan plan.json                    keeps the plan, for autopar.compile(model, mesh, plan=Plan.load(...))

Nothing runs. What it prints is how every tensor would lie, what a step would take and hold, and why.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

# https://huggingface.co/meta-llama/Meta-Llama-3-70B/blob/main/config.json
SIZES: dict[str, Any] = {
    "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip
LENGTH = 4096


def plan(num_layers: int, axes: dict[str, int], num_sequences: int, cluster: str) -> autopar.ParallelModule:
    """What would run: it has a plan, explains itself, and answers what if; a call says that parameters have no values."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=num_layers, use_cache=False, dtype="bfloat16", **SIZES)).bfloat16()
        ids = torch.empty(num_sequences, LENGTH, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    return autopar.compile(model, autopar.virtual_mesh(**axes), example_inputs=batch, cluster=cluster, memory_budget="72GiB")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--mesh", nargs="+", default=["pp=4", "dp=2", "tp=8"], help="sizes of axes: pp=4 dp=2 tp=8")
    parser.add_argument("--sequences", type=int, default=64, help=f"in the global batch, of {LENGTH} tokens each")
    parser.add_argument("--cluster", default="8xH100", help="devices in a node, and which")
    parser.add_argument("--detail", help='what of explain() to print: "all", or one of its sections; its first screen otherwise')
    parser.add_argument("--plan", help="file to keep the plan in")
    options = parser.parse_args(arguments)
    axes = {name: int(size) for name, _, size in (each.partition("=") for each in options.mesh)}
    start = time.perf_counter()
    parallel = plan(options.layers, axes, options.sequences, options.cluster)
    print(f"planned in {time.perf_counter() - start:.0f} s")
    print(parallel.explain(detail=options.detail))
    if options.plan:
        parallel.plan.save(options.plan)


if __name__ == "__main__":
    main()
