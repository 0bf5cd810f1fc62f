"""Infers the rule of an op that has none, by running it: small operands whole, against the same operands in parts.

A factor is claimed only when every way to cut it, down to single elements, contiguous or with strides, gives the parts of the
whole result (or addends, or a maximum of it): for every set of values, every reading of the literals, and once more on larger
operands. An operand is cut only if it must be: where the parts of the result come out right with the whole operand, it stays whole, even
if one of its dims has the size of those that are cut. What draws random numbers, writes into its operands, keeps a state, or fails on
small values has no rule: it runs replicated. Linearity is never inferred: no number of samples tells `min(x, 1e9)` from `x`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from autopar._torch import OpOverload, writes_operands
from autopar.ir.program import operands, results_of
from autopar.ir.sharding import ReductionKind
from autopar.ops.probing.isolated import isolated
from autopar.ops.probing.runs import Trial, Values, joined, larger_trials, small_trials
from autopar.ops.rule import Labels, Rule

# What becomes of a result when a factor is split: split along this dim, or reduced.
Outcome = int | ReductionKind
# Sets of operand dims that are tried for one op: one with many operands of many equal dims is not worth more.
_MAX_CANDIDATES = 256
# Most ops take a tenth of a second; this is for those that never end.
_SECONDS = 20.0
_REFUSED = (torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
# Ops that talk to other ranks.
_NAMESPACES = ("autopar", "c10d", "c10d_functional", "_c10d_functional", "_dtensor")


@dataclass(frozen=True)
class Found:
    """A factor: for each operand the dim that it splits (None: needed whole), for each result what becomes of it."""

    operands: tuple[int | None, ...]
    results: tuple[Outcome, ...]


_RULES: dict[object, Rule | None] = {}


def infer(node: Node) -> Rule | None:
    """The rule found for `node`, marked `inferred`; None where nothing is found. Kept for calls of equal shapes and literals."""
    if not _may_be_tried(node):
        return None
    sources = operands(node)
    order = iter(range(len(sources)))
    literals = torch.fx.map_arg((node.args, node.kwargs), lambda _: f"operand {next(order)}")
    values = [value for each in (*sources, node) for value in results_of(each)]
    key = (node.target, repr(literals), tuple((tuple(value.shape), value.dtype) for value in values if value is not None))
    if key not in _RULES:
        # Kernels trust that operands fit each other, and parts of them may not.
        _RULES[key] = isolated(lambda: _infer(node), _SECONDS)
    return _RULES[key]


def _may_be_tried(node: Node) -> bool:
    """Pure ops on tensors, of which each operand and each result is one."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace in _NAMESPACES:
        return False
    if writes_operands(target) or any(tag in target.tags for tag in _REFUSED):
        return False
    values = [value for source in operands(node) for value in results_of(source)] + list(results_of(node))
    one_each = all(len(results_of(source)) == 1 for source in operands(node))
    return bool(operands(node)) and one_each and all(value is not None and value.layout == torch.strided for value in values)


def _infer(node: Node) -> Rule | None:
    trials = small_trials(node)
    if len(trials) < 2:
        return None
    found = _factors(trials)
    if found:
        larger = larger_trials(node)
        found = [
            factor
            for factor in found
            if larger and all(factor.results in _outcomes(trial, factor.operands, coarsely=True) for trial in larger)
        ]
        found = found[:1] if not all(_together(trials[0], pair) for pair in itertools.combinations(found, 2)) else found
    return _rule(node, found) if found else None


def _factors(trials: Sequence[Trial]) -> list[Found]:
    """Factors of which no two share a dim of an operand or a result; splits of results are taken before reductions."""
    claims = [Found(dims, outcome) for dims in _candidates(trials[0]) for outcome in _agreed(trials, dims)]
    # A label is reduced in one way.
    claims = [claim for claim in claims if len({outcome for outcome in claim.results if isinstance(outcome, str)}) < 2]
    claims = [claim for claim in claims if not any(_says_with_less(other, claim) for other in claims)]
    claims.sort(key=lambda claim: (sum(isinstance(outcome, str) for outcome in claim.results), claim.operands.count(None)))
    taken: set[tuple[str, int, int]] = set()
    kept: list[Found] = []
    for claim in claims:
        dims = {("operand", i, dim) for i, dim in enumerate(claim.operands) if dim is not None}
        dims |= {("result", i, dim) for i, dim in enumerate(claim.results) if isinstance(dim, int)}
        if not dims & taken:
            kept.append(claim)
            taken |= dims
    return kept


def _says_with_less(claim: Found, other: Found) -> bool:
    """Whether `claim` leaves whole some of the operands that `other` cuts, and is `other` else.

    Such an operand has a dim of the same size by chance, and values that do not show it, as counts that are all one.
    """
    same = all(mine in (None, theirs) for mine, theirs in zip(claim.operands, other.operands, strict=True))
    return claim != other and same and claim.results == other.results


def _candidates(trial: Trial) -> Iterator[tuple[int | None, ...]]:
    """Sets of operand dims of one size, at most one of each operand."""
    sizes = sorted({size for value in trial.values for size in value.shape if size > 1})

    def of(size: int) -> Iterator[tuple[int | None, ...]]:
        choices = [(*(dim for dim, length in enumerate(value.shape) if length == size), None) for value in trial.values]
        return (dims for dims in itertools.product(*choices) if any(dim is not None for dim in dims))

    return itertools.islice(itertools.chain.from_iterable(map(of, sizes)), _MAX_CANDIDATES)


def _agreed(trials: Sequence[Trial], dims: tuple[int | None, ...]) -> list[tuple[Outcome, ...]]:
    """What becomes of the results in all trials; several where they cannot be told apart."""
    common: list[tuple[Outcome, ...]] | None = None
    for trial in trials:
        found = _outcomes(trial, dims)
        common = found if common is None else [outcome for outcome in common if outcome in found]
        if not common:
            return []
    return common or []


def _outcomes(trial: Trial, dims: tuple[int | None, ...], coarsely: bool = False) -> list[tuple[Outcome, ...]]:
    """What becomes of the results, however finely the dims are cut (`coarsely`: in as few parts as can be)."""
    size = next(value.shape[dim] for value, dim in zip(trial.values, dims, strict=True) if dim is not None)
    counts = trial.counts(size)[-1:] if coarsely else trial.counts(size)
    found: list[list[Outcome]] | None = None
    for count, strided in itertools.product(counts, (False, True)):
        parts = trial.parts(dims, count, strided)
        if parts is None:
            return []
        here = [_outcomes_of(trial, index, whole, parts, strided) for index, whole in enumerate(trial.results)]
        found = here if found is None else [[kind for kind in old if kind in new] for old, new in zip(found, here, strict=True)]
        if not all(found):
            return []
    return list(itertools.product(*found)) if found else []


def _outcomes_of(trial: Trial, index: int, whole: torch.Tensor, results: list[Values], strided: bool) -> list[Outcome]:
    parts = [result[index] for result in results]
    if any(part.shape != parts[0].shape for part in parts):
        return []
    found: list[Outcome] = []
    for dim, size in enumerate(whole.shape):
        if size > 1 and parts[0].shape[dim] * len(parts) == size and trial.same(joined(parts, dim, strided), whole):
            found.append(dim)
    # Zeros are the sum and the maximum of anything: they prove nothing.
    if parts[0].shape == whole.shape and whole.dtype != torch.bool and not whole.is_complex() and bool((whole != 0).any()):
        stacked = torch.stack(parts)
        if trial.same(stacked.sum(0).to(whole.dtype), whole):
            found.append("sum")
        if trial.same(stacked.amax(0), whole) and not trial.same(parts[0], whole):
            found.append("max")
    return found


def _together(trial: Trial, pair: tuple[Found, Found]) -> bool:
    """Whether two factors may be split at once, in two parts each."""
    first, second = pair
    results = trial.parts(first.operands, 2, strided=False)
    assert results is not None
    for index, whole in enumerate(results):
        part = trial.part(first.operands, 2, index, whole)
        if second.results not in _outcomes(part, second.operands, coarsely=True):
            return False
    return True


def _rule(node: Node, found: Sequence[Found]) -> Rule:
    reductions: dict[str, ReductionKind] = {
        f"p{name}": outcome for name, factor in enumerate(found) for outcome in factor.results if not isinstance(outcome, int)
    }

    def labels(dims: Any, position: int, num_dims: int) -> Labels:
        names = {dims(factor)[position]: f"p{name}" for name, factor in enumerate(found)}
        return tuple(names.get(dim) for dim in range(num_dims))

    sources = [results_of(source)[0] for source in operands(node)]
    return Rule(
        tuple(labels(lambda factor: factor.operands, i, value.dim()) for i, value in enumerate(sources) if value is not None),
        tuple(labels(lambda factor: factor.results, i, value.dim()) for i, value in enumerate(results_of(node)) if value is not None),
        reductions=reductions,
        inferred=True,
    )
