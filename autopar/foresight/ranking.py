"""The answer to a search for plans: the best of each mesh in order, why the first one wins, and why meshes that are missing are missing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.foresight.larger import batch_advice, fewest_devices
from autopar.foresight.offload import KINDS, NOTHING
from autopar.foresight.prediction import Prediction
from autopar.foresight.question import Axes, Question
from autopar.foresight.search import WORTH_A_LOOK, Found, OnMesh, Search
from autopar.foresight.step import StepPlan
from autopar.ir.units import in_bytes, in_seconds

_SHOWN = 8


@dataclass(frozen=True)
class RankedPlan:
    """The fastest plan of a mesh. `reasons` say where its time goes and, against the first plan, what it loses and gains."""

    axes: Axes
    plan: StepPlan
    prediction: Prediction
    tokens_per_second_per_device: float
    reasons: tuple[str, ...] = ()

    @property
    def mesh(self) -> str:
        return mesh_text(self.axes)

    @property
    def schedule(self) -> str:
        chunks = f" × {self.plan.num_chunks}" if self.plan.num_chunks > 1 else ""
        return f"{self.prediction.schedule}{chunks}" if self.plan.pp > 1 else "–"

    def to_dict(self) -> dict[str, Any]:
        """As it goes to JSON: what `Prediction.to_dict` has, and what to run."""
        return plan_values(self.plan, self.prediction, self.tokens_per_second_per_device, self.reasons)


def plan_values(plan: StepPlan, prediction: Prediction, tokens: float, reasons: Sequence[str]) -> dict[str, Any]:
    """A plan and what is predicted of it, as it goes to JSON; `tokens` are those of a second and device."""
    return {
        **prediction.to_dict(),
        "microbatch": plan.microbatch,
        "num_chunks": plan.num_chunks,
        "zero": plan.zero,
        "recompute": plan.recompute,
        "offload": plan.shares_on_host,
        "tokens_per_second_per_device": tokens,
        "reasons": list(reasons),
    }


@dataclass(frozen=True)
class RankedPlans:
    """What `autopar.rank_plans` found. Prints as a table; `plans[0]` is the fastest that fits.

    bound_seconds  no plan of the kinds that were looked at is faster, as `predict` prices them
    missing        by mesh why it has no plan here
    advice         what would change the answer
    """

    plans: tuple[RankedPlan, ...]
    missing: tuple[tuple[str, str], ...]
    advice: tuple[str, ...]
    bound_seconds: float
    num_devices: int
    cluster: str
    capacity_bytes: float
    num_simulated: int
    is_complete: bool

    def to_dict(self) -> dict[str, Any]:
        """As it goes to JSON; keys and their meaning stay."""
        return {
            "cluster": self.cluster,
            "num_devices": self.num_devices,
            "capacity_bytes": self.capacity_bytes,
            "bound_seconds": self.bound_seconds if self.bound_seconds < math.inf else None,
            "num_simulated": self.num_simulated,
            "is_complete": self.is_complete,
            "plans": [each.to_dict() for each in self.plans],
            "missing": [{"mesh": mesh, "reason": reason} for mesh, reason in self.missing],
            "advice": list(self.advice),
        }

    def __str__(self) -> str:
        shown = self.plans[:_SHOWN]
        lines = [f"{self.num_devices} devices of {self.cluster}: plans that fit on {len(self.plans)} meshes"]
        if shown:
            lines += _table(shown)
            lines += [f"  {reason}" for reason in shown[0].reasons]
            gap = shown[0].prediction.step_seconds / self.bound_seconds - 1
            lines.append(f"  at most {100 * gap:.1f} % above the bound of {in_seconds(self.bound_seconds)}, where nobody ever waits")
        if len(self.plans) > _SHOWN:
            more = len(self.plans) - _SHOWN
            lines.append(f"  and {more} slower mesh{'es' if more > 1 else ''}")
        lines += [f"  {each}" for each in self.advice]
        reasons: dict[str, list[str]] = {}
        for mesh, reason in self.missing:
            reasons.setdefault(reason, []).append(mesh)
        for reason, meshes in reasons.items():
            others = f" and {len(meshes) - 3} others" if len(meshes) > 3 else ""
            lines.append(f"  without: {', '.join(meshes[:3])}{others}: {reason}")
        if not self.is_complete:
            lines.append("  stopped before all meshes were looked at")
        return "\n".join(lines)


def ranking(search: Search, is_complete: bool) -> RankedPlans:
    """What was found in order, with reasons."""
    question, found = search.question, search.found
    having = sorted((each for each in found if each.best is not None), key=lambda each: _best(each).prediction.step_seconds)
    first = _best(having[0]) if having else None
    second = _best(having[1]) if len(having) > 1 else None
    bounds = [each.bound_seconds for each in found if each.bound_seconds < math.inf] if is_complete else [search.bound_seconds]
    missing = [(each.axes, _why_missing(each, question)) for each in found if each.best is None]
    missing += [(axes, problem) for axes in question.factorisations() if (problem := question.problem_of(axes))]
    plans = [_ranked(question, each.axes, _best(each), first, second) for each in having]
    return RankedPlans(
        tuple(plans),
        tuple((mesh_text(axes), reason) for axes, reason in missing),
        tuple(_advice(question, found, first)),
        min(bounds, default=math.inf),
        question.num_devices,
        question.cluster.name,
        question.capacity_bytes,
        search.num_simulated,
        is_complete,
    )


def mesh_text(axes: Axes) -> str:
    return " × ".join(f"{name}{size}" for name, size in axes if size > 1) or "1 device"


def _best(each: OnMesh) -> Found:
    assert each.best is not None
    return each.best


def _ranked(question: Question, axes: Axes, found: Found, first: Found | None, second: Found | None) -> RankedPlan:
    seconds = found.prediction.step_seconds
    tokens = question.global_batch * question.tokens_per_sample / seconds / question.num_devices
    reasons = [_where(found.prediction), *([_on_host(found)] if found.plan.offload else [])]
    if first is not None and found is not first:
        reasons.append(f"against the first: {_slower(found.prediction, first.prediction)}")
    elif second is not None:
        reasons.append(
            f"the next best mesh, {mesh_text(tuple(second.prediction.mesh.items()))}, is {_slower(second.prediction, found.prediction)}"
        )
    return RankedPlan(axes, found.plan, found.prediction, tokens, tuple(reasons))


def _where(prediction: Prediction) -> str:
    """Parts of the step, the largest first."""
    parts = sorted(prediction.seconds.items(), key=lambda part: -part[1])
    shares = ", ".join(
        f"{_name(name)} {100 * value / prediction.step_seconds:.0f} %" for name, value in parts if value > 0.005 * prediction.step_seconds
    )
    return f"where the time goes: {shares}"


def _on_host(found: Found) -> str:
    """What lies there, and what that takes."""
    most = found.prediction.host_bytes
    asked = ", ".join(f'{kind}="host"' for kind in found.plan.offload)
    within = "a memory_budget and " if found.plan.moves_activations and found.plan.offloaded_share < 1 else ""
    return f"on the host: {_away(found.plan)}, {in_bytes(most)} for each device; compile with {within}offload=autopar.Offload({asked})"


def _away(plan: StepPlan) -> str:
    parts = [f"{100 * plan.offloaded_share:.0f} % of activations"] if plan.moves_activations else []
    return " and ".join([*parts, *(["the optimizer's state"] if plan.updates_on_host else [])]) or "–"


def _slower(one: Prediction, other: Prediction) -> str:
    """`one` against a faster `other`, with the parts that make most of it."""
    apart = {name: one.seconds[name] - other.seconds.get(name, 0.0) for name in one.seconds}
    gap = one.step_seconds - other.step_seconds
    parts = sorted(apart.items(), key=lambda part: -abs(part[1]))[:3]
    told = ", ".join(f"{_name(name)} {in_seconds(value, sign=True)}" for name, value in parts if abs(value) > 0.1 * gap)
    if gap < 1e-3 * other.step_seconds:
        return "as fast"
    return f"{100 * gap / other.step_seconds:.1f} % slower ({told})"


def _why_missing(each: OnMesh, question: Question) -> str:
    if not each.is_simulated:
        return f"would take at least {WORTH_A_LOOK:g} times as long as the first"
    if each.least_bytes > question.capacity_bytes:
        return f"a device would hold more than its {in_bytes(question.capacity_bytes)}, whatever is recomputed or split"
    return f"no plan fits into {in_bytes(question.capacity_bytes)}"


def _advice(question: Question, found: Sequence[OnMesh], first: Found | None) -> list[str]:
    """What a person would try next."""
    lines: list[str] = []
    beyond = [each.beyond for each in found if each.beyond is not None]
    if beyond:
        best = min(beyond, key=lambda each: each.prediction.step_seconds)
        more = best.prediction.peak_bytes - question.capacity_bytes
        if first is None:
            lines.append(f"nothing fits; with {in_bytes(more)} more a device {_what(best)} would")
        elif best.prediction.step_seconds < 0.99 * first.prediction.step_seconds:
            gain = 100 * (1 - best.prediction.step_seconds / first.prediction.step_seconds)
            lines.append(f"memory is what limits it: with {in_bytes(more)} more a device {_what(best)} would take {gain:.0f} % less time")
    elif first is None:
        least = min((each.least_bytes for each in found if each.least_bytes), default=math.inf)
        if least < math.inf:
            lines.append(f"nothing fits: a device would have to hold {in_bytes(least)} at least; take more devices, or larger ones")
    if first is not None and question.offloads == KINDS:
        lines += _without_offload(question)
    if first is None and found:
        larger = fewest_devices(question)
        lines += [f"{larger.num_devices} such devices would do: {larger}"] if larger is not None else []
    elif first is None:
        lines += batch_advice(question)
    return lines


def _without_offload(question: Question) -> list[str]:
    """Where something must lie on the host: how many devices would do without."""
    larger = fewest_devices(replace(question, offloads=(NOTHING,)))
    return [f"nothing fits with all on the devices; on {larger.num_devices} of them {larger}"] if larger is not None else []


def _what(found: Found) -> str:
    prediction, plan = found.prediction, found.plan
    zero = f", zero {plan.zero}" if plan.zero else ""
    again = f", recompute {plan.recompute}" if plan.recompute != "none" else ""
    away = f", {_away(plan)} on the host" if plan.offload else ""
    return f"{mesh_text(tuple(prediction.mesh.items()))} with microbatches of {plan.microbatch}{again}{zero}{away}"


def _name(part: str) -> str:
    return {"tensor_parallel": "tp collectives", "gradients": "sums of gradients", "memory": "memory traffic"}.get(part, part)


def _table(plans: Sequence[RankedPlan]) -> list[str]:
    has_tokens = any(each.tokens_per_second_per_device for each in plans)
    has_host = any(each.plan.offload for each in plans)
    host, tokens = ["on the host"] * has_host, ["tokens/s/device"] * has_tokens
    rows = [["", "mesh", "schedule", "microbatches", "recompute", "zero", *host, "step", *tokens, "MFU", "memory"]]
    for number, each in enumerate(plans, 1):
        plan, prediction = each.plan, each.prediction
        rows.append(
            [
                str(number),
                each.mesh,
                each.schedule,
                f"{plan.num_microbatches} of {plan.microbatch}",
                plan.recompute,
                str(plan.zero),
                *([_away(plan)] if has_host else []),
                in_seconds(prediction.step_seconds),
                *([f"{each.tokens_per_second_per_device:,.0f}"] if has_tokens else []),
                f"{100 * prediction.mfu:.1f} %",
                in_bytes(prediction.peak_bytes),
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
