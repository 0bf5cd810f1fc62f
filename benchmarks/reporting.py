"""What every benchmark here does with its numbers: the machine they belong to, a table, a JSON file."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """Where and when the numbers were measured. `load` is the number of running processes over the last minute."""
    return {
        "date": date.today().isoformat(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def print_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows with equal keys, one line each."""
    if not rows:
        return
    heads = list(rows[0])
    cells = [heads, *([_text(row[head]) for head in heads] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(heads))]
    print(f"\n{title}")
    for line in cells:
        padded = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        print("  " + "  ".join([line[0].ljust(widths[0]), *padded[1:]]))


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write_json(path: Path | None, results: Mapping[str, Any]) -> None:
    """The results with the machine they were measured on; nothing where there is no path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"machine": machine(), **results}, indent=2) + "\n")
