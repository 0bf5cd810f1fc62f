"""From an op's rule to the ways of running it on a mesh.

A *factor* is one atom of the op's iteration space. On each axis of the mesh an op either splits a
factor, passes unreduced sums through operands it is linear in, or does the same on every rank;
a strategy is one such choice per axis.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch.fx import Node

from autopar.ir.arguments import int_at, node_at
from autopar.ir.freedom import Freedom
from autopar.ir.keys import BATCH, DIMS
from autopar.ir.mesh import Mesh, parent
from autopar.ir.program import Input, InputKind, Output, operands, results_of
from autopar.ir.sharding import Dims, ReductionKind, Sharding, Strategy, atoms_of_dim, flat
from autopar.ops.lookup import rule_of
from autopar.ops.rule import Labels, Rule
from autopar.ops.rules.labels import is_zero


@dataclass(frozen=True)
class Factor:
    """One atom of an op's iteration space.

    `operands` and `results` hold the position of the atom in each operand and result, None where it is lacking:
    such an operand is needed whole, such a result is unreduced by its kind of `kinds` when the factor is split.
    """

    name: str
    size: int
    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    kinds: tuple[ReductionKind, ...] = ()
    is_batch: bool = False


@dataclass(frozen=True)
class Space:
    """All that strategies depend on: equal layers have equal spaces.

    `operands` and `results` count atoms; a result that is None (a gradient nobody asked for) has None. One that
    `takes_all` (a getitem) takes what it is given, split over the batch or, as a statistic of the whole batch, not, and unreduced by
    the kinds in `passes`.
    """

    operands: tuple[int, ...]
    results: tuple[int | None, ...]
    factors: tuple[Factor, ...]
    linear: tuple[frozenset[int], ...]
    takes_all: bool = False
    passes: tuple[ReductionKind, ...] = ()


_DEFAULT = Freedom()
# What one axis does: split a factor, pass sums through a set of operands, pass what is unreduced by a kind, or nothing.
AxisChoice = Factor | frozenset[int] | ReductionKind | None


def operand_dims(node: Node) -> tuple[Dims, ...]:
    """The atoms of each operand. A getitem's operand is the one result that it selects."""
    if node.target is operator.getitem:
        return (DIMS[node_at(node, 0)][int_at(node, 1)],)
    return tuple(DIMS[operand][0] for operand in operands(node))


def signature_of(node: Node) -> Hashable:
    """Equal for calls that have equal rules, spaces and costs. Reads DIMS, and BATCH where it is set. Much cheaper than these."""
    reads = operands(node)
    numbers = {operand: number for number, operand in enumerate(dict.fromkeys(reads))}
    literals = repr(_plain((node.args, node.kwargs), numbers))
    values = tuple((DIMS[each], BATCH.get(each), _dtypes(each)) for each in (*numbers, node))
    passed = _passed(node) if node.target is operator.getitem else ()
    return str(node.target), literals, values, tuple(map(is_zero, numbers)), passed


def _dtypes(node: Node) -> tuple[torch.dtype | None, ...]:
    return tuple(value.dtype if value is not None else None for value in results_of(node))


def _plain(value: object, numbers: Mapping[Node, int]) -> object:
    """Arguments with nodes as numbers."""
    if isinstance(value, Node):
        return f"%{numbers[value]}"
    if isinstance(value, (tuple, list)):
        return tuple(_plain(item, numbers) for item in value)
    if isinstance(value, dict):
        return tuple((key, _plain(item, numbers)) for key, item in value.items())
    return value


def factors_of(node: Node) -> tuple[Factor, ...]:
    """The factors that may be split; none for an op without a rule. Reads DIMS, and BATCH where it is set."""
    return space_of(node).factors


def indices_of(node: Node) -> tuple[Factor, ...]:
    """The factors of `node`, those that may not be split included. Reads DIMS."""
    rule, sources, results = rule_of(node), operand_dims(node), DIMS[node]
    if rule is None:
        return ()
    return tuple(
        _view_factors(sources[0], results[0]) if rule.view else _label_factors(replace(rule, blocked=frozenset()), sources, results)
    )


def space_of(node: Node) -> Space:
    """The iteration space of `node`. Reads DIMS, and BATCH where it is set."""
    rule, sources, results = rule_of(node), operand_dims(node), DIMS[node]
    present = [value is not None for value in results_of(node)]
    factors: tuple[Factor, ...] = ()
    if rule is not None:
        found = _view_factors(sources[0], results[0]) if rule.view else _label_factors(rule, sources, results)
        batches = _batches(node, len(results))
        factors = tuple(replace(factor, is_batch=True) if _is_batch(factor, batches) else factor for factor in found)
    return Space(
        tuple(len(flat(dims)) for dims in sources),
        tuple(len(flat(dims)) if there else None for dims, there in zip(results, present, strict=True)),
        factors,
        rule.linear if rule else (),
        node.target is operator.getitem,
        _passed(node) if node.target is operator.getitem else (),
    )


class Spaces:
    """The spaces of the calls of a graph that nobody changes meanwhile, each derived once for all calls of its signature."""

    def __init__(self) -> None:
        self._of: dict[Node, Space] = {}
        self._known: dict[Hashable, Space] = {}

    def of(self, node: Node) -> Space:
        if node not in self._of:
            signature = signature_of(node)
            if signature not in self._known:
                self._known[signature] = space_of(node)
            self._of[node] = self._known[signature]
        return self._of[node]


def _passed(node: Node) -> tuple[ReductionKind, ...]:
    """The kinds, other than sums, by which the result that a getitem selects may be unreduced."""
    producer, result = node.args
    assert isinstance(producer, Node) and isinstance(result, int)
    rule = rule_of(producer)
    given = rule.reductions.values() if rule is not None else ()
    kinds: list[ReductionKind] = [kind if isinstance(kind, str) else kind[result] for kind in given]
    return tuple(dict.fromkeys(kind for kind in kinds if kind != "sum"))


def _view_factors(source: Dims, result: Dims) -> Iterator[Factor]:
    """Atoms at equal places of the flat range; an atom that one side breaks otherwise is blocked."""
    places = {place: i for i, place in enumerate(_places(result))}
    for i, place in enumerate(_places(source)):
        if place in places and place[0]:
            yield Factor(f"a{i}", place[0], (i,), (places[place],))


def _places(dims: Dims) -> list[tuple[int, int]]:
    """(size, inner stride) of every atom."""
    found: list[tuple[int, int]] = []
    stride = 1
    for size in reversed(flat(dims)):
        found.append((size, stride))
        stride *= size
    return found[::-1]


def _label_factors(rule: Rule, sources: tuple[Dims, ...], results: tuple[Dims, ...]) -> Iterator[Factor]:
    tensors = [_occurrences(labels, dims, rule.sizes) for labels, dims in zip(rule.operands + rule.results, sources + results, strict=True)]
    for label in dict.fromkeys(label for tensor in tensors for label in tensor):
        found = [tensor.get(label) for tensor in tensors]
        shapes = {sizes for _, sizes in filter(None, found)}
        # Unequal atoms, or a label twice on one tensor, cannot be split alike everywhere.
        if label in rule.blocked or len(shapes) != 1 or any(0 in sizes for sizes in shapes):
            continue
        (sizes,) = shapes
        for i, size in enumerate(sizes):
            positions = tuple(entry[0] + i if entry else None for entry in found)
            name = label if len(sizes) == 1 else f"{label}.{i}"
            kind = rule.reductions.get(label, "sum")
            kinds = (kind,) * len(results) if isinstance(kind, str) else kind
            yield Factor(name, size, positions[: len(sources)], positions[len(sources) :], kinds)


def _occurrences(labels: Labels, dims: Dims, sizes: dict[str, int]) -> dict[str, tuple[int, tuple[int, ...]]]:
    """For each label of a tensor the position of its first atom, and the sizes of its atoms."""
    found: dict[str, tuple[int, tuple[int, ...]]] = {}
    start = 0
    for label, atoms in zip(labels, dims, strict=True):
        names = label if isinstance(label, tuple) else (label,) if label else ()
        at, rest = start, atoms
        for name in names:
            own = _leading(rest, sizes[name]) if len(names) > 1 else rest
            found[name] = (at, own if own is not None and name not in found else (0,))
            # Atoms that straddle a label leave the labels after it no place, either.
            at, rest = at + len(own or ()), rest[len(own) :] if own is not None else ()
        start += len(atoms)
    return {name: entry for name, entry in found.items() if entry[1]}


def _leading(atoms: tuple[int, ...], size: int) -> tuple[int, ...] | None:
    """The leading atoms that make up `size`; None when they straddle it."""
    whole = 1
    for count, atom in enumerate((*atoms, 0)):
        if whole == size:
            return atoms[:count]
        whole *= atom
    return None


def _batches(node: Node, num_results: int) -> tuple[tuple[int, ...], ...]:
    """The atoms that carry the batch, of each operand and each result."""
    if node.target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, Node)
        read = [BATCH[source][int_at(node, 1)] if source in BATCH else ()]
    else:
        read = [BATCH[operand][0] if operand in BATCH else () for operand in operands(node)]
    return (*read, *(BATCH.get(node) or ((),) * num_results))


def _is_batch(factor: Factor, batches: tuple[tuple[int, ...], ...]) -> bool:
    return any(position in batch for position, batch in zip(factor.operands + factor.results, batches, strict=True))


def strategies_of(node: Node, mesh: Mesh, freedom: Freedom = _DEFAULT) -> tuple[Strategy, ...]:
    """Every strategy of `node` on `mesh`, in a fixed order, without duplicates. Reads DIMS and BATCH.

    `freedom` says which axes split a batch factor (wherever one divides), may split it, or never do. Several axes
    may split one factor, in mesh order, major first, those of ZeRO last. For a getitem the one operand sharding is that of the selected
    result.
    """
    return strategies_in(space_of(node), mesh, freedom)


@cache
def strategies_in(space: Space, mesh: Mesh, freedom: Freedom = _DEFAULT) -> tuple[Strategy, ...]:
    """`strategies_of` for a space; computed once for equal layers."""
    axes = [(axis, size) for axis, size in mesh.axes if size > 1 and parent(axis) != "pp"]
    found: dict[object, Strategy] = {}
    for picks in _picks(space, axes, freedom, {}):
        choices = zip((axis for axis, _ in axes), picks, strict=True)
        strategy = build(space, sorted(choices, key=lambda each: _minor(*each, freedom)), mesh)
        found.setdefault((strategy.operands, strategy.results), strategy)
    return tuple(found.values())


def _picks(space: Space, axes: Sequence[tuple[str, int]], freedom: Freedom, used: dict[Factor, int]) -> Iterator[tuple[AxisChoice, ...]]:
    """All combinations of one choice per axis; `used` is by how much each factor is split already."""
    if not axes:
        yield ()
        return
    (axis, size), rest = axes[0], axes[1:]
    for choice in _choices(space, axis, size, freedom, used):
        after = {**used, choice: used.get(choice, 1) * size} if isinstance(choice, Factor) else used
        for others in _picks(space, rest, freedom, after):
            yield (choice, *others)


def _choices(space: Space, axis: str, size: int, freedom: Freedom, used: dict[Factor, int]) -> list[AxisChoice]:
    divisible = [f for f in space.factors if f.size % (used.get(f, 1) * size) == 0]
    if space.takes_all or freedom.is_flexible(axis):
        return [None, *divisible, *space.linear, *space.passes]
    others = [f for f in divisible if not f.is_batch]
    if not freedom.is_batch(axis):
        return [None, *others, *space.linear]
    batch = [f for f in divisible if f.is_batch]
    if batch:
        # Atoms of one dim are split from the major one on, so that each rank's share stays contiguous.
        return [batch[0]]
    return [None, *(others if freedom.may_split_parameters(axis) else ()), *space.linear]


def _minor(axis: str, choice: AxisChoice, freedom: Freedom) -> int:
    """The batch keeps the order of the mesh; of all else an axis over which ZeRO has parts splits what the others leave."""
    return freedom.minor(axis) if isinstance(choice, Factor) and not choice.is_batch else 0


def build(space: Space, choices: Sequence[tuple[str, AxisChoice]], mesh: Mesh) -> Strategy:
    """The strategy in which each axis does what `choices` say."""
    num_operands = len(space.operands)
    results = [num_operands + i for i, count in enumerate(space.results) if count is not None]
    splits: list[list[tuple[str, ...]]] = [[()] * (count or 0) for count in (*space.operands, *space.results)]
    unreduced: list[list[tuple[str, ReductionKind]]] = [[] for _ in splits]
    for axis, choice in choices:
        if isinstance(choice, Factor):
            for tensor, position in enumerate(choice.operands + choice.results):
                if position is not None:
                    splits[tensor][position] += (axis,)
                elif tensor in results:
                    unreduced[tensor].append((axis, choice.kinds[tensor - num_operands]))
        elif isinstance(choice, str):
            for tensor in (0, *results):
                unreduced[tensor].append((axis, choice))
        elif choice is not None:
            for tensor in (*choice, *results):
                unreduced[tensor].append((axis, "sum"))
    shardings = tuple(_one(Sharding(tuple(split), tuple(kinds))) for split, kinds in zip(splits, unreduced, strict=True))
    named = tuple((axis, _name_of(choice)) for axis, choice in choices if choice is not None)
    num_shards = mesh.size_of([axis for axis, choice in choices if isinstance(choice, Factor)])
    return Strategy(shardings[:num_operands], shardings[num_operands:], named, num_shards)


def _name_of(choice: Factor | frozenset[int] | ReductionKind) -> str:
    return choice.name if isinstance(choice, Factor) else choice if isinstance(choice, str) else "sum"


@cache
def _one(sharding: Sharding) -> Sharding:
    """One object for equal shardings: looking up the same object needs no comparison."""
    return sharding


def shared_atoms(item: Input | Output, node: Node) -> tuple[int, ...]:
    """Along which atoms a batch input or an output may be dealt out to the ranks: those of the dim that counts samples. Other dims may walk
    with the batch (both of `x @ x.T`, the 4 of `x.view(-1, 4)`), but are no rank's share. Reads DIMS, and BATCH where it is set.
    """
    if item.batch_dim is None or node not in BATCH:
        return ()
    return tuple(atom for atom in BATCH[node][0] if atom in atoms_of_dim(DIMS[node][0], item.batch_dim))


def placeholder_strategies(
    kind: InputKind, dims: Dims, mesh: Mesh, batch: Sequence[int] = (), freedom: Freedom = _DEFAULT
) -> tuple[Strategy, ...]:
    """How an input may lie on the mesh; `batch` holds the positions of its batch atoms.

    Parameters: any atom on any axis that `freedom` leaves them. Batch inputs and tangents: the batch atoms on the axes
    of the batch. The rest: replicated.
    """
    is_batch = kind in ("batch", "tangent")
    factors = tuple(
        Factor(f"a{i}", size, (), (i,), is_batch=is_batch)
        for i, size in enumerate(flat(dims))
        if kind == "parameter" or (is_batch and i in batch)
    )
    if is_batch:
        freedom = replace(freedom, flexible=())  # each rank is fed its part of the batch; what splits it further is a free slice
    return strategies_in(Space((), (len(flat(dims)),), factors, ()), mesh, freedom)
