"""Which of the zoo's models autopar captures, splits and gets right: one line a model and mesh.

    python -m benchmarks.zoo                                    all models on dp2×tp2 and tp4
    python -m benchmarks.zoo t5 mamba --mesh tp4
    python -m benchmarks.zoo --docs docs/zoo.md                 the same as a table

Tiny configurations with random weights, planned on the ideal cluster, where links are free and all that can be split is.
The error is the worst of the loss and every gradient against the original model, both in float64.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import autopar
from autopar import AutoparError, Cluster, virtual_mesh
from autopar.reports.entries import Summary
from tests.support.models import language, vision
from tests.support.models.zoo import Case

MESHES = {"dp2×tp2": {"dp": 2, "tp": 2}, "tp4": {"tp": 4}}
ZOO: dict[str, Callable[..., Case]] = {**language.ZOO, **vision.ZOO}
TOLERANCE = 1e-9
SMALL = 0.01  # of a step's seconds


@dataclass(frozen=True)
class Outcome:
    """One model on one mesh. `error` is the worst relative error; `failure` the first line of what was raised, if anything was.

    `replicated` holds the names of ops that some axis does not split, those that cost most first; of ops that make up less than
    a hundredth of the step nothing is said: scalars, counts, a row of positions.
    """

    name: str
    mesh: str
    seconds: float
    error: float | None = None
    flops_split: float | None = None
    replicated: tuple[str, ...] = field(default=())
    failure: str = ""

    @property
    def is_exact(self) -> bool:
        return self.error is not None and self.error <= TOLERANCE

    def __str__(self) -> str:
        head = f"{self.name:12} {self.mesh:8} {self.seconds:6.1f} s  "
        if self.failure:
            return f"{head}{self.failure}"
        state, rest = "exact" if self.is_exact else "WRONG", ", ".join(self.replicated) or "nothing"
        return f"{head}{state} {self.error:8.1e}  flops_split {self.flops_split:5.3f}  replicated: {rest}"


def outcome(name: str, mesh: str) -> Outcome:
    """Compile one model for one virtual mesh and compare it with the original."""
    torch.manual_seed(0)
    case = ZOO[name]()
    return measured(name, case.model, dict(case.batch), mesh, MESHES[mesh])


def measured(name: str, model: nn.Module, batch: dict[str, Any], mesh: str, axes: dict[str, int]) -> Outcome:
    """`model` on one virtual mesh."""
    start = time.perf_counter()
    try:
        parallel = autopar.compile(model, virtual_mesh(**axes), example_inputs=batch, backend="eager", cluster=Cluster.ideal())
        report = parallel.verify(promote=True, **batch)
    except Exception as error:  # every model gets its line
        kind = "refused" if isinstance(error, AutoparError) else "crashed"
        return Outcome(name, mesh, time.perf_counter() - start, failure=f"{kind}: {type(error).__name__}: {_first_line(error)}")
    summary = parallel.summary()
    return Outcome(
        name,
        mesh,
        time.perf_counter() - start,
        report.worst,
        summary["flops_split"],
        _large(summary),
    )


def _large(summary: Summary) -> tuple[str, ...]:
    """Replicated ops that count, equal ones of several modules as one."""
    seconds: dict[str, float] = {}
    for entry in summary["replicated"]:
        seconds[entry["op"]] = seconds.get(entry["op"], 0.0) + entry["seconds"]
    return tuple(op for op, cost in sorted(seconds.items(), key=lambda pair: -pair[1]) if cost >= SMALL * summary["seconds"]["total"])


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")


def outcomes(names: Sequence[str], meshes: Sequence[str]) -> Iterator[Outcome]:
    return (outcome(name, mesh) for name in names for mesh in meshes)


def document(found: Sequence[Outcome]) -> str:
    """The outcomes as a Markdown page, one row a model."""
    by_model: dict[str, dict[str, Outcome]] = {}
    for each in found:
        by_model.setdefault(each.name, {})[each.mesh] = each
    meshes = list(MESHES)
    heads = ["model", "captured"]
    for mesh in meshes:
        heads += [f"worst error on {mesh}", "`flops_split`", "replicated"]
    rows = [_row(name, [each[mesh] for mesh in meshes]) for name, each in by_model.items()]
    exact = sum(all(each.is_exact for each in model.values()) for model in by_model.values())
    lines = [
        "# The zoo",
        "",
        f"{exact} of {len(by_model)} models are exact on both meshes: the loss and every gradient are within {TOLERANCE:.0e} of the",
        "original's, in float64. Tiny configurations (`tests/support/models/language.py` and `vision.py`) with random weights, planned on",
        "the ideal cluster. `flops_split` is the share of the matmul, convolution and attention FLOPs that no two ranks both compute;",
        f"of what is replicated, ops that take less than {SMALL:.0%} of the step are left out.",
        "",
        f"Written by `python -m benchmarks.zoo --docs docs/zoo.md`; torch {torch.__version__}, transformers {transformers.__version__}.",
        "Models of timm, and adapters of peft: [zoo-timm.md](zoo-timm.md).",
        "",
        *("| " + " | ".join(row) + " |" for row in [heads, ["---"] * len(heads), *rows]),
    ]
    return "\n".join(lines) + "\n"


def _row(name: str, found: Sequence[Outcome]) -> list[str]:
    cells = [name, "no" if any(each.failure for each in found) else "yes"]
    for each in found:
        if each.failure:
            cells += [each.failure, "", ""]
        else:
            error = f"{each.error:.1e}" if each.is_exact else f"{each.error:.1e}: **not exact**"
            cells += [error, f"{each.flops_split:.3f}", _codes(each.replicated)]
    return cells


def _codes(ops: Sequence[str]) -> str:
    """The ops that cost most, and how many more there are."""
    shown = ", ".join(f"`{op}`" for op in ops[:4])
    return f"{shown} and {len(ops) - 4} more" if len(ops) > 4 else shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="model", help=f"of {', '.join(ZOO)} (default: all)")
    parser.add_argument("--mesh", choices=MESHES, action="append", help="default: both")
    parser.add_argument("--docs", type=Path, help="write the table to this file")
    options = parser.parse_args()
    if unknown := [name for name in options.models if name not in ZOO]:
        parser.error(f"unknown model {unknown[0]!r}; there are {', '.join(ZOO)}")
    if options.docs and options.mesh:
        parser.error("--docs needs both meshes; leave out --mesh")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # small ops: threads only wait for each other
    found: list[Outcome] = []
    for each in outcomes(options.models or list(ZOO), options.mesh or list(MESHES)):
        found.append(each)
        print(each, flush=True)
    if options.docs:
        options.docs.write_text(document(found))


if __name__ == "__main__":
    main()
