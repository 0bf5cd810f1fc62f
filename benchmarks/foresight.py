"""Predicted steps against published ones, on hardware that is not here.

    python -m benchmarks.foresight                                   all tables, a line a row, errors by table
    python -m benchmarks.foresight --tables megatron_2021_table1     one of them
    python -m benchmarks.foresight --published FOLDER --json FILE    tables of these names and columns from elsewhere

Models are captured from plain PyTorch at the shapes of the tables (`benchmarks/published_models.py`), under the plans that people wrote for
them. Errors are (predicted − printed) / printed of step seconds. Constants and profiles are those of `autopar/foresight/constants.py`: one
set for each kind of hardware, one profile for each stack of software.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.published_gpts import korthikanti, korthikanti_layers, megatron, zero_bubble
from benchmarks.published_llamas import memories, overestimated, right_of_runs, subsets, ultrascale
from benchmarks.published_rows import Case, Compared, Tables
from benchmarks.reporting import print_table, write_json

PUBLISHED = Path(__file__).parent / "published"
TABLES: dict[str, Callable[[Tables], Iterator[Case | Compared]]] = {
    "megatron_2021_table1": megatron,
    "korthikanti_2022_table5_iteration": korthikanti,
    "korthikanti_2022_table4_layer_times": korthikanti_layers,
    "zero_bubble_table4": zero_bubble,
    "ultrascale_h100_all_runs": ultrascale,
}


def tables(folder: Path) -> Tables:
    """Rows by the name of the file, without its ending."""
    found: Tables = {}
    for path in sorted(folder.glob("*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            found[path.stem] = list(csv.DictReader(file))
    return found


def summary(found: list[float], name: str) -> dict[str, Any]:
    """The distribution of errors, in percent."""
    errors = sorted(map(abs, found))
    place = min(len(errors) - 1, round(0.9 * (len(errors) - 1)))
    return {"table": name, "rows": len(errors), "median %": 100 * median(errors), "p90 %": 100 * errors[place], "worst %": 100 * errors[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--published", type=Path, default=PUBLISHED, help="a folder with tables of these names")
    parser.add_argument("--tables", nargs="+", choices=list(TABLES), default=list(TABLES))
    parser.add_argument("--quiet", action="store_true", help="the errors by table alone")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    options = parser.parse_args()
    given = tables(options.published)
    found: dict[str, list[Compared]] = {}
    start = time.perf_counter()
    for name in options.tables:
        if name in given:
            found[name] = [row.compared() if isinstance(row, Case) else row for row in TABLES[name](given)]
            if not options.quiet:
                print_table(name, [row.line() for row in found[name]])
    lines = [summary([row.error for row in rows], name) for name, rows in found.items() if rows]
    held: list[dict[str, Any]] = []
    right: dict[str, Any] = {}
    if runs := found.get("ultrascale_h100_all_runs"):
        lines += [summary([row.error for row in rows], name) for name, rows in subsets(runs).items() if rows]
        held = [summary(errors, name) for name, errors in memories(runs).items() if errors]
        right = right_of_runs(given)
        print_table("of the H100 runs", [overestimated(runs)])
        print_table("whether they ran", [right])
        print_table("errors of their memory", held)
    print_table(f"errors of step time, {time.perf_counter() - start:.0f} s in all", lines)
    write_json(
        options.json,
        {"errors": lines, "memory": held, "runs": right, "rows": {name: [row.line() for row in rows] for name, rows in found.items()}},
    )


if __name__ == "__main__":
    main()
