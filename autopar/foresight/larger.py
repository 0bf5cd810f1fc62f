"""What would do where no plan is found: how many more devices, and which batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.foresight.question import Axes, Question
from autopar.foresight.search import Search
from autopar.foresight.step import StepPlan

# How often the number of devices is doubled, and how many plans are looked at on each mesh: those that hold least.
_DOUBLINGS = 6
_TRIED = 3


@dataclass(frozen=True)
class Enough:
    """A plan that fits on more devices than were asked about: none on half as many does."""

    num_devices: int
    axes: Axes
    plan: StepPlan

    def __str__(self) -> str:
        mesh = " × ".join(f"{name}{size}" for name, size in self.axes if size > 1)
        zero = f", zero {self.plan.zero}" if self.plan.zero else ""
        again = f", recompute {self.plan.recompute}" if self.plan.recompute != "none" else ""
        return f"{mesh} with microbatches of {self.plan.microbatch}{again}{zero} fits"


def fewest_devices(question: Question) -> Enough | None:
    """The question's devices are doubled until some plan fits; None where none does, however many."""
    for doubling in range(1, _DOUBLINGS + 1):
        asked = replace(question, num_devices=question.num_devices << doubling)
        search = Search(asked)
        for axes in asked.meshes():
            plan = _smallest_that_fits(search, axes)
            if plan is not None:
                return Enough(asked.num_devices, axes, plan)
    return None


def _smallest_that_fits(search: Search, axes: Axes) -> StepPlan | None:
    capacity = search.question.capacity_bytes
    least = {plan: min(search.least_bytes(axes, plan, level) for level in search.levels(plan)) for plan in search.question.plans(axes)}
    for plan in sorted((plan for plan in least if least[plan] <= capacity), key=lambda each: least[each])[:_TRIED]:
        fitting = [found for found in search.simulated(axes, plan) if found.prediction.fits]
        if fitting:
            return min(fitting, key=lambda found: found.prediction.step_seconds).plan
    return None


def batch_advice(question: Question) -> list[str]:
    """Batches that some mesh could run, where the batch is why none has a plan."""
    layers = max(question.work.num_layers, 1)
    fitting = [dict(axes) for axes in question.factorisations() if dict(axes)["pp"] <= layers]
    sizes = sorted({each["dp"] for each in fitting})
    if not sizes or any(question.global_batch % dp == 0 for dp in sizes):
        return []
    return [f"a batch of {question.global_batch} samples does not divide over {_some(sizes)} replicas: {_batches(question, sizes[0])}"]


def _batches(question: Question, dp: int) -> str:
    below = question.global_batch // dp * dp
    return f"take {below} or {below + dp}" if below else f"take {dp}"


def _some(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes)) if len(sizes) < 4 else f"{sizes[0]}, {sizes[1]}, … {sizes[-1]}"
