"""What a batch of a new length costs, padded to one of a few lengths and not: GPT-2 small on two virtual ranks.

    python -m benchmarks.lengths [--lengths 12] [--to 32] [--json lengths.json]

One table: for each length, in a random order, the seconds until there is a program for it, with `pad_to`, and without for as many as
`--unpadded`; the seconds of a step, and of the plain model's on the batch itself; and how far the losses of the two are apart.
"""

from __future__ import annotations

import argparse
import copy
import random
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import autopar
from benchmarks.reporting import print_table, write_json


def gpt2_small(longest: int) -> transformers.GPT2LMHeadModel:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_positions=longest, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    return transformers.GPT2LMHeadModel(config)


def step(model: Any, batch: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Seconds of forward and backward, and the loss."""
    start = time.perf_counter()
    loss = model(**batch).loss
    loss.backward()
    seconds = time.perf_counter() - start
    model.zero_grad()
    return seconds, float(loss.detach())


def row(length: int, padded: Any, plain: Any, unpadded: Any | None, samples: int) -> dict[str, Any]:
    ids = torch.randint(50257, (samples, length))
    batch = {"input_ids": ids, "labels": ids}
    found: dict[str, Any] = {"length": length, "padded: until it runs (s)": until_it_runs(padded, batch)}
    found["not padded: until it runs (s)"] = "" if unpadded is None else until_it_runs(unpadded, batch)
    found["a padded step (s)"], loss = step(padded, batch)
    found["a plain step (s)"], wanted = step(plain, batch)
    return found | {"loss beside plain": abs(loss - wanted)}


def until_it_runs(parallel: Any, batch: dict[str, torch.Tensor]) -> float:
    """Seconds until there is a program for such a batch."""
    start = time.perf_counter()
    parallel.prepare((), batch)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, default=12)
    parser.add_argument("--to", type=int, default=32, help="the length that is padded to; batches are longer than half of it")
    parser.add_argument("--unpadded", type=int, default=2, help="how many lengths to run without padding, too")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    plain = gpt2_small(asked.to)
    mesh = autopar.virtual_mesh(dp=2)
    pad_to = autopar.PadTo(asked.to, {"input_ids": 0, "labels": -100})
    padded = autopar.compile(copy.deepcopy(plain), mesh, backend="eager", pad_to=pad_to)
    unpadded = autopar.compile(copy.deepcopy(plain), mesh, backend="eager")
    lengths = random.Random(0).sample(range(asked.to // 2 + 1, asked.to), asked.lengths)
    row(asked.to, padded, plain, None, asked.samples)  # captures
    rows = [row(each, padded, plain, unpadded if n < asked.unpadded else None, asked.samples) for n, each in enumerate(lengths)]
    print_table(f"GPT-2 small, {asked.samples} samples, padded to {asked.to}", rows)
    if asked.json is not None:
        write_json(asked.json, {"lengths": rows})


if __name__ == "__main__":
    main()
