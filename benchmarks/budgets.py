"""Whether memory budgets are kept: peaks of whole steps on two ranks, against budgets from impossible to roomy.

    python -m benchmarks.budgets [--models gpt2,llama] [--axes dp,tp] [--write docs/budgets.md]
    python -m benchmarks.budgets --processes            two gloo processes, the second `train_step` with its update

For each model and mesh all levels of ZeRO and modes of recomputation are asked for by name (AdamW, float32, one layer). Budgets are
multiples of the smallest of their predicted peaks: half of it cannot be kept, and must be refused with a budget that is enough, which is
then asked for; 1.10 times must be accepted, and no tracked peak may be above its budget. On processes all that the allocator gives out is
tracked; on virtual ranks forward and backward, fragment by fragment, beside the state as it will be.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.errors import MemoryBudgetError
from autopar.runtime.verify.tracked_memory import Tracker
from tests.support.captures import keep_captures
from tests.support.models import vision, zoo
from tests.support.ranks import GlooRanks

MODELS = {**vision.ZOO, **zoo.ZOO}
CASES = [*product(("gpt2", "llama"), ("dp", "tp", "pp")), ("bert", "dp"), ("vit", "dp")]
NUM_LAYERS = 1
SHARES = (0.5, 1.1, 1.2, 1.5, 2.0)
_HEAD = "| model | mesh | smallest by name, kB | by | budget, kB | of the smallest | predicted, kB | tracked, kB | of the budget |"

Found = dict[str, Any]


def on_virtual_ranks(name: str, axis: str, options: dict[str, Any], is_tracked: bool) -> Found:
    """The most that a rank takes, as predicted and tracked; or why that was refused."""
    torch.manual_seed(0)
    case = MODELS[name](NUM_LAYERS).to(torch.float32)
    mesh = autopar.virtual_mesh(**{axis: 2})
    try:
        parallel = autopar.compile(
            case.model, mesh, example_inputs=case.batch, backend="eager", cluster="8xH100", optimizer=torch.optim.AdamW, **options
        )
    except MemoryBudgetError as refused:
        return {"refused": str(refused)}
    found = parallel.memory(measure=case.batch) if is_tracked else parallel.memory()
    tracked = max((each.tracked_bytes for each in found.measured.values()), default=0)
    return {"predicted": found.peak_bytes, "tracked": tracked + found.fullest.kinds.get("optimizer", 0.0)}


def on_a_rank(name: str, axis: str, options: dict[str, Any]) -> Found:
    """What this rank takes in its second step, when the optimizer has its state; or why that was refused."""
    torch.manual_seed(0)
    case = MODELS[name](NUM_LAYERS).to(torch.float32)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
    # A share of its own: a view would count as all that it looks at.
    batch = {key: value.chunk(2)[dist.get_rank()].clone() if axis == "dp" else value for key, value in case.batch.items()}
    try:
        parallel = autopar.compile(
            case.model, mesh, example_inputs=batch, backend="eager", cluster="8xH100", optimizer=torch.optim.AdamW, timeout=60, **options
        )
    except MemoryBudgetError as refused:
        return {"refused": str(refused)}
    parallel.train_step(**batch)
    call, *_ = parallel.start((), batch, updates=True)
    tracker = Tracker(call, [*parallel._held(), *batch.values()])
    with tracker:
        parallel._trainer.run(call, parallel, lambda: "")
    (trace,) = tracker.traces().values()
    return {"predicted": parallel.memory().peak_bytes, "tracked": trace.peak_bytes}


def on_processes(ranks: GlooRanks, name: str, axis: str, options: dict[str, Any]) -> Found:
    found = ranks.run(on_a_rank, name, axis, options)
    refused = next((each for each in found if "refused" in each), None)
    return refused or max(found, key=lambda each: each["tracked"])


def rows(ranks: GlooRanks | None, name: str, axis: str) -> Iterator[tuple[bool, str]]:
    """For each budget whether it is as it should be, and the line of the table."""
    by_name: dict[str, float] = {}
    for level, mode in product((0, 1, 2, 3) if axis == "dp" else (0,), ("none", "full", "selective")):
        asked = {"zero": level, "recompute": mode}
        by_name[f"zero={level}, {mode}"] = on_virtual_ranks(name, axis, asked, is_tracked=False)["predicted"]
    best = min(by_name, key=lambda each: by_name[each])
    least = by_name[best]

    def within(budget: float) -> Found:
        asked = {"memory_budget": budget}
        return on_virtual_ranks(name, axis, asked, is_tracked=True) if ranks is None else on_processes(ranks, name, axis, asked)

    for share in SHARES:
        budget = share * least
        found = within(budget)
        line = f"| {name} | {axis}2 | {least / 1e3:.1f} | {best} | {budget / 1e3:.1f} | {share:.2f} |"
        if "refused" not in found:
            peak = found["tracked"]
            is_kept = share >= 1 and max(peak, found["predicted"]) <= budget
            yield is_kept, f"{line} {found['predicted'] / 1e3:.1f} | {peak / 1e3:.1f} | {peak / budget:.3f} |"
            continue
        offered = re.search(r"memory_budget='(\d+) B'", found["refused"])
        if offered is None:
            yield False, f"{line} refused, and nothing offered | | |"
            continue
        enough = float(offered[1])
        again = within(enough)
        peak = again.get("tracked", math.inf)
        is_enough = max(peak, again.get("predicted", math.inf)) <= enough
        yield (
            share < 1 and is_enough,
            f"{line} refused: {enough / 1e3:.1f} kB are offered | {peak / 1e3:.1f} | {peak / enough:.3f} of that |",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axes", default="dp,tp,pp")
    parser.add_argument("--models", default=",".join(dict.fromkeys(name for name, _ in CASES)))
    parser.add_argument("--processes", action="store_true")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_captures()
    lines, good, ranks = [_HEAD, "|---|---|---|---|---|---|---|---|---|"], 0, GlooRanks(2) if options.processes else None
    for name, axis in CASES:
        if name in options.models.split(",") and axis in options.axes.split(","):
            for is_good, line in rows(ranks, name, axis):
                good += is_good
                lines.append(line if is_good else f"{line} <-- WRONG")
                print(lines[-1], flush=True)
    if ranks is not None:
        ranks.stop()
    lines += ["", f"{good} of {len(lines) - 2} cases as they should be."]
    print(lines[-1])
    if options.write is not None:
        options.write.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
