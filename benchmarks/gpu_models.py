"""Whole models on one GPU, over virtual ranks: each compared with the user's model there. Made for three minutes on 16 cores.

    python -m benchmarks.gpu_models --json gpu_models.json
    python -m benchmarks.gpu_models --only mixtral --workers 1
    python -m benchmarks.gpu_models --device cpu --only gpt2 --workers 2      the rehearsal

One line a model, mesh and backend. `error` is the worst of the loss and every gradient in the model's float32, `promoted` the same in
float64 (by eager alone: another compile of everything under Inductor). Planned on the ideal cluster, on which all that can be split is,
with the kernels that a GPU gets. Exits with 0 when all hold, with 1 when not, with 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

import autopar
from benchmarks.gpu_case import Case, Place, Row
from benchmarks.gpu_workers import Order, answers
from benchmarks.reporting import print_table, write_json
from tests.support.models import language, vision, zoo

TOLERANCE, PROMOTED_TOLERANCE = 1e-4, 1e-9
LIMIT_SECONDS = 150.0
DP_TP = {"dp": 2, "tp": 2}
BACKENDS = ("eager", "inductor")


@dataclass(frozen=True)
class Setting:
    """A model, its mesh, and what else is asked of the compile."""

    make: Callable[[], zoo.Case]
    axes: Mapping[str, int] = field(default_factory=lambda: DP_TP)
    options: Mapping[str, Any] = field(default_factory=dict)
    backends: tuple[str, ...] = BACKENDS


ZERO, HALVES = {"zero": 3}, {"num_microbatches": 2}
PIPELINE = {"num_microbatches": 4}
SETTINGS: dict[str, Setting] = {
    **{name: Setting(make, backends=("eager",)) for name, make in {**language.ZOO, **vision.ZOO}.items()},
    **{f"{name}, compiled": Setting(make, backends=("inductor",)) for name, make in zoo.ZOO.items()},
    "mixtral": Setting(language.mixtral, {"tp": 4}),
    "resnet, compiled": Setting(vision.resnet, backends=("inductor",)),
    "llama, our kernels": Setting(zoo.llama, options={"kernels": "triton"}),
    "bert, our kernels": Setting(zoo.bert, options={"kernels": "triton"}),
    "gpt2, kernels off": Setting(zoo.gpt2, options={"kernels": "off"}, backends=("eager",)),
    "gpt2, dropout": Setting(partial(zoo.gpt2, 1, 0.1)),
    "gpt2, our kernels, dropout": Setting(partial(zoo.gpt2, 1, 0.1), options={"kernels": "triton"}),
    "gpt2, pp2×tp2": Setting(partial(zoo.gpt2, 2), {"pp": 2, "tp": 2}, PIPELINE),
    "llama, pp2×dp2, zb-v": Setting(partial(zoo.llama, 4), {"pp": 2, "dp": 2}, {"num_microbatches": 4, "schedule": "zb-v"}),
    "gpt2, zero 3": Setting(partial(zoo.gpt2, 2), {"dp": 4}, ZERO),
    "llama, recompute full": Setting(partial(zoo.llama, 2, 0.1), DP_TP, {"recompute": "full"}),
    "llama, two microbatches": Setting(zoo.llama, DP_TP, HALVES),
    "gpt2, bf16": Setting(zoo.gpt2, DP_TP, {"precision": "bf16"}),
    "bert, bf16, our kernels": Setting(zoo.bert, DP_TP, {"precision": "bf16", "kernels": "triton"}),
    "resnet, bf16": Setting(vision.resnet, DP_TP, {"precision": "bf16"}),
}


def every_case(place: Place) -> list[Case]:
    return [
        Case("models", f"{name}, {backend}", partial(checked, place, name, backend))
        for name, setting in SETTINGS.items()
        for backend in setting.backends
    ]


def checked(place: Place, name: str, backend: str, only_compile: bool) -> list[Row]:
    """One row: what `verify` says of a step of the model in float32, and under eager in float64, too."""
    torch.backends.cudnn.allow_tf32 = False  # of convolutions, where it is the default: `verify` computes in float32 on the host
    setting, start = SETTINGS[name], time.perf_counter()
    torch.manual_seed(0)
    case = setting.make().to(torch.float32)
    model = case.model.to(place.device)
    batch: dict[str, Any] = {key: value.to(place.device) for key, value in case.batch.items()}
    options: dict[str, Any] = {"cluster": autopar.Cluster.ideal(), "backend": backend, **setting.options}
    parallel = autopar.compile(model, autopar.virtual_mesh(**setting.axes), example_inputs=batch, **options)
    plain = parallel.verify(**batch)
    # Casts are the program's: in float64 there are none.
    promoted = parallel.verify(promote=True, **batch) if backend == "eager" and "precision" not in setting.options else None
    is_close = plain.worst <= (math.inf if "precision" in setting.options else TOLERANCE)
    row = {
        "case": name,
        "backend": backend,
        "ok": bool(plain) and is_close and (promoted is None or (bool(promoted) and promoted.worst <= PROMOTED_TOLERANCE)),
        "error": float(plain.worst),
        "promoted": math.nan if promoted is None else float(promoted.worst),
        "split": float(parallel.summary()["flops_split"]),
        "s": time.perf_counter() - start,
        "says": "" if plain and (promoted is None or promoted) else str(promoted if plain else plain),
    }
    return [row]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write every row to this file, as they come")
    parser.add_argument("--seconds", type=float, default=300.0, help="start no case after so many")
    parser.add_argument("--workers", type=int, default=14, help="processes at once")
    parser.add_argument("--only", nargs="+", default=[""], help="only cases whose name has one of these in it")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here; --device cpu rehearses this", file=sys.stderr)
        return 2
    os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    place = Place(options.device)
    # Inductor's, which take the longest, first.
    names = sorted(
        (case.name for case in every_case(place) if any(word in case.name for word in options.only)),
        key=lambda name: "inductor" not in name,
    )
    rows, left = list[Row](), dict.fromkeys(names)
    until = time.monotonic() + options.seconds
    for answer in answers(every_case, place, [Order(name) for name in names], options.workers, until, LIMIT_SECONDS):
        rows += answer.rows
        del left[answer.order.name]
        print(answer.order.name, *("holds" if row.get("ok") else "DOES NOT HOLD" for row in answer.rows), file=sys.stderr, flush=True)
        write_json(options.json, {"rows": rows, "left_out": list(left)})
    return show(rows, len(names))


def show(rows: list[Row], number: int) -> int:
    good, bad = [row for row in rows if row.get("ok")], [row for row in rows if not row.get("ok")]
    print_table("as the user's model", [{key: row[key] for key in row if key not in ("part", "ok", "says")} for row in good])
    for row in bad:
        print(f"\nNOT AS THE USER'S MODEL: {row['case']}, {row.get('backend', '')}\n{row.get('says') or row['error']}")
    print(f"\n{len(good)} of {number} hold, {len(bad)} do not, {number - len(rows)} were not run")
    return 0 if len(good) == number else 1


if __name__ == "__main__":
    sys.exit(main())
