"""What differs between two plans: whatever a plan decides, repeated layers as one line.

1 of 12 parameters and 12 of 96 ops differ
freedom   dp splits the batch → dp splits the batch and parameters
parameters
  h.*.mlp.c_fc.weight   [32, 64@tp] → [32@tp, 64]   × 12
ops
  forward h.*.mlp.c_fc aten.mm 0   dp:m tp:n → dp:m tp:k   × 12
recomputed
  forward h.*.mlp.act aten.gelu.default 0   kept → computed again   × 12
pipeline
  schedule   1f1b, 4 microbatches → zb-h1, 4 microbatches
  stage 1   forward h.2 aten.add.Tensor 0 → forward h.3 aten.add.Tensor 0
buckets
  dp   25.0 MB → 12.5 MB
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from autopar.ir.actions import PipelineSchedule
from autopar.ir.freedom import Freedom
from autopar.ir.mesh import Mesh
from autopar.ir.offload import Away
from autopar.ir.pattern import folded, pattern_of
from autopar.ir.precision import MixedPrecision
from autopar.ir.units import in_bytes


class Decisions(Protocol):
    """What is compared of an `autopar.plans.plan.Plan`, whose docstring says what each is."""

    @property
    def mesh(self) -> Mesh: ...
    @property
    def freedom(self) -> Freedom: ...
    @property
    def precision(self) -> MixedPrecision | None: ...
    @property
    def pinned(self) -> tuple[str, ...]: ...
    @property
    def parameters(self) -> Mapping[str, object]: ...
    @property
    def inputs(self) -> Mapping[str, object]: ...
    @property
    def strategies(self) -> Mapping[str, object]: ...
    @property
    def kernels(self) -> Mapping[str, str]: ...
    @property
    def recomputed(self) -> tuple[str, ...]: ...
    @property
    def chunks(self) -> Mapping[str, int] | None: ...
    @property
    def schedule(self) -> PipelineSchedule | None: ...
    @property
    def cuts(self) -> tuple[str, ...]: ...
    @property
    def buckets(self) -> Mapping[str, int]: ...
    @property
    def offloaded(self) -> Offloaded | None: ...
    @property
    def stored(self) -> Away | None: ...


class Offloaded(NamedTuple):
    """What is saved for the backward in `memory`, "host" or "file": by place along `pp` the names that the printed schedule has for it."""

    memory: str
    buffers: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Change:
    """What is one thing `before` and another `after`, by name; an empty text where one plan does not have it."""

    name: str
    before: str
    after: str


@dataclass(frozen=True)
class PlanDiff:
    """Truthy when something differs. `num_parameters` and `num_ops` count all that either plan has.

    settings    what there is one of: the mesh, the roles of its axes and the level of ZeRO, the precision, the modules that are pinned
    inputs      how the batch, buffers and constants lie
    recomputed  what the backward computes again
    """

    parameters: tuple[Change, ...]
    ops: tuple[Change, ...]
    num_parameters: int = 0
    num_ops: int = 0
    settings: tuple[Change, ...] = ()
    inputs: tuple[Change, ...] = ()
    kernels: tuple[Change, ...] = ()
    recomputed: tuple[Change, ...] = ()
    chunks: tuple[Change, ...] = ()
    pipeline: tuple[Change, ...] = ()
    buckets: tuple[Change, ...] = ()
    offloaded: tuple[Change, ...] = ()

    @staticmethod
    def between(before: Decisions, after: Decisions) -> PlanDiff:
        """What is otherwise in `after`. Reasons and the fingerprint are no decisions; no chunks are as none that were decided."""
        both = (before, after)
        again = tuple(dict.fromkeys((*before.recomputed, *after.recomputed)))
        return PlanDiff(
            parameters=changes(before.parameters, after.parameters),
            ops=changes(before.strategies, after.strategies),
            num_parameters=len({*before.parameters, *after.parameters}),
            num_ops=len({*before.strategies, *after.strategies}),
            settings=changes(*map(_settings, both)),
            inputs=changes(before.inputs, after.inputs),
            kernels=changes(before.kernels, after.kernels),
            recomputed=changes(*({key: "computed again" if key in each.recomputed else "kept" for key in again} for each in both)),
            chunks=changes(before.chunks or {}, after.chunks or {}),
            pipeline=changes(*map(_pipeline, both)),
            buckets=changes(*({axes: _Bytes(size) for axes, size in each.buckets.items()} for each in both)),
            offloaded=changes(*map(_away, both)),
        )

    def __bool__(self) -> bool:
        return bool(self.settings) or any(found for _, found in (*self._by_layer, *self._by_name))

    def __str__(self) -> str:
        if not self:
            return "the plans are the same"
        lines = [f"{len(self.parameters)} of {self.num_parameters} parameters and {len(self.ops)} of {self.num_ops} ops differ"]
        lines += _rows(self.settings)
        for title, found in self._by_layer:
            lines += [title, *(f"  {line}" for line in _folded(found))] if found else []
        for title, found in self._by_name:
            lines += [title, *(f"  {line}" for line in _rows(found))] if found else []
        return "\n".join(lines)

    @property
    def _by_layer(self) -> tuple[tuple[str, tuple[Change, ...]], ...]:
        return (
            ("parameters", self.parameters),
            ("inputs", self.inputs),
            ("ops", self.ops),
            ("kernels", self.kernels),
            ("recomputed", self.recomputed),
            ("chunks", self.chunks),
        )

    @property
    def _by_name(self) -> tuple[tuple[str, tuple[Change, ...]], ...]:
        return (("pipeline", self.pipeline), ("buckets", self.buckets), ("offloaded", self.offloaded))


@dataclass(frozen=True)
class _Order:
    """A schedule that prints in a few words."""

    schedule: PipelineSchedule

    def __str__(self) -> str:
        number = self.schedule.num_microbatches
        return f"{self.schedule.name}, {number} microbatch{'' if number == 1 else 'es'}"


class _Bytes(int):
    """A number of them, in a unit that reads well."""

    def __str__(self) -> str:
        return in_bytes(self)


def _settings(plan: Decisions) -> dict[str, object]:
    found = {"mesh": plan.mesh, "freedom": _roles(plan.freedom), "precision": plan.precision, "pinned": ", ".join(plan.pinned) or None}
    return {name: value for name, value in found.items() if value is not None}


def _roles(freedom: Freedom) -> str:
    """Of axes in words."""
    batch = " · ".join(freedom.batch) or "no axis"
    roles = [f"{batch} splits the batch{' and parameters' if freedom.shards_parameters else ''}"]
    roles += [f"{' · '.join(freedom.flexible)} the batch or anything else"] if freedom.flexible else []
    return ", ".join([*roles, *([str(freedom.zero)] if freedom.zero is not None else [])])


def _pipeline(plan: Decisions) -> dict[str, object]:
    """Its order, and where its stages begin."""
    cuts: dict[str, object] = {f"stage {number}": cut for number, cut in enumerate(plan.cuts, 1)}
    return cuts if plan.schedule is None else {"schedule": _Order(plan.schedule), **cuts}


def _away(plan: Decisions) -> dict[str, object]:
    """What lies elsewhere than on the device, and where."""
    stored: dict[str, object] = {} if plan.stored is None else {"parameters": plan.stored}
    if plan.offloaded is None:
        return stored
    names = {f"pp = {place}": ", ".join(each) or "nothing" for place, each in enumerate(plan.offloaded.buffers)}
    return {"memory": plan.offloaded.memory, **names, **stored}


def changes(before: Mapping[str, object], after: Mapping[str, object]) -> tuple[Change, ...]:
    """The entries that differ, in the order of `before`, then what `after` adds."""
    found: list[Change] = []
    for name in dict.fromkeys((*before, *after)):
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        texts = ["" if each is None else str(each) for each in (old, new)]
        # Two ways of running an op may go by one name where operands lie in another order of axes.
        texts = [repr(each) for each in (old, new)] if texts[0] == texts[1] else texts
        found.append(Change(name, *texts))
    return tuple(found)


def _rows(found: Iterable[Change]) -> list[str]:
    return [f"{each.name}   {each.before or 'none'} → {each.after or 'none'}" for each in found]


def _folded(found: tuple[Change, ...]) -> Iterator[str]:
    names = [change.name for change in found]
    groups: dict[tuple[str, str, str], list[str]] = {}
    for change in found:
        groups.setdefault((pattern_of(change.name), change.before, change.after), []).append(change.name)
    for (_, before, after), members in groups.items():
        count = f"   × {len(members)}" if len(members) > 1 else ""
        yield f"{folded(members, names)}   {before or 'absent'} → {after or 'absent'}{count}"
