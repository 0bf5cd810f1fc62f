"""What `offload="parameters"` takes off the device: peaks of five plans without and with it, byte for byte.

    python -m benchmarks.offload_parameters          docs/offload.md

GPT-2 and Llama of 8 layers of 256, 4 × 64 tokens, 512 symbols, float32, backend "eager", cluster "cpu". Peaks of forward and backward are
those of the allocator's events, of the rank that takes most; those of a step with Adam are what `parallel.memory()` predicts.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

import autopar

PLANS: tuple[tuple[str, dict[str, int], dict[str, Any]], ...] = (
    ("GPT-2", {"dp": 2}, {"zero": 0}),
    ("Llama", {"dp": 2}, {"zero": 0}),
    ("GPT-2", {"dp": 2}, {"zero": 3}),
    ("Llama", {"tp": 2}, {}),
    ("GPT-2", {"pp": 2}, {"num_microbatches": 2}),
)


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "GPT-2":
        config = transformers.GPT2Config(n_layer=8, n_embd=256, n_head=8, vocab_size=512, n_positions=128, use_cache=False)
        return transformers.GPT2LMHeadModel(config)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_hidden_layers=8, hidden_size=256, intermediate_size=688, num_attention_heads=8, vocab_size=512, use_cache=False
        )
    )


def main() -> None:
    tokens = torch.randint(0, 512, (4, 64))
    batch = {"input_ids": tokens, "labels": tokens}
    print("MB of a rank: forward and backward, tracked, without → with; a step with Adam, predicted, without → with; parameters away")
    for name, axes, options in PLANS:
        pair: list[autopar.Memory] = []
        for offload in (None, "parameters"):
            given: dict[str, Any] = {"backend": "eager", "cluster": "cpu", "offload": offload, **options}
            parallel = autopar.compile(model_of(name), autopar.virtual_mesh(**axes), example_inputs=batch, **given)
            pair.append(parallel.memory(measure=batch))
            bytes_of = [sum(each.bytes_of(n) for n in each.inputs if each.memory_of(n) != "device") for each in parallel.compiled.schedules]
        tracked = " → ".join(f"{max(each.tracked_bytes for each in memory.measured.values()) / 1e6:.1f}" for memory in pair)
        step = " → ".join(f"{memory.peak_bytes / 1e6:.1f}" for memory in pair)
        print(f"{name}, {axes}, {options}: {tracked}; {step}; {max(bytes_of) / 1e6:.1f}", flush=True)


if __name__ == "__main__":
    main()
