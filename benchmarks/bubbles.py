"""Bubble rates of pipeline schedules against those that the zero-bubble paper prints (arXiv:2401.10241, table 5).

    python -m benchmarks.bubbles [--json FILE]

The paper calculates them from profiled times (appendix D): no communication but between stages, which never blocks; 1F1B's backward
is B and W as one; the rate is the idle share of the longest span of a rank. Its ZB-1p and ZB-2p, found by search, stand beside
`schedule="auto"` under the same memory, p and 2p times what a forward saves.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.pipeline.auto_schedule import auto_schedule
from autopar.pipeline.check import check_pipeline
from autopar.pipeline.cost import PipelineCost
from autopar.pipeline.schedules import GENERATORS, interleaved
from autopar.pipeline.simulate import simulate
from benchmarks.reporting import machine, print_table

PUBLISHED = Path(__file__).parent / "published"
NUM_CHUNKS = 3


@dataclass(frozen=True)
class Run:
    """One row of the paper's profile: seconds of one microbatch, and bytes per element that a layer saves, up to a common factor."""

    model: str
    num_ranks: int
    num_microbatches: int
    forward: float
    input_gradient: float
    weight_gradient: float
    communication: float
    saved: float
    weight_saved: float
    # By the paper's name of the schedule.
    rates: dict[str, float]

    def cost(self, num_chunks: int = 1) -> PipelineCost:
        return PipelineCost.uniform(
            self.num_ranks * num_chunks,
            self.forward / num_chunks,
            self.input_gradient / num_chunks,
            self.weight_gradient / num_chunks,
            self.communication,
            self.saved,
            self.weight_saved,
        )


def published() -> list[Run]:
    """The six rows."""
    sizes = {row["model"]: row for row in _rows("zero_bubble_table3_settings")}
    rates = {(row["model"], row["m"], row["schedule"]): float(row["bubble_rate"]) for row in _rows("zero_bubble_table5_bubble_rates")}
    runs: list[Run] = []
    for row in _rows("zero_bubble_profiled_times"):
        hidden, heads, length = (int(sizes[row["model"]][name]) for name in ("hidden", "heads", "seq"))
        forward, input_gradient, weight_gradient, communication = (float(row[name]) / 1000 for name in ("T_F", "T_B", "T_W", "T_comm"))
        # Section 2 of the paper: a forward saves 34h + 5as, and a W frees 32h of that.
        saved, weight_saved = 34.0 * hidden + 5.0 * heads * length, 32.0 * hidden
        own = {schedule: rate for (model, m, schedule), rate in rates.items() if (model, m) == (row["model"], row["m"])}
        costs = (forward, input_gradient, weight_gradient, communication, saved, weight_saved)
        runs.append(Run(row["model"], int(row["p"]), int(row["m"]), *costs, rates=own))
    return runs


def _rows(name: str) -> list[dict[str, str]]:
    with open(PUBLISHED / f"{name}.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def drawn_rates(run: Run) -> dict[str, float]:
    """Ours, of the schedules drawn by hand."""
    names = {"1F1B": "1f1b", "ZB-H1": "zb-h1", "ZB-H2": "zb-h2"}
    schedules = {name: GENERATORS[own](run.num_ranks, run.num_microbatches) for name, own in names.items()}
    rates = {name: simulate(schedule, run.cost()).bubble_rate for name, schedule in schedules.items()}
    chunked = interleaved(run.num_ranks, run.num_microbatches, NUM_CHUNKS)
    return rates | {"1F1B-I": simulate(chunked, run.cost(NUM_CHUNKS)).bubble_rate}


def found_rate(run: Run, limit: int) -> tuple[float, float]:
    """The rate of `schedule="auto"` with memory for `limit` · p forwards, proved to keep it, and the seconds that the search took."""
    budget = limit * run.num_ranks * run.saved
    begin = time.perf_counter()
    schedule = auto_schedule(run.cost(), run.num_microbatches, budget_bytes=budget)
    seconds = time.perf_counter() - begin
    check_pipeline(schedule, run.cost(), budget)
    return simulate(schedule, run.cost()).bubble_rate, seconds


def compare(run: Run) -> Iterator[dict[str, Any]]:
    """One line a schedule."""
    for name, rate in drawn_rates(run).items():
        yield _line(run, name, rate, "")
    for limit in (1, 2):
        rate, seconds = found_rate(run, limit)
        yield _line(run, f"ZB-{limit}p", rate, f"{seconds:.1f}")


def _line(run: Run, schedule: str, rate: float, seconds: str) -> dict[str, Any]:
    where = {"model": run.model, "p": run.num_ranks, "m": run.num_microbatches, "schedule": schedule}
    return where | {"printed": f"{run.rates[schedule]:.4f}", "ours": f"{rate:.4f}", "search s": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the numbers to this file")
    arguments = parser.parse_args()
    lines = [line for run in published() for line in compare(run)]
    print_table("bubble rates", lines)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"machine": machine(), "rates": lines}, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
