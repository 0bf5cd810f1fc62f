"""Whether what the backward reads is best moved off the device: two ways to meet a budget, of which the faster is taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.driver.compiled import Compiled
from autopar.driver.decide_once import FromFirst
from autopar.driver.options import Options
from autopar.errors import MemoryBudgetError
from autopar.ir.units import in_seconds
from autopar.pipeline.fragment_prices import on_paper


def weighed(options: Options, compile_by: Callable[[Options], Compiled], from_first: FromFirst | None) -> Compiled:
    """What `compile_by` makes of `options`; with Offload(activations="auto") the faster one of what it makes with activations in host
    memory and on the device. With a plan they lie where that has them, without a budget on the device.

    Raises `MemoryBudgetError` where neither fits.
    """
    asked = options.offload
    if asked is None or asked.activations != "auto":
        return compile_by(options)
    if options.plan is not None:
        planned = options.plan.offloaded and options.plan.offloaded.memory
        return compile_by(replace(options, offload=asked.with_activations("file" if planned == "file" else "host" if planned else None)))
    ways = [replace(options, offload=asked.with_activations(place)) for place in ("host", None)]
    if not options.budget.is_finite:
        return compile_by(ways[1])
    moved, kept = (_fitting(compile_by, each) for each in ways)
    if isinstance(kept, MemoryBudgetError):
        if isinstance(moved, MemoryBudgetError):
            raise moved
        return replace(moved, weighed="in host memory: nothing else fits into memory_budget")
    if isinstance(moved, MemoryBudgetError) or moved.fingerprint == kept.fingerprint:
        return kept

    def times() -> str:
        return " ".join(str(_seconds(each)) for each in (moved, kept))

    # Prices may differ from rank to rank.
    moving, staying = map(float, (from_first(times) if from_first is not None else times()).split())
    spent = f"{in_seconds(moving)} a step on paper with activations in host memory, {in_seconds(staying)} with the best of what else fits"
    return replace(moved if moving < staying else kept, weighed=spent)


def _fitting(compile_by: Callable[[Options], Compiled], options: Options) -> Compiled | MemoryBudgetError:
    try:
        return compile_by(options)
    except MemoryBudgetError as refusal:
        return refusal


def _seconds(compiled: Compiled) -> float:
    assert compiled.cost is not None
    return on_paper(compiled.updating or compiled.schedule, compiled.cost, has_memory=False).step_seconds
