"""Compiling within a memory budget: ways to meet it, asked in one order, once it is known that it binds.

0. without it      parameters whole over the axes of the batch, all kept that the backward reads: if the step fits so, it is that
                   with offload= what the backward reads is moved first, as little as it takes; so it is in all that follow
1. the search      parameters, copies and saved values split over ranks, saved values computed again: one price for all, by an estimate
2. recomputation   with shardings and stages known: what is computed again, at the least time, counted call by call
3. the whole step  on the schedule, with all that takes memory; where that is too much, the difference is reserved, and 1 asked again
4. by name         levels of ZeRO and modes of recomputation, one after another: estimates may leave out what does fit
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autopar.driver.compiled import Compiled
from autopar.driver.options import Options
from autopar.errors import MemoryBudgetError, PlanError
from autopar.ir.offload import Offload
from autopar.ir.units import in_bytes
from autopar.pipeline.stays import Trips
from autopar.reports.memory import Memory

logger = logging.getLogger("autopar")

# How often the search is asked at most.
_TRIES = 5
# And how often recomputation alone is chosen anew.
_FITS = 2
# Multiples of what no plan takes less than, for which the search is asked where it has refused: what it then finds fits, or is named as a
# budget.
_PROBES = (1.02, 1.2, 1.5)


def within_budget(
    options: Options, compile_by: Callable[[Options], Compiled], memory_of: Callable[[Compiled], Memory], by_name: Sequence[Options] = ()
) -> Compiled:
    """What `compile_by` makes of `options`, the memory of which, counted whole, is within their budget. Raises `MemoryBudgetError`.

    `by_name` are the options as they may be without a budget, `Options.by_name`.
    """
    if not options.budget.is_finite:
        return compile_by(options)
    attempts = _Attempts(options, compile_by, memory_of)
    found = attempts.whole(by_name[0]) if by_name else None
    found = found or attempts.searched() or attempts.one_of(by_name[1:])
    if found is None:
        raise attempts.refusal()
    return found


@dataclass
class _Attempts:
    """`least` is the memory of what takes least of all that was found and does not fit, `sure` of what is found under any budget that is
    large enough, and so may be offered, `refused` the search's own word where it found nothing at all."""

    options: Options
    compile_by: Callable[[Options], Compiled]
    memory_of: Callable[[Compiled], Memory]
    least: Memory | None = None
    sure: Memory | None = None
    refused: MemoryBudgetError | None = None

    def whole(self, options: Options) -> Compiled | None:
        """What is made of `options`, if the whole step fits."""
        compiled, memory = self._tried(options)
        return compiled if self._surely(memory).fits else None

    def _tried(self, options: Options) -> tuple[Compiled, Memory]:
        """What is moved off the device is decided by an estimate that leaves out how a backend runs fragments: what it took too much is
        taken off what it may."""
        compiled = self.compile_by(options).within(self.options.budget)
        memory = self._counted(compiled)
        for _ in range(_TRIES if options.moves_activations else 0):
            limit = options.limit or self.options.budget
            limit = limit.reserving(limit.reserved_bytes - memory.margin_bytes)
            if memory.fits or limit.capacity_bytes <= 0 or not _could_move_more(compiled):
                break
            options = replace(options, limit=limit)
            again = self.compile_by(options).within(self.options.budget)
            found = self._counted(again)
            if found.peak_bytes >= memory.peak_bytes:
                break
            compiled, memory = again, found
        return compiled, memory

    def _counted(self, compiled: Compiled) -> Memory:
        memory = self.memory_of(compiled)
        if not memory.fits and (self.least is None or memory.peak_bytes < self.least.peak_bytes):
            self.least = memory
        return memory

    def _surely(self, memory: Memory) -> Memory:
        """That of a plan which does not depend on the budget, unless values are moved off the device, as many as it takes."""
        if not memory.fits and not self.options.moves_activations and (self.sure is None or memory.peak_bytes < self.sure.peak_bytes):
            self.sure = memory
        return memory

    def searched(self) -> Compiled | None:
        """What fits of what the search finds, asked for less each time."""
        budget, is_found, least = self.options.budget, False, None
        # Bytes held back from those who decide; with so many a plan was found that takes too much, with so many none.
        reserved, too_few, too_many = 0.0, 0.0, budget.capacity_bytes
        for number in range(_TRIES):
            wanted = too_many
            try:
                compiled, memory = self._tried(replace(self.options, budget=budget.reserving(reserved), limit=budget))
            except MemoryBudgetError as error:
                least = error.least_bytes if error.least_bytes is not None else least
                if not is_found:
                    self.refused = error  # it says what conflicts
                    break
                # Nor is anything found with less than no plan takes less than.
                wanted = too_many = min(reserved, math.inf if least is None else budget.asked_bytes - least)
                if too_many <= too_few:
                    break
            else:
                is_found = True
                if memory.fits:
                    return compiled
                logger.info("a step takes %s, more than memory_budget; the search is asked for less", in_bytes(memory.peak_bytes))
                too_few = reserved
                # What was counted may be less than what was left: the next to be found must count less than that.
                wanted = budget.capacity_bytes - min(budget.capacity_bytes - reserved, compiled.counted_bytes) - memory.margin_bytes
            is_last = number == _TRIES - 2 and least is None  # what no plan takes less than is to be known in the end
            reserved = wanted if wanted < too_many and not is_last else (too_few + too_many) / 2
        return self._probed(least)

    def _probed(self, least_bytes: float | None) -> Compiled | None:
        """A plan that takes little more than no plan takes less than, by the search's count, if the whole step fits. What such a plan takes
        is offered to those who ask for too little, so that it must be found for whoever asks for more than that."""
        if least_bytes is None:
            return None
        budget = self.options.budget
        for factor in _PROBES:
            asked = budget.reserving(budget.asked_bytes - factor * least_bytes)
            try:
                compiled = self.compile_by(replace(self.options, budget=asked, limit=budget)).within(budget)
            except MemoryBudgetError:
                continue
            memory = self._surely(self._counted(compiled))
            return compiled if memory.fits else None
        return None

    def _fitted(self, options: Options) -> tuple[Compiled, Memory]:
        """What a step takes beyond what recomputation counts is left out of what that may fill."""
        compiled, memory = self._tried(options)
        for _ in range(_FITS if options.fit is not None else 0):
            assert options.fit is not None
            fit = options.fit.reserving(options.fit.reserved_bytes - memory.margin_bytes)
            if memory.fits or fit.capacity_bytes <= 0 or not compiled.recomputes_within:
                break
            options = replace(options, fit=fit)
            compiled, memory = self._tried(options)
        return compiled, memory

    def one_of(self, by_name: Sequence[Options]) -> Compiled | None:
        """The first that fits; of levels of ZeRO each holds no less than the one before."""
        for options in by_name:
            try:
                compiled, memory = self._fitted(options)
            except PlanError:  # pins have it otherwise
                continue
            # What is chosen to be computed again depends on the budget.
            if (memory if compiled.recomputes_within else self._surely(memory)).fits:
                logger.info("no search met memory_budget; zero= and recompute= by name do: %s, %s", options.freedom.zero, options.recompute)
                return compiled
            if any(each.kinds.get("parameters", 0.0) + each.kinds.get("optimizer", 0.0) > memory.capacity_bytes for each in memory.places):
                return None
        return None

    def refusal(self) -> MemoryBudgetError:
        # The search knows nothing of what is moved off the device: what it takes then says more than its word.
        found = self.sure or self.least
        if self.refused is None or (found is not None and self.options.moves_activations):
            assert found is not None
            return refusal(found, self.options.offload)
        if found is None:
            return self.refused
        peak = found.peak_bytes
        return MemoryBudgetError(
            f"{self.refused}\ncounted call by call, the least that was found takes {in_bytes(peak)}: memory_budget={in_bytes_up(peak)!r}"
        )


def _could_move_more(compiled: Compiled) -> bool:
    """Whether no more values were moved off the device because the step was thought to fit."""
    return all(step.decision.fits for step in compiled.schedule_steps if isinstance(step.decision, Trips))


def refusal(memory: Memory, offload: Offload | None = None) -> MemoryBudgetError:
    """For the plan that takes least of those that were found, all of which take too much."""
    place = memory.fullest
    lines = [
        f"no plan was found whose step fits into {memory.limit}: the least takes {in_bytes(memory.peak_bytes)}, "
        f"{in_bytes(-memory.margin_bytes)} too much, during {place.at}",
        *str(memory).splitlines()[2:],
        *(
            [f"  Offload(activations={offload.activations!r}) moves all that is away long enough"]
            if offload and offload.activations
            else ()
        ),
        "ways out:",
        f"  memory_budget={in_bytes_up(memory.peak_bytes)!r}",
    ]
    grows = sum(place.kinds.get(kind, 0.0) for kind in ("activations", "temporaries", "in flight", "inputs"))
    stays = memory.peak_bytes - grows
    if grows and stays < memory.capacity_bytes:
        share = (memory.capacity_bytes - stays) / grows
        lines.append(f"  {share:.0%} of the batch, or as many times more microbatches: of the peak {in_bytes(grows)} grow with it")
    state = place.kinds.get("optimizer", 0.0)
    if state:
        lines.append(f'  optimizer="sgd": {in_bytes(state)} of state less')
    lines.append("  more ranks along tp or pp; parameters split over dp come of memory_budget itself where that helps")
    return MemoryBudgetError("\n".join(lines))


def in_bytes_up(value: float) -> str:
    """In whole bytes: what is asked for must be enough."""
    return f"{math.ceil(value)} B"
