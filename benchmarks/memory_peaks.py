"""The peak of a step as it is predicted, beside what the allocator says: models of the zoo on small meshes of virtual ranks.

python -m benchmarks.memory_peaks [--models gpt2,llama] [--backends eager,inductor] [--write docs/memory-peaks.md]

Forward and backward in float32, the first step of compiled code left out. A row is the rank that is furthest off.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch

import autopar
from tests.support.models import vision, zoo

MODELS = {**zoo.ZOO, **vision.ZOO}
MESHES: tuple[dict[str, int], ...] = ({"tp": 2}, {"dp": 2}, {"pp": 2})


def row(name: str, axes: dict[str, int], backend: str) -> tuple[float, str]:
    """How far off the prediction is on the worst rank, and the line of the table."""
    torch.manual_seed(0)
    case = MODELS[name](2).to(torch.float32)
    parallel = autopar.compile(case.model, autopar.virtual_mesh(**axes), example_inputs=case.batch, backend=backend)
    if backend != "eager":
        parallel(**case.batch).loss.backward()
    found = parallel.memory(measure=case.batch).measured.values()
    predicted, tracked, at = max(found, key=lambda each: abs(each.predicted_bytes / each.tracked_bytes - 1))
    error = predicted / tracked - 1
    mesh = " × ".join(f"{axis}{size}" for axis, size in axes.items())
    return error, f"| {name} | {mesh} | {backend} | {predicted / 1e3:.1f} | {tracked / 1e3:.1f} | {error:+.2%} | {at.split(' (')[0]} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--backends", default="eager")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    lines = ["| model | mesh | backend | predicted kB | tracked kB | off | the peak is at |", "|---|---|---|---|---|---|---|"]
    errors: list[float] = []
    for backend in options.backends.split(","):
        for name in options.models.split(","):
            for axes in MESHES:
                error, line = row(name, axes, backend)
                errors.append(abs(error))
                lines.append(line)
                print(line, flush=True)
    worst = sorted(errors)[max(int(0.95 * len(errors)) - 1, 0)]
    lines += ["", f"Median {statistics.median(errors):.2%}, 95th percentile {worst:.2%}, most {max(errors):.2%} of {len(errors)} cases."]
    print(lines[-1])
    if options.write is not None:
        options.write.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
