"""The best plan of each mesh, and of all: bounds first, then the simulation of what they leave.

A bound of a plan is what its products, traffic and collectives take where they are spread evenly over pp and nobody ever waits: no
schedule and no cut into stages is below it. Plans are simulated in the order of their bounds, until the best found is below all that is
left: what is returned is the best of all plans in `Question.plans`, as `predict` prices them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.foresight.prediction import Prediction
from autopar.foresight.price import Prices, Seconds
from autopar.foresight.question import Axes, Question
from autopar.foresight.step import Step, StepPlan
from autopar.foresight.work import ModelWork

# A mesh that can at best be so much slower than the best plan is not simulated.
WORTH_A_LOOK = 2.0
# What does not fit by more than this is no advice.
ALMOST = 1.5


@dataclass(frozen=True)
class Found:
    """A plan and what is predicted of it."""

    plan: StepPlan
    prediction: Prediction


@dataclass(frozen=True)
class OnMesh:
    """What was found of a mesh.

    best           the fastest plan that fits; None where none does, or where none was simulated
    bound_seconds  no plan that fits is faster
    beyond         the fastest of the plans that almost fit, where it would be faster
    least_bytes    no plan does with fewer
    """

    axes: Axes
    best: Found | None
    bound_seconds: float
    is_simulated: bool = True
    beyond: Found | None = None
    least_bytes: float = 0.0


@dataclass
class Totals:
    """Of all blocks of a model on one size of tp, for one microbatch."""

    work: ModelWork
    prices: Prices
    _seconds: dict[tuple[int, str], float] = field(default_factory=dict[tuple[int, str], float])

    @cached_property
    def parameters(self) -> float:
        """Elements; what several blocks read counts once."""
        sizes: dict[str, float] = {}
        for number, block in enumerate(self.work.expanded()):
            sizes |= {f"{name} {number}" if block.is_layer else name: size for name, size in block.parameters.items()}
        return sum(sizes.values())

    def seconds(self, microbatch: int, recompute: str) -> float:
        key = microbatch, recompute
        if key not in self._seconds:
            step = Step(self.work, StepPlan(microbatch, 1, recompute=recompute), self.prices)
            parts = ("forward", "again", "input_gradient", "weight_gradient")
            whole = sum((step.seconds(part, 0) for part in parts), Seconds())
            self._seconds[key] = max(whole.device - step.hidden_seconds(0), whole.host)
        return self._seconds[key]

    def saved_bytes(self, microbatch: int, recompute: str) -> float:
        return Step(self.work, StepPlan(microbatch, 1, recompute=recompute), self.prices).saved_bytes(0)


class Search:
    """Answers one question. Stopped at any time, `found` is what is known so far."""

    def __init__(self, question: Question, told: Callable[[str], None] = lambda _: None) -> None:
        self.question = question
        self.found: list[OnMesh] = []
        self.num_simulated = 0
        # No plan is faster, whatever memory says.
        self.bound_seconds = math.inf
        self.told = told
        self._totals: dict[int, Totals] = {}
        self._prices: dict[Axes, Prices] = {}

    def run(self) -> None:
        """Meshes in the order of their bounds: the first ones make the others' bounds too high."""
        bounds = {
            axes: min((self.bound(axes, plan) for plan in self.question.plans(axes)), default=math.inf) for axes in self.question.meshes()
        }
        self.bound_seconds = min(bounds.values(), default=math.inf)
        for axes in sorted(bounds, key=lambda each: (bounds[each], each)):
            self.told(" × ".join(f"{name}{size}" for name, size in axes))
            self.found.append(self._on_mesh(axes))

    @property
    def has_plans(self) -> bool:
        return any(each.best is not None for each in self.found)

    @property
    def best_seconds(self) -> float:
        return min((each.best.prediction.step_seconds for each in self.found if each.best is not None), default=math.inf)

    def prices(self, axes: Axes) -> Prices:
        if axes not in self._prices:
            self._prices[axes] = self.question.prices(axes)
        return self._prices[axes]

    def totals(self, axes: Axes) -> Totals:
        tp = dict(axes)["tp"]
        if tp not in self._totals:
            self._totals[tp] = Totals(self.question.works[tp], self.prices(axes))
        return self._totals[tp]

    def bound(self, axes: Axes, plan: StepPlan) -> float:
        """Seconds below which no step of this plan is: the mean over pp of the work, and of the update, were its state split over dp."""
        totals = self.totals(axes)
        busy = totals.seconds(plan.microbatch, plan.recompute) * plan.num_microbatches / plan.pp
        step = Step(totals.work, replace(plan, zero=1), totals.prices)
        return busy + step.seconds_to_update(totals.parameters / plan.pp)

    def least_bytes(self, axes: Axes, plan: StepPlan, level: int) -> float:
        """Below which the rank that holds most cannot be: the mean over pp, one microbatch alive."""
        totals = self.totals(axes)
        state = Step(totals.work, plan, totals.prices).state_memory(totals.parameters, level)
        saved = 0.0 if plan.moves_activations else totals.saved_bytes(plan.microbatch, plan.recompute)
        return (state.total + saved) / plan.pp

    def levels(self, plan: StepPlan) -> Iterator[int]:
        yield from self.question.levels if plan.dp > 1 else (0,)

    def _on_mesh(self, axes: Axes) -> OnMesh:
        least = {plan: min(self.least_bytes(axes, plan, level) for level in self.levels(plan)) for plan in self.question.plans(axes)}
        bounds = {plan: self.bound(axes, plan) for plan in least}
        fewest = min(least.values(), default=math.inf)
        bound = min((bounds[plan] for plan in bounds if least[plan] <= self.question.capacity_bytes), default=math.inf)
        is_simulated = bound == math.inf or bound <= WORTH_A_LOOK * self.best_seconds
        if bound == math.inf or not is_simulated:
            return OnMesh(axes, None, bound, is_simulated, least_bytes=fewest)
        plans = [plan for plan in sorted(bounds, key=lambda each: bounds[each]) if least[plan] <= ALMOST * self.question.capacity_bytes]
        best, beyond = self._fastest(axes, plans, bounds)
        return OnMesh(axes, best, bound, beyond=beyond, least_bytes=fewest)

    def _fastest(self, axes: Axes, plans: Sequence[StepPlan], bounds: Mapping[StepPlan, float]) -> tuple[Found | None, Found | None]:
        """The fastest plan that fits, and the fastest that almost does, if it is faster; `plans` ascend by their bounds."""
        best: Found | None = None
        beyond: Found | None = None
        for plan in plans:
            if best is not None and bounds[plan] >= _seconds(best):
                break
            for found in self.simulated(axes, plan):
                if found.prediction.fits:
                    best = found if best is None else min(best, found, key=_seconds)
                elif found.prediction.peak_bytes <= ALMOST * self.question.capacity_bytes:
                    beyond = found if beyond is None else min(beyond, found, key=_seconds)
        is_faster = beyond is not None and (best is None or _seconds(beyond) < _seconds(best))
        return best, beyond if is_faster else None

    def simulated(self, axes: Axes, plan: StepPlan) -> Iterator[Found]:
        """At each level of ZeRO that fits, or almost."""
        for step in self._that_move(axes, plan) if plan.moves_activations else self._at_levels(axes, plan):
            yield Found(step.plan, replace(step.prediction(), capacity_bytes=self.question.capacity_bytes))

    def _at_levels(self, axes: Axes, plan: StepPlan) -> Iterator[Step]:
        """The pipeline of all is the same."""
        step = Step(self.totals(axes).work, plan, self.prices(axes))
        levels = [level for level in self.levels(plan) if self._is_worth_it(step, level)]
        self.num_simulated += bool(levels)
        yield from map(step.with_zero, levels)

    def _that_move(self, axes: Axes, plan: StepPlan) -> Iterator[Step]:
        """With as little of what forwards keep on the host as it takes to fit; with nothing there the plan is another one."""
        work, prices = self.totals(axes).work, self.prices(axes)
        kept = Step(work, plan, prices).without_copies
        for level in self.levels(plan):
            share = kept.share_that_fits(level, self.question.capacity_bytes)
            step = Step(work, replace(plan, zero=level, offloaded_share=share), prices) if share else kept.with_zero(level)
            is_other = share > 0 or kept.plan.offload not in self.question.offloads
            if is_other and self._is_worth_it(step, level):
                self.num_simulated += 1
                yield step

    def _is_worth_it(self, step: Step, level: int) -> bool:
        """Whether it fits, or almost, and the host has what lies there."""
        held = [step.memory(rank, level) for rank in range(step.plan.pp)]
        most, on_host = max(each.total for each in held), max(each.host for each in held)
        return most <= ALMOST * self.question.capacity_bytes and on_host <= self.question.host_bytes


def _seconds(found: Found) -> float:
    return found.prediction.step_seconds
