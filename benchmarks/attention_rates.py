"""Adds a run of `benchmarks.gpu_kernels` to the table by which `kernels="auto"` chooses attention kernels.

    python -m benchmarks.attention_rates gpu_kernels.json
    python -m benchmarks.attention_rates gpu_kernels.json --print      the rows alone; nothing is written

The run's rows take the place of earlier rows of autopar's on the same device; rows of papers stay, and count no more there.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

from autopar.cost.hardware import attention_rates
from autopar.cost.hardware.attention_rates import OURS, Rate, read
from autopar.cost.hardware.cluster import Cluster

TABLE = Path(attention_rates.__file__).with_suffix(".csv")
# By the contestants' names in `benchmarks/gpu_speed.py`.
KERNELS = {"ours": "triton", "flash": "aten", "cudnn": "aten"}
NAMES = {"ours": OURS, "flash": "FlashAttention-2", "cudnn": "cuDNN"}


def rates_of(results: Mapping[str, Any]) -> list[Rate]:
    """Forward and backward together: rows of TFLOP/s and milliseconds of each, as `benchmarks.gpu_kernels` writes them."""
    device, run = Cluster.named(results["device"]).device.name, f"benchmarks.gpu_kernels on {results['device']}"
    timed: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in results["rows"]:
        if row["case"].startswith("attention ") and row["who"] in KERNELS and "TFLOP/s" in row:
            timed.setdefault((row["case"], row["who"]), []).append(row)
    return [_both(device, run, case, who, rows) for (case, who), rows in timed.items() if len(rows) == 2]


def _both(device: str, run: str, case: str, who: str, rows: Sequence[Mapping[str, Any]]) -> Rate:
    _, head_size, kind, length = case.split()
    milliseconds = sum(row["ms"] for row in rows)
    tflops = round(sum(row["TFLOP/s"] * row["ms"] for row in rows) / milliseconds, 1)
    return Rate(device, "both", int(head_size), kind == "causal", int(length), KERNELS[who], NAMES[who], tflops, run)


def merged(rates: Sequence[Rate], new: Sequence[Rate]) -> list[Rate]:
    """`rates` without earlier runs of ours on the devices of `new`, and `new`."""
    runs = {rate.run for rate in rates if rate.who == OURS and rate.device in {each.device for each in new}}
    return [*(rate for rate in rates if rate.run not in runs), *new]


def text_of(rates: Sequence[Rate]) -> str:
    """CSV that `read` reads."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(field.name for field in fields(Rate))
    for rate in rates:
        writer.writerow(
            f"{value:g}" if isinstance(value, float) else int(value) if isinstance(value, bool) else value for value in astuple(rate)
        )
    return out.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="what benchmarks.gpu_kernels wrote with --json")
    parser.add_argument("--print", action="store_true", dest="only_print")
    options = parser.parse_args()
    new = rates_of(json.loads(options.results.read_text(encoding="utf-8")))
    if options.only_print or not new:
        print(text_of(new) if new else "no attention was timed in this run")
        return
    TABLE.write_text(text_of(merged(read(TABLE.read_text(encoding="utf-8")), new)), encoding="utf-8")
    print(f"{len(new)} rows of {new[0].device} written to {TABLE.name}")


if __name__ == "__main__":
    main()
