"""How long `autopar plan` takes, and how much memory, for large models on clusters that are not here.

    python -m benchmarks.plan_time                    GPT-3 175B on 1,024 A100s and Llama-405B on 4,096 H100s, in one go
    python -m benchmarks.plan_time --sweep            and the latter on 256 to 16,384, and of 32 to 252 layers

Each is a process of its own with empty caches, capture included, from a Hugging Face config. Peak memory is the largest of the process.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import transformers

from benchmarks.reporting import print_table, write_json

GPT_175B = transformers.GPT2Config(vocab_size=50257, n_positions=2048, n_embd=12288, n_layer=96, n_head=96, use_cache=False)


def llama_405b(num_layers: int = 126) -> transformers.PretrainedConfig:
    return transformers.LlamaConfig(
        vocab_size=128256, hidden_size=16384, intermediate_size=53248, num_hidden_layers=num_layers, num_attention_heads=128,
        num_key_value_heads=8, max_position_embeddings=8192, use_cache=False,
    )  # fmt: skip


def planned(name: str, config: transformers.PretrainedConfig, cluster: str, batch: int, length: int) -> dict[str, Any]:
    """What the command says, what it took, and the mesh of its first plan."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(config.to_json_string(use_diff=False), encoding="utf-8")
        command = [sys.executable, "-m", "autopar", "plan", "--model", str(path), "--cluster", cluster, "--json"]
        command += ["--global-batch", str(batch), "--seq-len", str(length)]
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        answer = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"AUTOPAR_CACHE": folder}, check=True)
        seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    best = json.loads(answer.stdout)["plans"][0]
    return {
        "model": name,
        "devices": cluster,
        "layers": config.num_hidden_layers,
        "seconds": seconds,
        "CPU s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "GB": after.ru_maxrss / 1e6,  # the largest of all processes so far
        "mesh": " × ".join(f"{axis}{size}" for axis, size in best["mesh"].items()),
        "step s": best["step_seconds"],
        "MFU %": 100 * best["mfu"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    options = parser.parse_args()
    rows = [
        planned("GPT-3 175B", GPT_175B, "a100:1024", 1536, 2048),
        planned("Llama-405B", llama_405b(), "h100:4096", 4096, 4096),
    ]
    if options.sweep:
        rows += [planned("Llama-405B", llama_405b(), f"h100:{number}", number, 4096) for number in (256, 1024, 16384)]
        rows += [planned("Llama-405B, cut", llama_405b(layers), "h100:4096", 4096, 4096) for layers in (32, 63, 252)]
    print_table("planning", rows)
    write_json(options.json, {"rows": rows})


if __name__ == "__main__":
    main()
