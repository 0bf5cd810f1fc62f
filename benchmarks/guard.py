"""What it costs, at every call, to know that the model is still the one that was captured.

    python -m benchmarks.guard                     GPT-2 and Llama of transformers, narrow, of about 500 modules each
    python -m benchmarks.guard --json guard.json

The peer, measured in the same run and in turn, asks every module for its mode and every parameter for its dtype alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from torch import nn

from autopar.runtime.module.description import describe
from autopar.runtime.module.guard import ModelGuard
from benchmarks.reporting import print_table, write_json


def models() -> dict[str, nn.Module]:
    gpt2 = transformers.GPT2Config(n_layer=38, n_embd=16, n_head=2, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 64}
    llama = transformers.LlamaConfig(num_hidden_layers=38, num_key_value_heads=2, **sizes)
    return {"GPT-2": transformers.GPT2LMHeadModel(gpt2), "Llama": transformers.LlamaForCausalLM(llama)}


def modes_and_dtypes(model: nn.Module) -> tuple[Any, ...]:
    return tuple(module.training for module in model.modules()), tuple(parameter.dtype for parameter in model.parameters())


def milliseconds(*functions: Callable[[], Any], repeats: int = 200) -> list[float]:
    """The median time of each, taken in turn."""
    found: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for times, function in zip(found, functions, strict=True):
            start = time.perf_counter()
            function()
            times.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(times) for times in found]


def row(name: str, model: nn.Module) -> dict[str, Any]:
    guard = ModelGuard(model)
    guard.state()
    guard.captured(())
    ours, peer = milliseconds(lambda: (guard.state(), guard.trainable()), lambda: modes_and_dtypes(model))
    (anew,) = milliseconds(lambda: describe(model), repeats=5)
    return {
        "model": name,
        "modules": len(list(model.modules())),
        "unchanged (ms)": ours,
        "modes and dtypes alone (ms)": peer,
        "ratio": ours / peer,
        "after a change (ms)": anew,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [row(name, model) for name, model in models().items()]
    print_table("The guard of a model, a call", rows)
    write_json(options.json, {"rows": rows})


if __name__ == "__main__":
    main()
