"""What differs between two plans: parameters that lie otherwise, ops that are split otherwise, repeated layers as one line, the
pipeline, how large buckets are, what goes in pieces, and what lies elsewhere than on the device.

parameters
  h.*.mlp.c_fc.weight   [32, 64@tp] → [32@tp, 64]   × 12
ops
  forward h.*.mlp.c_fc aten.mm 0   dp:m tp:n → dp:m tp:k   × 12
pipeline
  schedule   1f1b, 4 microbatches → zb-h1, 4 microbatches
  stage 1   forward h.2 aten.add.Tensor 0 → forward h.3 aten.add.Tensor 0
buckets
  dp   25.0 MB → 12.5 MB
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.ir.pattern import folded, pattern_of


@dataclass(frozen=True)
class Change:
    """What is one thing `before` and another `after`, by name; an empty text where one plan does not have it."""

    name: str
    before: str
    after: str


@dataclass(frozen=True)
class PlanDiff:
    """Truthy when something differs. `num_parameters` and `num_ops` count all that either plan has."""

    parameters: tuple[Change, ...]
    ops: tuple[Change, ...]
    num_parameters: int = 0
    num_ops: int = 0
    pipeline: tuple[Change, ...] = ()
    kernels: tuple[Change, ...] = ()
    buckets: tuple[Change, ...] = ()
    precision: tuple[Change, ...] = ()
    offloaded: tuple[Change, ...] = ()
    chunks: tuple[Change, ...] = ()

    def __bool__(self) -> bool:
        others = (self.pipeline, self.kernels, self.buckets, self.precision, self.offloaded, self.chunks)
        return bool(self.parameters or self.ops or any(others))

    def __str__(self) -> str:
        if not self:
            return "the plans are the same"
        lines = [f"{len(self.parameters)} of {self.num_parameters} parameters and {len(self.ops)} of {self.num_ops} ops differ"]
        for title, changes in (("parameters", self.parameters), ("ops", self.ops), ("kernels", self.kernels), ("chunks", self.chunks)):
            lines += [title, *(f"  {line}" for line in _folded(changes))] if changes else []
        lines += [f"{each.name}   {each.before or 'none'} → {each.after or 'none'}" for each in self.precision]
        for title, changes in (("pipeline", self.pipeline), ("buckets", self.buckets), ("offloaded", self.offloaded)):
            rows = [f"  {each.name}   {each.before or 'none'} → {each.after or 'none'}" for each in changes]
            lines += [title, *rows] if rows else []
        return "\n".join(lines)


def changes(before: Mapping[str, object], after: Mapping[str, object]) -> Iterator[Change]:
    """The entries that differ, in the order of `before`, then what `after` adds."""
    for name in dict.fromkeys((*before, *after)):
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        texts = ["" if each is None else str(each) for each in (old, new)]
        # Two ways of running an op may go by one name where operands lie in another order of axes.
        texts = [repr(each) for each in (old, new)] if texts[0] == texts[1] else texts
        yield Change(name, *texts)


def _folded(found: tuple[Change, ...]) -> Iterator[str]:
    names = [change.name for change in found]
    groups: dict[tuple[str, str, str], list[str]] = {}
    for change in found:
        groups.setdefault((pattern_of(change.name), change.before, change.after), []).append(change.name)
    for (_, before, after), members in groups.items():
        count = f"   × {len(members)}" if len(members) > 1 else ""
        yield f"{folded(members, names)}   {before or 'absent'} → {after or 'absent'}{count}"
