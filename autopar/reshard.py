"""From one sharding of a value to another: the cheapest sequence of collectives, step by step.

Every step works at the minor end of an atom's axes, where a rank's part is one contiguous box,
so gathering is concatenating and splitting is slicing. Order: what shrinks a value first (slice,
all-to-all, reduce-scatter), then all-reduce, then what grows it (all-gather).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from autopar.mesh import Mesh
from autopar.sharding import Dims, ReductionKind, Sharding, flat

StepKind = Literal["slice", "all_to_all", "reduce_scatter", "all_reduce", "all_gather"]


@dataclass(frozen=True)
class Step:
    """One collective (or a local slice) over the ranks along `axes`, the first axis major.

    `gathered` is the atom that becomes whole, `split` the atom that is divided; None where there is none.
    """

    collective: StepKind
    axes: tuple[str, ...]
    before: Sharding
    after: Sharding
    kind: Literal["sum", "max", "copy"] = "copy"
    gathered: int | None = None
    split: int | None = None
    num_input: int = 0
    num_output: int = 0

    def __str__(self) -> str:
        return f"{self.collective}({', '.join(self.axes)})"


def reachable(source: Sharding, target: Sharding) -> bool:
    """Whether a reshard exists: reducing is possible, becoming unreduced is not."""
    return set(target.unreduced) <= set(source.unreduced)


def is_slice(source: Sharding, target: Sharding) -> bool:
    """Whether `target` is another sharding that every rank can cut from its own part of `source`. A strict order."""
    return (
        source != target
        and source.unreduced == target.unreduced
        and all(want[: len(have)] == have for have, want in zip(source.splits, target.splits, strict=True))
    )


@lru_cache(maxsize=200_000)
def steps(dims: Dims, source: Sharding, target: Sharding, mesh: Mesh) -> tuple[Step, ...]:
    """The steps that turn `source` into `target` for a value of `dims`; none when they are equal."""
    assert reachable(source, target), (source, target)
    found: list[Step] = []
    now = source
    while now != target:
        step = _next(now, target)
        assert step is not None, (now, target)
        sizes = [math.prod(flat(s.local_dims(dims, mesh))) for s in (step.before, step.after)]
        found.append(replace(step, num_input=sizes[0], num_output=sizes[1]))
        now = step.after
    return tuple(found)


def _next(now: Sharding, target: Sharding) -> Step | None:
    return (
        _slice(now, target)
        or _all_to_all(now, target)
        or _reduce_scatter(now, target)
        or _all_reduce(now, target)
        or _all_gather(now, target)
    )


def _missing(now: Sharding, target: Sharding, atom: int) -> tuple[str, ...]:
    """The axes that `target` adds at the minor end of `atom`; none while `now` still has others there."""
    have, want = now.splits[atom], target.splits[atom]
    return want[len(have) :] if want[: len(have)] == have else ()


def _surplus(now: Sharding, target: Sharding, atom: int) -> tuple[str, ...]:
    """The axes at the minor end of `atom` that `target` does not have there."""
    have, want = now.splits[atom], target.splits[atom]
    common = 0
    while common < min(len(have), len(want)) and have[common] == want[common]:
        common += 1
    return have[common:]


def _with(now: Sharding, atom: int, axes: tuple[str, ...]) -> Sharding:
    return replace(now, splits=now.splits[:atom] + (axes,) + now.splits[atom + 1 :])


def _leading(axes: tuple[str, ...], allowed: set[str]) -> tuple[str, ...]:
    count = 0
    while count < len(axes) and axes[count] in allowed:
        count += 1
    return axes[:count]


def _slice(now: Sharding, target: Sharding) -> Step | None:
    for atom in range(len(now.splits)):
        missing = _missing(now, target, atom)
        axes = _leading(missing, set(missing) - set(now.axes))
        if axes:
            return Step("slice", axes, now, _with(now, atom, now.splits[atom] + axes), split=atom)
    return None


def _all_to_all(now: Sharding, target: Sharding) -> Step | None:
    for gathered in range(len(now.splits)):
        surplus = _surplus(now, target, gathered)
        for split in range(len(now.splits)):
            missing = _missing(now, target, split)
            axes = surplus if surplus == missing[: len(surplus)] else surplus[-1:]
            if split == gathered or not axes or missing[: len(axes)] != axes:
                continue
            kept = now.splits[gathered][: -len(axes)]
            after = _with(_with(now, gathered, kept), split, now.splits[split] + axes)
            return Step("all_to_all", axes, now, after, gathered=gathered, split=split)
    return None


def _to_reduce(now: Sharding, target: Sharding, kind: ReductionKind) -> tuple[str, ...]:
    return tuple(axis for axis, found in now.unreduced if found == kind and (axis, found) not in target.unreduced)


def _reduced(now: Sharding, axes: tuple[str, ...]) -> Sharding:
    return replace(now, unreduced=tuple(entry for entry in now.unreduced if entry[0] not in axes))


def _reduce_scatter(now: Sharding, target: Sharding) -> Step | None:
    for atom in range(len(now.splits)):
        axes = _leading(_missing(now, target, atom), set(_to_reduce(now, target, "sum")))
        if axes:
            after = _with(_reduced(now, axes), atom, now.splits[atom] + axes)
            return Step("reduce_scatter", axes, now, after, kind="sum", split=atom)
    return None


def _all_reduce(now: Sharding, target: Sharding) -> Step | None:
    kinds: tuple[ReductionKind, ...] = ("sum", "max")
    for kind in kinds:
        axes = _to_reduce(now, target, kind)
        if axes:
            return Step("all_reduce", axes, now, _reduced(now, axes), kind=kind)
    return None


def _all_gather(now: Sharding, target: Sharding) -> Step | None:
    for atom in range(len(now.splits)):
        axes = _surplus(now, target, atom)
        if axes:
            kept = now.splits[atom][: -len(axes)]
            return Step("all_gather", axes, now, _with(now, atom, kept), gathered=atom)
    return None
