"""From capture to runnable: where the time goes, and how many fragments a backend compiles for deeper models.

    python -m benchmarks.compile_time                                      GPT-2-small, 12 layers, on virtual dp2 × tp2, backend eager
    python -m benchmarks.compile_time --layers 2 --depths 2 3 --json compile_time.json
    python -m benchmarks.compile_time --model llama-3-8b --dp 2 --tp 4 --length 4096 --cluster 8xH100 --depths     on meta, to its plan
    python -m benchmarks.compile_time --model llama-3-70b --pp 4 --tp 8 --batch 16 --length 64 --cluster 8xH100 --depths

The second table counts the calls of a backend that only counts: Inductor compiles as often, once per distinct structure.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.fx import GraphModule

import autopar
from autopar import ParallelModule
from autopar.cost.hardware.cluster import Cluster
from autopar.ir.instructions import Launch, Run
from benchmarks.reporting import print_table, write_json
from examples.plan_70b import SIZES


def gpt2(num_layers: int, width: int = 768, num_heads: int = 12, vocabulary: int = 50_257) -> nn.Module:
    """transformers' GPT-2, by default of GPT-2-small's sizes, without dropout."""
    config = transformers.GPT2Config(
        n_layer=num_layers, n_embd=width, n_head=num_heads, vocab_size=vocabulary, use_cache=False,
        bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama(num_layers: int, **sizes: Any) -> nn.Module:
    """transformers' Llama on meta, in bfloat16."""
    with torch.device("meta"):
        config = transformers.LlamaConfig(num_hidden_layers=num_layers, use_cache=False, dtype="bfloat16", **sizes)
        return transformers.LlamaForCausalLM(config).bfloat16()


LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip
# By name how a model of so many layers is made, and how many it has.
MODELS: dict[str, tuple[Callable[[int], nn.Module], int]] = {
    "gpt2": (gpt2, 12),
    "llama-3-8b": (partial(llama, **LLAMA_8B), 32),
    "llama-3-70b": (partial(llama, **SIZES), 80),
}


def batch_of(size: int, length: int, vocabulary: int = 256) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, vocabulary, (size, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "labels": tokens}


def compile_on(
    model: nn.Module, dp: int, tp: int, batch: dict[str, torch.Tensor], backend: Any, cluster: str, pp: int = 1
) -> ParallelModule:
    mesh = autopar.virtual_mesh(**({"pp": pp} if pp > 1 else {}), dp=dp, tp=tp)
    return autopar.compile(model, mesh, example_inputs=batch, backend=backend, cluster=Cluster.named(cluster))


def phases(options: argparse.Namespace) -> tuple[list[dict[str, Any]], float]:
    """One row per phase of one compile, and the seconds of the whole."""
    make, num_layers = MODELS[options.model]
    model, batch = make(options.layers or num_layers), batch_of(options.batch, options.length)
    start, start_cpu = time.perf_counter(), time.process_time()
    parallel = compile_on(model, options.dp, options.tp, batch, "eager", options.cluster, options.pp)
    total, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    steps = (*parallel.compiled.steps, *parallel.compiled.schedule_steps)
    seconds = {f"{step.number} {step.name}": step.seconds for step in steps}
    seconds["checks after each pass, the plan, the rest"] = total - sum(seconds.values())
    seconds |= {"total": total, "total, CPU time": cpu}  # far apart on a busy machine
    return [{"phase": name, "seconds": value} for name, value in seconds.items()], total


def structures(num_layers: int, options: argparse.Namespace) -> dict[str, Any]:
    """How often a backend is called in one training step of a narrow model of `num_layers`."""
    calls: list[GraphModule] = []

    def counting(module: GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        calls.append(module)
        return module

    batch = batch_of(options.dp * 2, 16)
    start = time.perf_counter()
    parallel = compile_on(gpt2(num_layers, width=64, num_heads=4, vocabulary=256), options.dp, options.tp, batch, counting, options.cluster)
    seconds = time.perf_counter() - start
    parallel(**batch).loss.backward()
    schedule = parallel.compiled.schedules[0]
    return {
        "layers": num_layers,
        "ops": parallel.compiled.program.num_nodes,
        "fragments run": sum(isinstance(each, Run) for each in schedule.instructions),
        "collectives": sum(isinstance(each, Launch) for each in schedule.instructions),
        "distinct fragments": len(schedule.fragments),
        "backend calls": len(calls),
        "compile s": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument("--layers", type=int, help="in place of the model's own number")
    parser.add_argument("--batch", type=int, default=4, help="sequences in the global batch")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--cluster", default="ideal", help="see autopar.Cluster.named; ideal is a virtual mesh's own")
    parser.add_argument("--depths", nargs="*", type=int, default=[2, 6, 12], help="for the count of distinct fragments")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    options = parser.parse_args()
    rows, total = phases(options)
    layers = options.layers or MODELS[options.model][1]
    title = f"{options.model}, {layers} layers, pp{options.pp} × dp{options.dp} × tp{options.tp} virtual, eager"
    print_table(title, rows)
    counts = [structures(depth, options) for depth in options.depths]
    if counts:
        print_table("distinct structures against depth (width 64)", counts)
    write_json(options.json, {"title": title, "seconds": total, "phases": rows, "structures": counts})


if __name__ == "__main__":
    main()
