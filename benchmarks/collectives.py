"""Collectives as the cost model prices them, against NCCL as others measured it (benchmarks/published/nccl_measured.csv).

    python -m benchmarks.collectives                  medians by system and by collective
    python -m benchmarks.collectives --rows           every row
    python -m benchmarks.collectives --json out.json

nccl_reported.csv holds one more system, which is not among "all". Errors are relative, |priced / measured - 1|. The peer is the plain
model: a ring of the same α per step and the same β, nothing else. `held out`: the link is fitted to every other size of
the series, and tested on the sizes between.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from autopar.cost.hardware.cluster import Cluster, Link
from autopar.cost.hardware.link_fit import Sample, fit_link
from autopar.cost.hardware.links import CommunicationKind
from autopar.cost.model import CostModel
from autopar.ir.mesh import Mesh
from benchmarks.reporting import print_table, write_json

PUBLISHED = Path(__file__).parent / "published"
_CLUSTERS = {"GB200": "gb200", "B200": "b200", "H200": "h200", "H100": "h100", "A100": "a100", "H20 ": "h100"}  # an H20 has an H100's links
_TRANSFERS: dict[str, CommunicationKind] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "p2p": "send",
}
# Rows that are no message between ranks, and a row of a thousand messages at once.
_LEFT_OUT = ("host to device", "device to host", "device-local", "ib_write_bw", "all_reduce 1000x")
# What a bandwidth test of two GPUs copies; the rows do not say.
_LONG_BYTES = 1 << 30
_SERIES = 10


@dataclass(frozen=True)
class Measured:
    """One row: a collective of `num_bytes` in all (nccl-tests' size) and its seconds. `may_switch`: additions in the switch were on."""

    system: str
    transfer: CommunicationKind
    num_ranks: int
    num_nodes: int
    num_bytes: float
    seconds: float
    may_switch: bool

    @property
    def cluster(self) -> str:
        return next(name for gpu, name in _CLUSTERS.items() if gpu in self.system)

    @property
    def local_bytes(self) -> tuple[float, float]:
        part = self.num_bytes / self.num_ranks
        if self.transfer == "all_gather":
            return part, self.num_bytes
        return self.num_bytes, part if self.transfer == "reduce_scatter" else self.num_bytes


def measured(table: str = "nccl_measured") -> list[Measured]:
    """The rows of a published table that time messages between ranks."""
    with (PUBLISHED / f"{table}.csv").open(encoding="utf-8") as file:
        return [_row(row) for row in csv.DictReader(file) if not row["collective"].startswith(_LEFT_OUT)]


def _row(row: dict[str, str]) -> Measured:
    transfer, num_ranks = _TRANSFERS[row["collective"].split()[0]], int(row["ranks"])
    num_bytes = float(row["bytes"] or _LONG_BYTES)
    # Bus bandwidth is what a ring would send over the time: github:NVIDIA/nccl-tests doc/PERFORMANCE.md.
    share = 1.0 if transfer == "send" else (num_ranks - 1) / num_ranks * (2 if transfer == "all_reduce" else 1)
    rate = float(row["busbw_GBps"]) / (2 if "bidirectional" in row["collective"] else 1) if row["busbw_GBps"] else 0.0
    seconds = float(row["time_us"]) * 1e-6 if row["time_us"] else share * num_bytes / (rate * 1e9)
    may_switch = "off" not in row["collective"] and "disabled" not in row["tool_note"]
    num_nodes = int(row["system"].split()[0]) if " nodes x " in row["system"] else 1
    return Measured(row["system"], transfer, num_ranks, num_nodes, num_bytes, seconds, may_switch)


def model(row: Measured, change: Callable[[Link], Link] = lambda link: link) -> float:
    """Seconds that the cost model gives for `row` on the built-in cluster, its links changed by `change`."""
    cluster = Cluster.named(row.cluster)
    inner = cluster.inner if row.may_switch else replace(cluster.inner, in_switch=None)
    cluster = replace(cluster, inner=change(inner), outer=change(cluster.outer), ranks_per_node=row.num_ranks // row.num_nodes)
    mesh = Mesh((("dp", row.num_nodes), ("tp", row.num_ranks // row.num_nodes)))
    return CostModel(cluster, mesh).collective(row.transfer, mesh.names, *row.local_bytes).seconds


def _plain(link: Link) -> Link:
    return Link(link.latency_seconds, link.bytes_per_second)


def error(row: Measured, seconds: float) -> float:
    return abs(seconds / row.seconds - 1)


def held_out(rows: Sequence[Measured]) -> Iterator[float]:
    """Errors on every other row of one series, of a link fitted to the rows between, both ways round."""
    launch = Cluster.named(rows[0].cluster).device.launch_seconds
    samples = [Sample(row.transfer, row.num_ranks, *row.local_bytes, row.seconds - launch) for row in rows]
    for known, asked in ((samples[::2], samples[1::2]), (samples[1::2], samples[::2])):
        link = fit_link(known, is_nccl=True)
        yield from (abs(sample.error(link)) for sample in asked)


def groups_of(rows: Sequence[Measured]) -> dict[str, list[Measured]]:
    """All rows, those of each system, and those of each collective."""
    groups: dict[str, list[Measured]] = {"all": list(rows)}
    for row in rows:
        groups.setdefault(row.system, []).append(row)
        groups.setdefault(row.transfer, []).append(row)
    return groups


def summary(groups: Mapping[str, Sequence[Measured]]) -> list[dict[str, Any]]:
    """Median errors of each group."""
    return [
        {
            "rows of": name,
            "number": len(group),
            "median %": 100 * median(error(row, model(row)) for row in group),
            "worst %": 100 * max(error(row, model(row)) for row in group),
            "plain ring, median %": 100 * median(error(row, model(row, _plain)) for row in group),
            "held out, median %": 100 * median(held_out(group)) if _is_series(group) else "-",
        }
        for name, group in groups.items()
    ]


def _is_series(rows: Sequence[Measured]) -> bool:
    """Whether these are one collective of many sizes on one node."""
    return len({(row.system, row.transfer, row.num_ranks) for row in rows}) == 1 and len(rows) > _SERIES and rows[0].num_nodes == 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--json", type=Path, help="write the medians to this file")
    options = parser.parse_args()
    rows = measured()
    if options.rows:
        lines = [
            {
                "row": f"{row.system}: {row.transfer}",
                "ranks": row.num_ranks,
                "MiB": row.num_bytes / 2**20,
                "measured us": row.seconds * 1e6,
                "priced us": model(row) * 1e6,
                "error %": 100 * error(row, model(row)),
            }
            for row in rows
        ]
        print_table("every row", lines)
    reported = measured("nccl_reported")
    medians = summary(groups_of(rows) | {reported[0].system: reported})
    print_table("priced against measured", medians)
    write_json(options.json, {"medians": medians})


if __name__ == "__main__":
    main()
