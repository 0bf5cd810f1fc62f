"""Training steps of a Llama of 1.04 billion parameters in bfloat16 on one GPU: autopar beside plain PyTorch and torch.compile.

    python -m benchmarks.gpu_step --json gpu_step.json
    python -m benchmarks.gpu_step --jobs "plain, eager" "autopar, eager" --batch 2
    python -m benchmarks.gpu_step --device cpu --size tiny --jobs "plain, eager" "autopar, eager"     the rehearsal: no figures of speed

All jobs start from the same weights, see the same batches, and are alive at once; they take turns, a block of steps each, so that a GPU
that grows warm slows all of them. The first runs twice: how far the two are apart is the noise. Peak memory is taken while a job warms
up, before the next is built: what its model, gradients, optimizer and activations take. Model FLOP/s count 6 a parameter and token and
12 · layers · width · length a token for attention (Chowdhery et al., arXiv:2204.02311, appendix B), beside what the data sheet says of
dense bfloat16.

Exits with 0 when every job of autopar ran, its losses are plain PyTorch's and `verify` of a small model holds, with 1 when not, with 2
where there is no GPU.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from benchmarks.gpu_case import Place, Row, first_line
from benchmarks.gpu_place import allocated_peak, begin_peak, environment, is_good, largest_difference, without_nan
from benchmarks.reporting import print_table, write_json

WARM_UP, ROUNDS, STEPS = 3, 5, 5
# Dense bfloat16, FLOP/s, of data sheets, by a part of the device's name.
PEAK_FLOPS = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12, "MI300X": 1307e12}


@dataclass(frozen=True)
class Size:
    """A Llama with tied embeddings, and its batch."""

    layers: int
    width: int
    inner: int
    heads: int
    key_heads: int
    symbols: int
    batch: int
    length: int
    dtype: torch.dtype


SIZES = {
    "1b": Size(16, 2048, 8192, 32, 8, 32000, batch=4, length=2048, dtype=torch.bfloat16),  # Llama 3.2 1B with fewer symbols
    "tiny": Size(2, 32, 64, 4, 2, 64, batch=2, length=16, dtype=torch.float32),
}


def llama(size: Size, place: Place) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=size.layers,
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_heads,
        vocab_size=size.symbols,
        max_position_embeddings=size.length,
        tie_word_embeddings=True,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device(place.device):
        model: Any = LlamaForCausalLM(config)
    return model.to(size.dtype)


def batch_of(size: Size, place: Place, number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, size.symbols, (size.batch, size.length), generator=generator).to(place.device)
    return {"input_ids": tokens, "labels": tokens.clone()}


def plain(model: nn.Module, batch: Mapping[str, Tensor], backend: str) -> Any:
    return model if backend == "eager" else torch.compile(model, backend=backend)


def ours(model: nn.Module, batch: Mapping[str, Tensor], backend: str) -> Any:
    """On one virtual rank."""
    return autopar.compile(model, autopar.virtual_mesh(dp=1), example_inputs=batch, backend=backend)


JOBS: dict[str, tuple[Callable[..., Any], str]] = {
    "plain, eager": (plain, "eager"),
    "torch.compile": (plain, "inductor"),
    "autopar, eager": (ours, "eager"),
    "autopar, inductor": (ours, "inductor"),
}


class Job:
    """One competitor with its weights and optimizer; its losses, which nobody looks at while steps are timed."""

    def __init__(self, name: str, weights: nn.Module, size: Size, place: Place) -> None:
        self._size, self._place = size, place
        self.error, self.losses, self.seconds = "", list[Tensor](), list[float]()
        build, backend = JOBS[name.removesuffix(", again")]
        try:
            before = begin_peak(place)
            model = copy.deepcopy(weights)
            # Of the model's own parameters, which on a virtual mesh stay what they are.
            self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
            self._module = build(model, batch_of(size, place, 0), backend)
            for _ in range(WARM_UP):
                self._step()
            place.finish()
            self.peak = allocated_peak(place, before)
        except Exception as error:  # one job that fails must not hide the others
            self.error = first_line(error)

    def _step(self) -> None:
        loss = self._module(**batch_of(self._size, self._place, len(self.losses))).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(loss.detach())

    def turn(self) -> None:
        """Some steps, so that the host may run ahead of its device."""
        if self.error:
            return
        try:
            self._place.finish()
            start = time.perf_counter()
            for _ in range(STEPS):
                self._step()
            self._place.finish()
            self.seconds.append((time.perf_counter() - start) / STEPS)
        except Exception as error:
            self.error = first_line(error)


def flops_of_a_token(model: nn.Module, size: Size) -> float:
    return 6 * sum(each.numel() for each in model.parameters()) + 12 * size.layers * size.width * size.length


def peak_flops(place: Place) -> float | None:
    if not place.on_gpu:
        return None
    name = torch.cuda.get_device_name()
    return next((flops for part, flops in PEAK_FLOPS.items() if all(word in name for word in part.split())), None)


def compare(names: list[str], size: Size, place: Place, rounds: int) -> list[Row]:
    weights = llama(size, place)
    jobs = dict[str, Job]()
    for name in [*names, f"{names[0]}, again"]:
        start = time.perf_counter()
        jobs[name] = Job(name, weights, size, place)
        print(f"{name}: ready after {time.perf_counter() - start:.0f} s", file=sys.stderr)
    for _ in range(rounds):
        for job in jobs.values():
            job.turn()
    flops, most, tokens = flops_of_a_token(weights, size), peak_flops(place), size.batch * size.length
    wanted = jobs[names[0]].losses
    return [_row(name, job, wanted, tokens, flops, most) for name, job in jobs.items()]


def _row(name: str, job: Job, wanted: list[Tensor], tokens: int, flops: float, most: float | None) -> Row:
    if job.error:
        return {"job": name} | dict.fromkeys(("ms", "tokens/s", "MFU", "peak MB", "loss", "off by"), math.nan) | {"error": job.error}
    seconds = statistics.median(job.seconds)
    off = largest_difference([*map(float, job.losses)], [*map(float, wanted)])
    return {
        "job": name,
        "ms": 1e3 * seconds,
        "tokens/s": tokens / seconds,
        "MFU": math.nan if most is None else tokens / seconds * flops / most,
        "peak MB": job.peak / 1e6,
        "loss": float(job.losses[-1]),
        "off by": off,
        "error": "",
    }


def verified(place: Place, backend: str) -> str:
    """What `verify` says of a small Llama in float32 on this device, empty where all is equal."""
    size = SIZES["tiny"]
    batch = batch_of(size, place, 0)
    try:
        report = ours(llama(size, place), batch, backend).verify(**batch)
    except Exception as error:
        return first_line(error)
    return "" if report else str(report)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--batch", type=int, help="sequences, in place of the size's")
    parser.add_argument("--length", type=int, help="tokens of each, likewise")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path, help="write the numbers here")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here; --device cpu --size tiny rehearses this", file=sys.stderr)
        return 2
    place, size = Place(options.device), SIZES[options.size]
    changed = {name: value for name in ("batch", "length") if (value := getattr(options, name)) is not None}
    size = Size(**{**vars(size), **changed})
    about = environment(place, size=options.size, dtype=str(size.dtype))
    print(json.dumps(about))
    backends = sorted({JOBS[name][1] for name in options.jobs if JOBS[name][0] is ours})
    wrong = {backend: found for backend in backends if (found := verified(place, backend))}
    for backend, found in wrong.items():
        print(f"verify of a small model on {backend}:\n{found}", file=sys.stderr)
    rows = compare(options.jobs, size, place, options.rounds)
    print_table(f"Llama, {size.batch} × {size.length} tokens, {size.dtype}", rows)
    write_json(options.json, {"about": about, "verify": wrong, "rows": without_nan(rows)})
    return 0 if not wrong and all(is_good(row, size.dtype) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
