"""Memory against time: what the backward computes again, by autopar and by torch's partitioner, on one rank.

    python -m benchmarks.recompute                                   4 layers of 256, batch 8 × 128
    python -m benchmarks.recompute --layers 6 --rounds 7 --json recompute.json

torch's min-cut partitioner keeps a share of what it would of activations, swept from all to nothing, on AOTAutograd's joint graph in the
ops that the model calls; autopar gets memory budgets. Both run op by op. The peak is the allocator's, over forward and backward, gradients
included, by torch's profiler; seconds are CPU time of one thread, the least of all rounds, which take turns; FLOPs are those that torch's
FlopCounterMode counts. For each of ten peaks from what torch keeps all with to the least that it comes to: of torch's plans that need no
more the one that adds fewest FLOPs, and of autopar's, of which the budget is that peak. `more` is above keeping all, by the same side.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import autopar
from autopar._torch import min_cut_graphs
from benchmarks.peer_jobs import Size, batch_of, model_of
from benchmarks.reporting import machine, print_table, write_json

NUM_PEAKS = 10
NUM_SHARES = 10

Step = Callable[[], None]
aten: Any = torch.ops.aten
# A CPU's attention is unknown to torch's counter.
_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, query, key, value, *_, **__: sdpa_backward_flop_count(
        grad, query, key, value
    ),
}


@dataclass
class Plan:
    """A way to run a step: its peak above what is there all the time, its FLOPs, and the least CPU time seen."""

    name: str
    step: Step
    peak_bytes: int
    flops: float
    seconds: float = float("inf")

    @staticmethod
    def of(name: str, step: Step) -> Plan:
        step()
        with FlopCounterMode(display=False, custom_mapping=_ATTENTION) as counter:
            step()
        return Plan(name, step, peak_bytes(step), counter.get_total_flops())

    def row(self, first: Plan) -> dict[str, Any]:
        """Beside `first`, which keeps all."""
        more = {"GFLOP more": (self.flops - first.flops) / 1e9, "ms more": 1e3 * (self.seconds - first.seconds)}
        return {"plan": self.name, "peak MB": self.peak_bytes / 1e6, "ms": 1e3 * self.seconds, **more}


def torch_step(size: Size, share: float) -> Step:
    model, batch = model_of(size), batch_of(size)
    function = min_cut_graphs(model, share)

    def step() -> None:
        function(**batch).backward()
        model.zero_grad()  # the next begins without gradients

    return step


def our_step(size: Size, **options: Any) -> Step:
    batch = batch_of(size)
    parallel = autopar.compile(
        model_of(size), autopar.virtual_mesh(dp=1), example_inputs=batch, backend="eager", cluster="cpu", optimizer="sgd", **options
    )

    def step() -> None:
        parallel(**batch).backward()
        parallel.zero_grad()

    return step


def peak_bytes(step: Step) -> int:
    """The most that the allocator gave out in a step, above what was there before it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            step()
        found.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    memory = sorted((event for event in events if event.get("name") == "[memory]"), key=lambda event: event["ts"])
    held = peak = 0
    for event in memory:
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak


def time_all(plans: Sequence[Plan], rounds: int) -> None:
    """They take turns, so that a busy minute is everybody's."""
    for _ in range(rounds):
        for plan in plans:
            start = time.thread_time()
            plan.step()
            plan.seconds = min(plan.seconds, time.thread_time() - start)


def distinct(plans: Sequence[Plan]) -> list[Plan]:
    """Neighbours of one peak and one number of FLOPs are one plan."""
    return [each for each, before in zip(plans, (None, *plans), strict=False) if not before or _size(each) != _size(before)]


def _size(plan: Plan) -> tuple[int, float]:
    return plan.peak_bytes, plan.flops


def torch_plans(size: Size) -> list[Plan]:
    shares = [1 - number / NUM_SHARES for number in range(NUM_SHARES + 1)]
    return distinct([Plan.of(f"keeps {share:.2f}", torch_step(size, share)) for share in shares])


def our_plans(size: Size, peaks: Sequence[float]) -> list[Plan]:
    """What keeps all, and one for each of `peaks`, but for those that are refused."""
    model = model_of(size)
    there = sum(each.nbytes for each in model.parameters()) + sum(each.nbytes for each in batch_of(size).values())
    found = [Plan.of("keeps all", our_step(size, recompute="none"))]
    for peak in peaks:
        try:
            found.append(Plan.of(f"within {peak / 1e6:.1f} MB", our_step(size, memory_budget=peak + there)))
        except autopar.AutoparError as refusal:
            print(f"{peak / 1e6:.1f} MB are refused: {str(refusal).splitlines()[0]}")
    return found


def beside(ours: Sequence[Plan], theirs: Sequence[Plan], peaks: Sequence[float]) -> list[dict[str, Any]]:
    """At each peak the plan of either side that adds fewest FLOPs of those that need no more."""
    found: list[dict[str, Any]] = []
    for peak in peaks:
        row: dict[str, Any] = {"peak MB": peak / 1e6}
        for side, plans in (("torch", theirs), ("ours", ours)):
            fitting = [each for each in plans if each.peak_bytes <= peak]
            best = min(fitting, key=lambda each: (each.flops, each.seconds)).row(plans[0]) if fitting else {}
            row |= {f"{side} {name}": best.get(name, "none fits") for name in ("peak MB", "GFLOP more", "ms more", "ms")}
        found.append(row)
    return found


def run(size: Size, rounds: int) -> Mapping[str, list[dict[str, Any]]]:
    theirs = torch_plans(size)
    most, least = theirs[0].peak_bytes, min(each.peak_bytes for each in theirs)
    peaks = [most - (most - least) * number / (NUM_PEAKS - 1) for number in range(NUM_PEAKS)]
    ours = our_plans(size, peaks)
    time_all([*theirs, *ours], rounds)
    sides = {"torch": [each.row(theirs[0]) for each in theirs], "autopar": [each.row(ours[0]) for each in ours]}
    return {**sides, "beside": beside(ours, theirs, peaks)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = run(Size(options.layers, options.width, 8, 8, 128, symbols=2048), options.rounds)
    print(machine())
    print_table("torch's partitioner", found["torch"])
    print_table("autopar", found["autopar"])
    print_table("at equal peaks", found["beside"])
    write_json(options.json, found)


if __name__ == "__main__":
    main()
