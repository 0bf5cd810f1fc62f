"""Bytes of parameters, gradients and optimizer state by level of ZeRO, against table 1 of arXiv:1910.02054.

    python -m benchmarks.zero_bytes [7.5B | 1T]

fp16 parameters and gradients, Adam in float32, read off the schedule of a captured GPT. It has so many parameters in few, wide layers:
what the table (`published/zero_2019_table1.csv`) counts is bytes a parameter. There are two microbatches: of one alone gradients are
cut as they come, at level 1 too.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import autopar
from autopar.ir.instructions import Add, Update
from examples.gpt import GPT

TABLE = Path(__file__).parent / "published" / "zero_2019_table1.csv"
LEVELS = {"Pos": 1, "Pos+g": 2, "Pos+g+p": 3}
# Layers, width and vocabulary; 1,024 ranks divide the last two.
SIZES = {"7.5B": (3, 14336, 3072), "1T": (2, 203776, 8192)}
LENGTH = 1024


@dataclass(frozen=True)
class Entry:
    """A cell of the table: `printed` gigabytes of a rank, and the least that this print can mean otherwise."""

    model: str
    num_ranks: int
    stage: str
    printed: float
    rounding: float

    def agrees(self, gigabytes: float) -> bool:
        """Within 1 %, or half the last printed digit."""
        return abs(gigabytes - self.printed) <= max(0.01 * self.printed, self.rounding)


def entries() -> Iterator[Entry]:
    with TABLE.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            text = row["per_device_GB"]
            digits = len(text.partition(".")[2])
            yield Entry(row["model"], int(row["dp"]), row["stage"], float(text), 0.5 * 10**-digits)


def gigabytes(entry: Entry) -> dict[str, float]:
    """Of one rank, by what they are of; copies are those that ops read in float16."""
    num_layers, width, num_symbols = SIZES[entry.model]
    with torch.device("meta"):
        model = GPT(num_symbols, num_layers, width, width // 128, LENGTH)
        tokens = torch.zeros(2 * entry.num_ranks, LENGTH, dtype=torch.int64)
    parallel = autopar.compile(
        model,
        autopar.virtual_mesh(dp=entry.num_ranks),
        example_inputs={"tokens": tokens, "labels": tokens},
        backend="eager",
        zero=LEVELS[entry.stage],
        precision=autopar.MixedPrecision(param=torch.float16, grad=torch.float16),
        optimizer=torch.optim.Adam,
        num_microbatches=2,
    )
    updating = parallel.compiled.updating
    assert updating is not None
    (schedule,) = updating.places
    sums = {each.target for each in schedule.instructions if isinstance(each, Add)}
    updated = {name for each in schedule.instructions if isinstance(each, Update) for name in each.gradients}
    memory = parallel.summary()["memory"]
    found = {
        "masters": memory["parameters"],
        "copies": memory["parameter_copies"],
        "gradients": max(sum(map(schedule.bytes_of, each)) for each in (sums, updated)),
        "optimizer state": memory["optimizer_state"],
    }
    return {name: num_bytes / 1e9 for name, num_bytes in found.items()}


def main(names: list[str]) -> None:
    print(f"{'model':>6} {'dp':>5} {'stage':<8} {'printed':>8} {'here':>9}   masters + copies + gradients + optimizer state, GB")
    wrong = 0
    for entry in entries():
        if not names or entry.model in names:
            parts = gigabytes(entry)
            total = sum(parts.values())
            wrong += not entry.agrees(total)
            text = " + ".join(f"{each:.4g}" for each in parts.values())
            mark = "" if entry.agrees(total) else "   <-- differs"
            print(f"{entry.model:>6} {entry.num_ranks:>5} {entry.stage:<8} {entry.printed:>8g} {total:>9.4g}   {text}{mark}", flush=True)
    print("all agree within 1 % or half the last printed digit" if not wrong else f"{wrong} differ")


if __name__ == "__main__":
    main(sys.argv[1:])
