"""From one sharding of a value to another: the cheapest sequence of collectives, step by step.

Every step works at the minor end of an atom's axes, where a rank's part is one contiguous box,
so gathering is concatenating and splitting is slicing. Order: what shrinks a value first (slice,
all-to-all, reduce-scatter), then all-reduce, then what grows it (all-gather).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Dims, ReductionKind, Sharding, flat

Splits = tuple[tuple[str, ...], ...]
Unreduced = tuple[tuple[str, ReductionKind], ...]
StepKind = Literal["slice", "all_to_all", "reduce_scatter", "all_reduce", "all_gather"]


@dataclass(frozen=True)
class ReshardStep:
    """One collective (or a local slice) over the ranks along `axes`, the first axis major.

    `gathered` is the atom that becomes whole, `split` the atom that is divided; None where there is none. A reduction by
    "logsumexp" is an all-gather: of one number a row, one latency is less than the two of all-reduces, of a maximum and a sum.
    """

    collective: StepKind
    axes: tuple[str, ...]
    before: Sharding
    after: Sharding
    kind: ReductionKind | Literal["copy"] = "copy"
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


@dataclass(frozen=True)
class Move:
    """A step without sizes. `splits` and `unreduced` are the sharding that it leaves."""

    collective: StepKind
    axes: tuple[str, ...]
    splits: Splits
    unreduced: Unreduced
    kind: ReductionKind | Literal["copy"] = "copy"
    gathered: int | None = None
    split: int | None = None


def steps(dims: Dims, source: Sharding, target: Sharding, mesh: Mesh) -> tuple[ReshardStep, ...]:
    """The steps that turn `source` into `target` for a value of `dims`; none when they are equal."""
    found: list[ReshardStep] = []
    now = source
    for move in moves(source, target):
        after = Sharding(move.splits, move.unreduced)
        sizes = [math.prod(flat(each.local_dims(dims, mesh))) for each in (now, after)]
        if move.kind == "logsumexp":
            sizes[1] *= mesh.size_of(move.axes)
        found.append(ReshardStep(move.collective, move.axes, now, after, move.kind, move.gathered, move.split, *sizes))
        now = after
    return tuple(found)


@lru_cache(maxsize=500_000)
def moves(source: Sharding, target: Sharding) -> tuple[Move, ...]:
    """The steps from `source` to `target`, whatever the sizes. Searches ask for hundreds of thousands of pairs."""
    assert reachable(source, target), (source, target)
    found: list[Move] = []
    splits, unreduced = source.splits, source.unreduced
    while splits != target.splits or unreduced != target.unreduced:
        move = (
            _slice(splits, unreduced, target)
            or _all_to_all(splits, unreduced, target)
            or _reduce_scatter(splits, unreduced, target)
            or _all_reduce(splits, unreduced, target)
            or _all_gather(splits, unreduced, target)
        )
        assert move is not None, (splits, unreduced, target)
        found.append(move)
        splits, unreduced = move.splits, move.unreduced
    return tuple(found)


def _missing(have: tuple[str, ...], want: tuple[str, ...]) -> tuple[str, ...]:
    """The axes that a target adds at the minor end of an atom; none while the atom still has others there."""
    return want[len(have) :] if want[: len(have)] == have else ()


def _surplus(have: tuple[str, ...], want: tuple[str, ...]) -> tuple[str, ...]:
    """The axes at the minor end of an atom that a target does not have there."""
    common = 0
    while common < min(len(have), len(want)) and have[common] == want[common]:
        common += 1
    return have[common:]


def _with(splits: Splits, atom: int, axes: tuple[str, ...]) -> Splits:
    return splits[:atom] + (axes,) + splits[atom + 1 :]


def _slice(splits: Splits, unreduced: Unreduced, target: Sharding) -> Move | None:
    for atom, (have, want) in enumerate(zip(splits, target.splits, strict=True)):
        if have == want or want[: len(have)] != have:
            continue
        used = {axis for split in splits for axis in split} | {axis for axis, _ in unreduced}
        count = len(have)
        while count < len(want) and want[count] not in used:
            count += 1
        if count > len(have):
            return Move("slice", want[len(have) : count], _with(splits, atom, want[:count]), unreduced, split=atom)
    return None


def _all_to_all(splits: Splits, unreduced: Unreduced, target: Sharding) -> Move | None:
    for gathered, (have, want) in enumerate(zip(splits, target.splits, strict=True)):
        surplus = _surplus(have, want)
        if not surplus:
            continue
        for split, (other, wanted) in enumerate(zip(splits, target.splits, strict=True)):
            missing = _missing(other, wanted)
            axes = surplus if surplus == missing[: len(surplus)] else surplus[-1:]
            if split != gathered and missing[: len(axes)] == axes:
                after = _with(_with(splits, gathered, have[: -len(axes)]), split, other + axes)
                return Move("all_to_all", axes, after, unreduced, gathered=gathered, split=split)
    return None


def _to_reduce(unreduced: Unreduced, target: Sharding, kind: ReductionKind) -> tuple[str, ...]:
    return tuple(axis for axis, found in unreduced if found == kind and (axis, found) not in target.unreduced)


def _reduced(unreduced: Unreduced, axes: tuple[str, ...]) -> Unreduced:
    return tuple(entry for entry in unreduced if entry[0] not in axes)


def _reduce_scatter(splits: Splits, unreduced: Unreduced, target: Sharding) -> Move | None:
    sums = _to_reduce(unreduced, target, "sum")
    for atom, (have, want) in enumerate(zip(splits, target.splits, strict=True)) if sums else ():
        missing = _missing(have, want)
        count = 0
        while count < len(missing) and missing[count] in sums:
            count += 1
        if count:
            axes = missing[:count]
            return Move("reduce_scatter", axes, _with(splits, atom, have + axes), _reduced(unreduced, axes), kind="sum", split=atom)
    return None


def _all_reduce(splits: Splits, unreduced: Unreduced, target: Sharding) -> Move | None:
    kinds: tuple[ReductionKind, ...] = ("sum", "max")
    for kind in kinds:
        axes = _to_reduce(unreduced, target, kind)
        if axes:
            return Move("all_reduce", axes, splits, _reduced(unreduced, axes), kind=kind)
    axes = _to_reduce(unreduced, target, "logsumexp")
    return Move("all_gather", axes, splits, _reduced(unreduced, axes), kind="logsumexp") if axes else None


def _all_gather(splits: Splits, unreduced: Unreduced, target: Sharding) -> Move | None:
    for atom, (have, want) in enumerate(zip(splits, target.splits, strict=True)):
        axes = _surplus(have, want)
        if axes:
            return Move("all_gather", axes, _with(splits, atom, have[: -len(axes)]), unreduced, gathered=atom)
    return None
