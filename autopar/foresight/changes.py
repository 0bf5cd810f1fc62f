"""What to change of a plan that does not fit, and at what price: every change is priced as any other plan is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autopar.errors import AutoparError
from autopar.foresight.price import Prices
from autopar.foresight.step import RECOMPUTE, Step, StepPlan
from autopar.foresight.work import ModelWork
from autopar.ir.mesh import Mesh
from autopar.ir.units import in_bytes, in_seconds
from autopar.ir.zero import LEVELS

_MOST = 4
# What saves less of the memory is no advice.
_WORTH_IT = 0.01


@dataclass(frozen=True)
class Change:
    """One thing to change: the bytes that the fullest rank holds less then, and the seconds that a step takes more (negative: fewer)."""

    text: str
    step: Step
    saved_bytes: float
    added_seconds: float

    def __str__(self) -> str:
        return f"{self.text}: {in_bytes(self.saved_bytes)} less, {in_seconds(self.added_seconds, sign=True)} a step"


def until_saved(step: Step, works: Mapping[int, ModelWork], excess_bytes: float) -> list[Change]:
    """Changes one after another, each on top of those before it, until so many bytes are saved: of the changes that save enough the one
    that takes least time, else the one that saves most for its time. At most four; all that help where nothing is enough.

    `works` are those of the sizes of tp that may be taken.
    """
    found: list[Change] = []
    while excess_bytes > 0 and len(found) < _MOST:
        at = found[-1].step if found else step
        peak = _peak(at)
        helping = [each for each in _changes(at, works) if each.saved_bytes > _WORTH_IT * peak]
        if not helping:
            break
        enough = [each for each in helping if each.saved_bytes >= excess_bytes]
        change = min(enough, key=lambda each: each.added_seconds) if enough else max(helping, key=_worth)
        found.append(change)
        excess_bytes -= change.saved_bytes
    return found


def _worth(change: Change) -> tuple[float, float]:
    """What costs no time comes first."""
    if change.added_seconds <= 0:
        return float("inf"), change.saved_bytes
    return change.saved_bytes / change.added_seconds, change.saved_bytes


def _changes(step: Step, works: Mapping[int, ModelWork]) -> Iterator[Change]:
    """All single ones that could save bytes."""
    before_bytes, before_seconds = _peak(step), step.prediction().step_seconds
    for text, other in _others(step, works):
        try:
            saved, added = before_bytes - _peak(other), other.prediction().step_seconds - before_seconds
        except AutoparError:  # a schedule or a cut that there is none of
            continue
        yield Change(text, other, saved, added)


def _others(step: Step, works: Mapping[int, ModelWork]) -> Iterator[tuple[str, Step]]:
    plan = step.plan
    kinds = list(RECOMPUTE)
    for kind in kinds[kinds.index(plan.recompute) + 1 :]:
        yield f"recompute {kind}", replace(step, plan=replace(plan, recompute=kind))
    for level in LEVELS if plan.dp > 1 else ():
        if level > plan.zero:
            yield f"zero {level}", replace(step, plan=replace(plan, zero=level))
    for kind, what in (("optimizer", "the optimizer's state on the host"), ("activations", "what forwards keep on the host")):
        if kind not in plan.offload:
            yield f'{what}, offload="{kind}"', replace(step, plan=replace(plan, offload=tuple(sorted((*plan.offload, kind)))))
    if plan.microbatch % 2 == 0 and not step.work.mixes_samples:
        number = 2 * plan.num_microbatches
        smaller = replace(plan, microbatch=plan.microbatch // 2, num_microbatches=number)
        yield f"{number} microbatches of {smaller.microbatch}", replace(step, plan=smaller)
    sizes = dict(step.prices.mesh.axes)
    if plan.dp % 2:
        return
    if not step.work.mixes_samples:
        longer = replace(plan, dp=plan.dp // 2, pp=2 * plan.pp, num_microbatches=2 * plan.num_microbatches)
        yield f"pp {longer.pp} × dp {longer.dp}", _on(step, longer, step.work, sizes["tp"])
    if 2 * sizes["tp"] in works:
        wider = replace(plan, dp=plan.dp // 2, **_of_share(plan, step.work.mixes_samples))
        yield f"dp {wider.dp} × tp {2 * sizes['tp']}", _on(step, wider, works[2 * sizes["tp"]], 2 * sizes["tp"])


def _of_share(plan: StepPlan, is_whole: bool) -> dict[str, int]:
    """Half as many replicas have twice the share of the batch each."""
    return {"microbatch": 2 * plan.microbatch} if is_whole else {"num_microbatches": 2 * plan.num_microbatches}


def _on(step: Step, plan: StepPlan, work: ModelWork, tp: int) -> Step:
    mesh = Mesh((("pp", plan.pp), ("dp", plan.dp), ("tp", tp)))
    return Step(work, plan, Prices(step.prices.cluster, mesh, step.prices.constants, step.prices.profile, work.tp_parts))


def _peak(step: Step) -> float:
    return step.peak_bytes(step.plan.zero)
