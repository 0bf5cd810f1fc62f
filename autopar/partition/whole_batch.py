"""Finds what needs the whole batch at once: run microbatch by microbatch, it would compute something else than the model does.

Every value of a GLOBAL program is followed along the axis of the microbatches alone, by the rules that the search goes by. A
microbatch can have it

    split      its own samples' part
    whole      all of it, the same in every microbatch
    as a sum   its part of a sum over the samples, which is added up when all have run
    affine     such a sum, and with it what all have alike (a loss and a penalty on the weights). Of a loss or a gradient that is the
               mean over the microbatches of what each makes of its own samples, and so of whatever is linear in it

and all of it at once where it is known ahead, from the inputs alone (a count of tokens), and no other such sum: what is known ahead is
added up once, before the first microbatch. An op whose result a microbatch
can have in none of these ways *mixes* microbatches: the root of a mean, the statistics of a batch norm, a sort over samples. So does a
buffer to which more is done than adding sums over the samples, unless nothing of the batch is in what it becomes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from torch.fx import Node

from autopar.graph.microbatches import added_by, additions_to_buffers, chooser_of, is_affine, is_linear, is_summed_later, known_ahead
from autopar.graph.written_once import written_once
from autopar.ir.keys import BATCH, DIMS, PHASE, SOURCE, Source
from autopar.ir.mesh import MICROBATCHES, Mesh
from autopar.ir.printing import op_name
from autopar.ir.program import Output, Program
from autopar.ir.reshard import Move, moves, reachable
from autopar.ir.sharding import Sharding, Strategy
from autopar.ops.atom_classes import read_by
from autopar.ops.strategies import placeholder_strategies, signature_of, strategies_of
from autopar.partition.sharding_problem import required_sharding

# How many places are named.
_SHOWN = 4

# None: the model's own, of the whole batch. "own": each microbatch takes its own where the model needs the whole batch's.
Statistics = Literal["own"] | None
Needed = Literal[
    "a sum over the batch",
    "a sum over the batch of what another is part of",
    "a maximum over the batch",
    "all samples of the batch at once",
    "a buffer",
    "whole groups",
]
_HARDEST_FIRST: tuple[Needed, ...] = (
    "all samples of the batch at once",
    "a sum over the batch of what another is part of",
    "a maximum over the batch",
    "a sum over the batch",
)


@dataclass(frozen=True)
class Mixing:
    """One place where a microbatch alone comes to something else than the whole batch.

    `node` is the op, or the buffer's name; `needs` what it would have to be given.
    """

    node: str
    op: str
    needs: Needed
    source: Source | None = None

    @property
    def has_estimate(self) -> bool:
        """Whether a microbatch can take its own in place of what is needed."""
        return self.needs not in ("all samples of the batch at once", "a sum over the batch of what another is part of", "whole groups")

    @property
    def place(self) -> str:
        return str(self.source) if self.source is not None else self.node

    def __str__(self) -> str:
        if self.needs == "a buffer":
            return f"the buffer {self.node!r} is changed anew by every microbatch, from what the one before left"
        if self.needs == "whole groups":
            return f"the samples of input {self.node!r} lie in groups that so many microbatches do not divide: {self.op}"
        code = f" (`{self.source.code}`)" if self.source is not None and self.source.code else ""
        return f"{self.place}{code}: {self.op} needs {self.needs}"


@dataclass(frozen=True)
class _Forms:
    """The forms in which a microbatch can have a value: each of `shardings`, and as a term of a sum over the samples (`part`). It has those
    of `summable` before any sum over the batch is added up."""

    shardings: frozenset[Sharding]
    part: Literal["sum", "affine"] | None = None
    summable: frozenset[Sharding] = frozenset()

    @property
    def is_whole(self) -> bool:
        return any(sharding.is_replicated for sharding in self.shardings)

    @property
    def is_sum(self) -> bool:
        return self.part == "sum" or any(map(is_summed_later, self.shardings))

    @property
    def is_part(self) -> bool:
        """Whether it is a sum over the samples, perhaps with more that all microbatches have alike."""
        return self.part is not None or self.is_sum

    @property
    def is_term(self) -> bool:
        """Whether it is a sum over the samples, alike in all microbatches, or both added up."""
        return self.is_part or self.is_whole


def mixing(program: Program, number: int) -> tuple[Mixing, ...]:
    """Where `number` microbatches would change what a GLOBAL program computes: the forward's places first, one for each source line."""
    if number == 1:
        return ()
    found = _Following(program, Mesh(((MICROBATCHES, number),))).run()
    found.sort(key=lambda entry: entry[0] == "backward")
    by_place = {(each.place, each.needs): each for _, each in reversed(found)}
    return tuple(each for _, each in found if by_place[each.place, each.needs] is each)


def undivided(program: Program, number: int, num_shares: int = 1) -> tuple[Mixing, ...]:
    """The inputs of which every microbatch would compute all: their samples lie in groups (4 × 6 of 24) none of which `number` divides, of
    each of `num_shares` that take their parts of the same groups."""
    found: list[Mixing] = []
    for item, node in program.named_inputs():
        dims = DIMS[node][0]
        if item.batch_dim is not None and all(atom % (number * num_shares) for atom in dims[item.batch_dim]):
            found.append(Mixing(item.name, " × ".join(map(str, dims[item.batch_dim])), "whole groups"))
    return tuple(found)


@dataclass
class _Following:
    """Follows every value of `program` in graph order; `found` are the places that mix, each with its phase."""

    program: Program
    mesh: Mesh
    forms: dict[tuple[Node, int], _Forms] = field(default_factory=dict[tuple[Node, int], _Forms])
    found: list[tuple[str, Mixing]] = field(default_factory=list[tuple[str, Mixing]])
    _strategies: dict[Hashable, tuple[Strategy, ...]] = field(default_factory=dict[Hashable, tuple[Strategy, ...]])

    def __post_init__(self) -> None:
        self.ahead = known_ahead(self.program)

    def run(self) -> list[tuple[str, Mixing]]:
        for item, node in self.program.named_inputs():
            strategies = placeholder_strategies(item.kind, DIMS[node][0], self.mesh, BATCH[node][0], self.program.freedom)
            found = frozenset(strategy.results[0] for strategy in strategies)
            self.forms[node, 0] = _Forms(found, summable=found)
        for node in self.program.graph.nodes:
            if node.op == "call_function":
                self._follow(node)
        for output, node in self.program.named_outputs():
            if output.kind != "buffer" and not self._is_exact(output, node):
                self._report(node, [(self.forms[node, 0], node in self.ahead)])
        self._follow_buffers()
        return self.found

    def _follow(self, node: Node) -> None:
        sources = read_by(node)
        operands = [self.forms[source] for source in sources]
        signature = signature_of(node)
        if signature not in self._strategies:
            self._strategies[signature] = strategies_of(node, self.mesh, self.program.freedom)
        strategies = self._strategies[signature]
        fitting = [each for each in strategies if self._fits(each, sources, operands)]
        same = frozenset(source[0] for source, forms in zip(sources, operands, strict=True) if self._is_alike(source, forms))
        part = _part_of(node, list(zip(sources, operands, strict=True)), same)
        if not fitting and part is None:
            fitting = list(strategies[:1])  # as if it had been given what it needs: one report for each cause
            read = zip(fitting[0].operands, sources, operands, strict=True)
            known = [(wanted, forms, source[0] in self.ahead) for wanted, source, forms in read]
            self._report(node, [(forms, is_ahead) for wanted, forms, is_ahead in known if not _is_available(forms, wanted, is_ahead)])
        before = [_Forms(forms.summable) for forms in operands]
        first = [each for each in fitting if all(map(_is_there, before, each.operands))]
        for result in range(len(DIMS[node])):
            results, summable = (frozenset(each.results[result] for each in chosen) for chosen in (fitting, first))
            self.forms[node, result] = _Forms(results, part, summable)

    def _fits(self, strategy: Strategy, sources: Sequence[tuple[Node, int]], operands: Sequence[_Forms]) -> bool:
        read = zip(strategy.operands, sources, operands, strict=True)
        return all(_is_available(forms, wanted, source[0] in self.ahead) for wanted, source, forms in read)

    def _is_alike(self, source: tuple[Node, int], forms: _Forms) -> bool:
        """Whether all microbatches have a value alike."""
        return _is_available(forms, Sharding.replicated(DIMS[source[0]][source[1]]), source[0] in self.ahead)

    def _is_exact(self, output: Output, node: Node) -> bool:
        """Whether a result is right once what is still a sum, or a mean, over the microbatches is taken."""
        forms = self.forms[node, 0]
        if output.kind in ("loss", "gradient"):
            return forms.is_term
        wanted = required_sharding(output, node, replace(self.program, mesh=self.mesh))
        return any(map(is_summed_later, forms.shardings)) or _is_available(forms, wanted, node in self.ahead)

    def _follow_buffers(self) -> None:
        old = {item.name: node for item, node in self.program.named_inputs() if item.kind == "buffer"}
        once = written_once(self.program)
        for name, chain in additions_to_buffers(self.program).items():
            added = [value for each in chain for value in added_by(each, old[name], self.program.form)]
            if name in once:
                continue
            if not chain or len(old[name].users) != 1 or not all(self.forms[value, 0].is_sum for value in added):
                self.found.append(("buffer", Mixing(name, "", "a buffer")))

    def _report(self, node: Node, lacking: Sequence[tuple[_Forms, bool]]) -> None:
        """Note that `node` mixes microbatches; `lacking` are the operands that no microbatch has in a form that it takes, and whether they
        are known ahead."""
        needs: set[Needed] = {_need(*each) for each in lacking}
        needed = min(needs, key=_HARDEST_FIRST.index)
        self.found.append((PHASE.get(node) or "forward", Mixing(node.name, op_name(node.target), needed, SOURCE.get(node))))


def _is_available(forms: _Forms, wanted: Sharding, is_ahead: bool) -> bool:
    """Whether a microbatch has a value as an op wants it, perhaps after a slice; after a sum over them if it is known ahead."""

    def is_free(move: Move) -> bool:
        return move.collective == "slice" or (move.collective, move.kind) == ("all_reduce", "sum")

    summed = forms.summable if is_ahead else frozenset[Sharding]()
    return _is_there(forms, wanted) or any(reachable(each, wanted) and all(map(is_free, moves(each, wanted))) for each in summed)


def _is_there(forms: _Forms, wanted: Sharding) -> bool:
    """Whether a microbatch has a value as an op wants it, perhaps after a slice, with nothing added up for it."""
    return any(reachable(each, wanted) and all(move.collective == "slice" for move in moves(each, wanted)) for each in forms.shardings)


def _part_of(node: Node, read: Sequence[tuple[tuple[Node, int], _Forms]], same: frozenset[Node]) -> Literal["sum", "affine"] | None:
    """Whether the result is a sum over the samples, perhaps with more that all microbatches have alike, where no sharding says so.

    `read` are the operands with their forms; `same` are those that all microbatches have alike.
    """
    values = [forms for source, forms in read if source[0] is not chooser_of(node)]
    terms = [forms for forms in values if forms.is_part]
    is_sum = all(forms.is_sum for forms in terms)
    if is_affine(node, same) and terms and all(forms.is_term for forms in values):
        return "sum" if is_sum and len(terms) == len(values) > 1 else "affine"
    # What all have alike is a factor beside what they have not.
    others = [forms for source, forms in read if source[0] not in same]
    if is_linear(node, same) and terms and (not others or any(forms.is_part for forms in others)):
        return "sum" if is_sum else "affine"
    return None


def _need(forms: _Forms, is_ahead: bool) -> Needed:
    if forms.is_part:
        return "a sum over the batch of what another is part of" if is_ahead else "a sum over the batch"
    is_maximum = any((MICROBATCHES, "max") in sharding.unreduced for sharding in forms.shardings)
    return "a maximum over the batch" if is_maximum else "all samples of the batch at once"


@dataclass(frozen=True)
class MicrobatchDecision:
    """How many microbatches; `wanted` ones would mix at `found`. Where that is accepted, each takes its own in place of what it needs. A
    `hint` says what was taken for the samples, where that may be wrong."""

    number: int
    wanted: int
    found: tuple[Mixing, ...] = ()
    hint: str = ""

    def lines(self) -> Iterator[str]:
        """Why it is another number than wanted, or what each microbatch takes for itself; nothing where there is nothing to say."""
        if not self.found:
            return
        if self.number != self.wanted:
            yield f"{self.number} instead of {self.wanted}, which would {consequence(self.found)}:"
            ways_out = f'num_microbatches={self.wanted}, microbatch_statistics="own": each microbatch then takes its own'
            last = f"{ways_out} (another computation)" if all(each.has_estimate for each in self.found) else ""
        else:
            yield f"each of the {self.number} takes its own in place of the whole batch's: another computation than the model's"
            last = 'accepted by microbatch_statistics="own"'
        yield from (f"  {line}" for line in shown(self.found))
        yield from (line for line in (last, self.hint) if line)

    def __str__(self) -> str:
        return f"{self.number} microbatch{'' if self.number == 1 else 'es'}" + "".join(f"\n  {line}" for line in self.lines())


def shown(places: Sequence[object]) -> list[str]:
    """The first few places, and how many more there are."""
    more = [f"and {len(places) - _SHOWN} more"] if len(places) > _SHOWN else []
    return [*map(str, places[:_SHOWN]), *more]


def consequence(found: Sequence[Mixing]) -> str:
    """What more microbatches than fit `found` would do."""
    is_exact = all(each.needs == "whole groups" for each in found)
    return "compute the whole batch in each of them" if is_exact else "change what the model computes"


def refusal(wanted: int, number: int, found: Sequence[Mixing], share: int | None = None, hint: str = "") -> str:
    """Why `wanted` microbatches are refused, where `number` of them change nothing, or may not where a batch of `share` samples a rank
    is padded for them. A `hint` is one more way out."""
    best = f"use num_microbatches={number}, the most that compute what the model does on the whole batch"
    ways_out = [best if share is None else f"use a number that divides the {share} samples of a rank: for {wanted} the batch is padded"]
    if all(each.has_estimate for each in found):
        ways_out.append('or accept with microbatch_statistics="own" that each microbatch takes its own: another computation')
    places = "".join(f"\n  {line}" for line in shown(found))
    return f"num_microbatches={wanted} would {consequence(found)}:{places}\n{', '.join(ways_out)}" + (f"\n{hint}" if hint else "")
