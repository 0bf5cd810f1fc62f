"""What the backward computes again, what that takes, and what is not kept for it.

full: each layer is computed again from what it reads
    46 calls once more, 1.2 ms a step; saved activations 3.1 MB a rank in place of 12.4 MB
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.cost.model import CostModel
from autopar.driver.compiled import Compiled
from autopar.ir.keys import RECOMPUTED
from autopar.ir.program import Program
from autopar.ir.units import in_bytes, in_seconds
from autopar.pipeline.order import live_microbatches
from autopar.pipeline.priced import call_seconds, saved_values, value_bytes
from autopar.pipeline.stage_work import Work
from autopar.recompute.decision import RecomputeDecision
from autopar.reports.entries import Recomputed


def recompute_summary(compiled: Compiled, cost: CostModel) -> Recomputed | None:
    """None where all that the backward reads is kept. Seconds are those of the rank that spends most."""
    number, decision = _decided(compiled)
    if decision is None or not any(node in RECOMPUTED for node in compiled.program.graph.nodes):
        return None
    saved = [_saved_bytes(program, cost) for program in (compiled.program, compiled.steps[number - 1].program)]
    calls, seconds = _added(compiled, cost)
    return Recomputed(reason=str(decision), calls=calls, seconds=seconds, saved_bytes=saved[0], saved_bytes_before=saved[1])


def recompute_lines(compiled: Compiled, cost: CostModel) -> Iterator[str]:
    _, decision = _decided(compiled)
    found = recompute_summary(compiled, cost)
    if decision is not None and (found is not None or decision.reason):
        yield str(decision)
    if found is not None:
        bytes_now, bytes_before = in_bytes(found["saved_bytes"]), in_bytes(found["saved_bytes_before"])
        price = f"{found['calls']} calls once more, {in_seconds(found['seconds'])} a step"
        yield f"    {price}; saved activations {bytes_now} a rank in place of {bytes_before}"


def _decided(compiled: Compiled) -> tuple[int, RecomputeDecision | None]:
    """The number of the step that decided, and what."""
    for step in compiled.steps:
        if isinstance(step.decision, RecomputeDecision):
            return step.number, step.decision
    return 0, None


def _saved_bytes(program: Program, cost: CostModel) -> float:
    """Of the rank that saves most, of all microbatches that are under way at a time."""
    live, work, ranks = live_microbatches(program.order), Work(program), [0.0] * program.order.num_ranks
    for stage, rank in enumerate(program.order.stages):
        ranks[rank] += live[stage] * sum(value_bytes(node, cost) for node in saved_values(work, stage))
    return max(ranks)


def _added(compiled: Compiled, cost: CostModel) -> tuple[int, float]:
    """Calls done once more, and the seconds of a step that they take on the rank that spends most."""
    program = compiled.program
    work, ranks = Work(program), [0.0] * compiled.order.num_ranks
    again = [node for node in program.graph.nodes if node in RECOMPUTED]
    for node in again:
        for stage in work.stages[node]:
            ranks[compiled.order.stages[stage]] += call_seconds(node, program, cost) * work.runs(node)
    return len(again), max(ranks)
