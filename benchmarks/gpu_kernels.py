"""Our kernels on one GPU: how accurate, and how fast beside PyTorch's own, named and forced. Made for eight minutes.

    python -m benchmarks.gpu_kernels --json gpu_kernels.json
    python -m benchmarks.gpu_kernels --only attention --seconds 200
    python -m benchmarks.gpu_kernels --device cpu --tiny --workers 1      no GPU: shows that the script runs, and nothing else

First every check of accuracy and everything that has to be compiled, in several processes at once; then what is timed, alone. A case
that fails, hangs or breaks its device is a row with its error. No case is started after `--seconds`; what was left out is listed.
Exits with 0 when every check holds, with 1 when not or when a case of ours failed, with 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_accuracy import accuracy_cases
from benchmarks.gpu_attention_accuracy import attention_accuracy_cases
from benchmarks.gpu_block_sparse import block_sparse_cases
from benchmarks.gpu_case import AGAIN, Case, Place, Row
from benchmarks.gpu_speed import speed_cases
from benchmarks.gpu_workers import Order, answers
from benchmarks.reporting import print_table, write_json

# Of the time, what checks and compiling may take before what is timed begins.
FIRST_SHARE = 0.5
COMPILE_LIMIT_SECONDS, TIMED_LIMIT_SECONDS = 100.0, 60.0
UNITS = {"TFLOP/s": "matmul", "GB/s": "copy"}


def every_case(place: Place) -> list[Case]:
    return [*attention_accuracy_cases(place), *accuracy_cases(place), *speed_cases(place), *block_sparse_cases(place)]


def measure(options: argparse.Namespace, place: Place) -> dict[str, Any]:
    """All rows, and the names of what was not run. Written to the file as it grows."""
    begin = time.monotonic()
    wanted = [case for case in every_case(place) if options.only in case.name or case.name == "ceilings"]
    cases = [case for case in wanted if options.part in (None, case.part)]
    checks = [Order(case.name) for case in cases if case.part == "accuracy"]
    timed = [Order(case.name) for case in cases if case.part == "speed"]
    compiles = [Order(order.name, only_compile=True) for order in timed] if place.on_gpu else []
    phases = (
        ([*checks, *compiles], options.workers, begin + FIRST_SHARE * options.seconds, COMPILE_LIMIT_SECONDS),
        (timed, 1, begin + options.seconds, TIMED_LIMIT_SECONDS),
    )
    results: dict[str, Any] = {"device": device_name(place), "tiny": place.tiny, "rows": []}
    for orders, num_workers, until, limit_seconds in phases:
        left = {order: None for order in orders}
        for answer in answers(every_case, place, orders, num_workers, until, limit_seconds):
            del left[answer.order]
            results["rows"] += answer.rows
            results["seconds"] = time.monotonic() - begin
            write_json(options.json, results)
        results.setdefault("left_out", []).extend(order.name for order in left if not order.only_compile)
    results["rows"] = with_fractions(results["rows"])
    results["noise"] = noise(results["rows"])
    write_json(options.json, results)
    return results


def device_name(place: Place) -> str:
    return torch.cuda.get_device_name() if place.on_gpu else "cpu"


def with_fractions(rows: Sequence[Row]) -> list[Row]:
    """Rates beside the rate of a copy or of a matrix product on the same device."""
    ceilings = {unit: row[unit] for unit, name in UNITS.items() for row in rows if row.get("case") == name and unit in row}
    return [row | {f"of {UNITS[unit]}": row[unit] / ceilings[unit] for unit in UNITS if unit in row and unit in ceilings} for row in rows]


def noise(rows: Sequence[Row]) -> dict[str, float]:
    """How far the second time of a baseline is from the first, relative: the median and the largest."""
    times = {(row["case"], row["direction"], row["who"]): row["ms"] for row in rows if "ms" in row}
    found = [
        abs(again / times[case, direction, who.removesuffix(AGAIN)] - 1) for (case, direction, who), again in times.items() if AGAIN in who
    ]
    return {"median": statistics.median(found), "largest": max(found)} if found else {}


# ---- what is printed


def accuracy_table(rows: Sequence[Row]) -> list[Row]:
    """One line a kernel and dtype: how many numbers were compared, how many are off, the largest share of what is allowed."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row["part"] == "accuracy":
            groups[row["kernel"], row["dtype"]].append(row)
    return [
        {
            "kernel": kernel,
            "dtype": dtype,
            "compared": len(group),
            "off": sum(not row["ok"] for row in group),
            "worst error / allowed": max((row["error"] / row["allowed"] for row in group if row["allowed"]), default=0.0),
        }
        for (kernel, dtype), group in groups.items()
    ]


def off_table(rows: Sequence[Row]) -> list[Row]:
    return [{name: row[name] for name in row if name != "part"} for row in rows if row["part"] == "accuracy" and not row["ok"]]


def speed_tables(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """By unit and direction: one line a case, a column a contestant; the second run of one of them is the noise."""
    tables: dict[str, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        unit = next((unit for unit in UNITS if unit in row), "")
        if unit:
            heading = f"{unit}, {row['direction']}; in brackets of the ceiling"
            line = tables[heading].setdefault(row["case"], {"case": row["case"]})
            line[row["who"]] = f"{row[unit]:.0f} ({row.get(f'of {UNITS[unit]}', 0.0):.2f})"
    return {heading: _even(list(table.values())) for heading, table in tables.items()}


def _even(lines: Sequence[Row]) -> list[Row]:
    """Every line with every column."""
    heads = dict.fromkeys(head for line in lines for head in line)
    return [{head: line.get(head, "-") for head in heads} for line in lines]


def failure_table(rows: Sequence[Row]) -> list[Row]:
    return [
        {name: row.get(name, "") for name in ("part", "case", "who", "error")} for row in rows if "error" in row and "allowed" not in row
    ]


def show(results: dict[str, Any]) -> None:
    rows = results["rows"]
    print_table(f"accuracy on {results['device']}, against FlashAttention's rule", accuracy_table(rows))
    for heading, table in speed_tables(rows).items():
        print_table(heading, table)
    print_table("off", off_table(rows))
    print_table("failed", failure_table(rows))
    absent = sorted({row["who"] for row in rows if "absent" in row})
    print(f"\nabsent here: {', '.join(absent) or 'nothing'}\nleft out for lack of time: {', '.join(results['left_out']) or 'nothing'}")
    shares = ", ".join(f"{name} {share:.1%}" for name, share in results["noise"].items())
    print(f"noise, of a baseline timed twice: {shares or 'not measured'}\n{results['seconds']:.0f} s")


def is_good(rows: Sequence[Row]) -> bool:
    """Whether all checks hold and nothing of ours failed; a baseline may."""
    ours = [row for row in failure_table(rows) if row["who"] in ("", "ours")]
    return not off_table(rows) and not ours


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write every row to this file, as they come")
    parser.add_argument("--seconds", type=float, default=460.0, help="start no case after so many")
    parser.add_argument("--workers", type=int, default=10, help="processes that check and compile at once")
    parser.add_argument("--only", default="", help="only cases whose name has this in it")
    parser.add_argument("--part", choices=("accuracy", "speed"), help="this alone")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here; this benchmark needs one GPU, or --device cpu --tiny to try the script", file=sys.stderr)
        return 2
    # Each process compiles by itself: they are as many as there are cores to spare.
    os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    results = measure(options, Place(options.device, options.tiny))
    show(results)
    return 0 if is_good(results["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
