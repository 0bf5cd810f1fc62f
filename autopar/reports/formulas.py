"""Bytes and FLOPs of a program as formulas in b, s, h, …: every atom has a symbol, and those that ops join have one together.

Symbols are found by the same rules that shardings are: a factor of an op is one index of it, so the atoms that it stands for are one size.
Equal parameters of repeated layers have equal symbols; L counts the layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import sympy
import torch
from torch.fx import Node

from autopar.ir.arguments import int_at, node_at
from autopar.ir.collectives import reshard
from autopar.ir.keys import BATCH, DIMS, SHARDING, SOURCE
from autopar.ir.markers import MARKERS
from autopar.ir.pattern import pattern_of
from autopar.ir.program import Program, operands, results_of
from autopar.ir.sharding import Sharding, flat
from autopar.ops.lookup import rule_of
from autopar.ops.strategies import indices_of
from autopar.pipeline.priced import saved_values
from autopar.pipeline.stage_work import Work

_ATEN = torch.ops.aten
# What sizes are called, beside b, s, v and h: first those of attention and of a feed-forward layer.
_LETTERS = "a d f g k m n p q r u w x y z c e i j".split()
# A size this small is a number: three in a fused projection, two halves of a rotation.
_NUMBERS = 3
# FLOPs of one step of a contraction are fewer: attention's backward takes ten.
_MOST_STEPS = 10
_Atom = tuple[Node, int, int]


@dataclass(frozen=True)
class Formulas:
    """Formulas of one rank's share of a step: `saved_bytes` of activations kept for the backward (of one microbatch), `parameter_bytes`,
    and `flops` of contractions of all ranks together. `sizes` are the values of the symbols, `meanings` where each comes from."""

    saved_bytes: sympy.Expr
    parameter_bytes: sympy.Expr
    flops: sympy.Expr
    sizes: Mapping[sympy.Symbol, int]
    meanings: Mapping[sympy.Symbol, str]

    def value(self, formula: sympy.Expr, **sizes: int) -> float:
        """Of a formula at these sizes, others in place of some: `value(found.flops, b=16)`."""
        chosen = {symbol: sizes.get(str(symbol), size) for symbol, size in self.sizes.items()}
        return float(formula.subs(list(chosen.items())))

    def __str__(self) -> str:
        lines = [
            f"saved for the backward, bytes of a rank: {self.saved_bytes}",
            f"parameters, bytes of a rank: {self.parameter_bytes}",
            f"contractions, FLOPs of all ranks: {self.flops}",
            "where",
            *(f"  {symbol} = {size}  {self.meanings.get(symbol, '')}".rstrip() for symbol, size in self.sizes.items()),
        ]
        return "\n".join(lines)


def formulas(program: Program) -> Formulas:
    """Of a GLOBAL program with its shardings."""
    return _Formulas(program).result()


class _Formulas:
    def __init__(self, program: Program) -> None:
        self.program = program
        self._parent: dict[Hashable, Hashable] = {}
        self.sizes: dict[sympy.Symbol, int] = {}
        self.meanings: dict[sympy.Symbol, str] = {}
        self._symbols: dict[Hashable, sympy.Expr] = {}
        self._fractions: dict[float, sympy.Expr] = {}
        self._join()
        self._name()

    def result(self) -> Formulas:
        work = Work(self.program)
        stages = sorted({stage for each in work.stages.values() for stage in each} or {0})
        saved = [(node, self._bytes(node)) for stage in stages for node in saved_values(work, stage)]
        held = [(item.name, self._bytes(node)) for item, node in self.program.named_inputs() if item.kind == "parameter"]
        contracted = [(node, self._flops(node)) for node in self.program.graph.nodes if node.op == "call_function"]
        return Formulas(
            self._sum((SOURCE[node].module if node in SOURCE else "", size) for node, size in saved),
            self._sum(held),
            self._sum((SOURCE[node].module if node in SOURCE else "", size) for node, size in contracted if size is not None),
            self.sizes,
            self.meanings,
        )

    # ---- classes of atoms

    def _find(self, key: Hashable) -> Hashable:
        while (above := self._parent.setdefault(key, key)) != key:
            self._parent[key] = key = self._parent[above]
        return key

    def _unite(self, keys: Iterable[Hashable]) -> None:
        first, *others = map(self._find, keys)
        for other in others:
            self._parent[self._find(other)] = self._find(first)

    def _join(self) -> None:
        for node in self.program.graph.nodes:
            if node.op != "call_function" or node not in DIMS:
                continue
            reads = [(operand, int_at(node, 1)) if _is_getitem(node) else (operand, 0) for operand in operands(node)]
            if node.target in MARKERS or node.target is reshard or _is_getitem(node):
                self._unite_all([(*reads[0], place) for place in range(len(flat(DIMS[node][0])))], node)
                continue
            named: set[_Atom] = set()
            for factor in indices_of(node):
                keys: list[_Atom] = [(*reads[i], at) for i, at in enumerate(factor.operands) if at is not None]
                keys += [(node, i, at) for i, at in enumerate(factor.results) if at is not None]
                named.update(keys)
                if keys:
                    self._unite(keys)
            self._join_unnamed(node, reads, named)
        alike: dict[tuple[str, int], _Atom] = {}
        for item, node in self.program.named_inputs():
            for place, _ in enumerate(flat(DIMS[node][0])) if item.kind == "parameter" else ():
                self._unite([alike.setdefault((pattern_of(item.name), place), (node, 0, place)), (node, 0, place)])

    def _join_unnamed(self, node: Node, reads: Sequence[tuple[Node, int]], named: set[_Atom]) -> None:
        """What a rule leaves whole on operands and results alike: the width that a norm runs over, aligned at the right; of other results
        than the first, as the length of a causal log Σ exp, at the left."""
        for number, dims in enumerate(DIMS[node]):
            sizes = flat(dims)
            for operand, result in reads:
                given = flat(DIMS[operand][result])
                shift = len(given) - len(sizes) if number == 0 else 0
                for place, size in enumerate(sizes):
                    here, there = (node, number, place), (operand, result, place + shift)
                    if 0 <= there[2] < len(given) and given[there[2]] == size and here not in named and there not in named:
                        self._unite([here, there])

    def _unite_all(self, atoms: list[_Atom], node: Node) -> None:
        for place, atom in enumerate(atoms):
            self._unite([atom, (node, 0, place)])

    # ---- names

    def _name(self) -> None:
        graph, inputs = self.program.graph, list(self.program.named_inputs())
        batches = ((node, result, place) for node in graph.nodes for result, each in enumerate(BATCH.get(node) or ()) for place in each)
        for atom in batches:
            self._call(atom, "b", "the batch")
        for item, node in inputs:
            for place in self._places(node) if item.kind == "batch" else ():
                self._call((node, 0, place), "s", f"a dim of input {item.name}")
        tables = [node_at(node, 0) for node in graph.nodes if node.target is _ATEN.embedding.default]
        for table in tables:
            self._call((table, 0, 0), "v", f"rows of {table.name}")
            self._call((table, 0, len(self._places(table)) - 1), "h", f"columns of {table.name}")
        for item, node in inputs:
            for place in self._places(node) if item.kind == "parameter" else ():
                self._call((node, 0, place), None, f"in {pattern_of(item.name)}")

    def _places(self, node: Node) -> range:
        return range(len(flat(DIMS[node][0])))

    def _call(self, atom: _Atom, letter: str | None, meaning: str) -> sympy.Expr:
        key, size = self._find(atom), flat(DIMS[atom[0]][atom[1]])[atom[2]]
        if key not in self._symbols:
            if size <= _NUMBERS and letter != "b":
                self._symbols[key] = sympy.Integer(size)
            else:
                self._symbols[key] = symbol = self._new(letter)
                self.sizes[symbol], self.meanings[symbol] = size, meaning
        return self._symbols[key]

    def _new(self, letter: str | None) -> sympy.Symbol:
        taken = {str(symbol) for symbol in self.sizes}
        names = [letter] if letter else [each for each in _LETTERS if each not in taken]
        name = names[0] if names else "z"
        number = 2
        while name in taken:
            name, number = f"{(letter or 'z')}{number}", number + 1
        return sympy.Symbol(name, positive=True, integer=True)

    # ---- formulas

    def _bytes(self, node: Node) -> sympy.Expr:
        total: sympy.Expr = sympy.Integer(0)
        for result, (value, sharding) in enumerate(zip(results_of(node), SHARDING[node], strict=True)):
            if value is not None:
                total += value.dtype.itemsize * self._product(node, result, sharding)
        return total

    def _product(self, node: Node, result: int, sharding: Sharding) -> sympy.Expr:
        found: sympy.Expr = sympy.Integer(1)
        for place, axes in enumerate(sharding.splits):
            found *= self._call((node, result, place), None, f"in {node.name}")
            for axis in axes:
                symbol = sympy.Symbol(axis, positive=True, integer=True)
                self.sizes[symbol], self.meanings[symbol] = self.program.mesh.size_of((axis,)), "ranks along the axis"
                found /= symbol
        return found

    def _flops(self, node: Node) -> sympy.Expr | None:
        """The product of all indices of a contraction, times what a step of it takes."""
        rule = rule_of(node)
        if rule is None or not rule.flops:
            return None
        atoms: dict[Hashable, _Atom] = {}
        tensors = [*((operand, 0) for operand in operands(node)), *((node, i) for i in range(len(DIMS[node])))]
        for tensor, result in tensors:
            for place, _ in enumerate(flat(DIMS[tensor][result])):
                atoms.setdefault(self._find((tensor, result, place)), (tensor, result, place))
        whole = prod(flat(DIMS[tensor][result])[place] for tensor, result, place in atoms.values())
        product = sympy.Mul(*(self._call(atom, None, f"in {node.name}") for atom in atoms.values()))
        each, second = self._exact(rule.flops / whole), operands(node)[1]
        lengths = flat(DIMS[second][0])
        if each > _MOST_STEPS and len(lengths) > 1 and each % lengths[-2] == 0:
            # Attention of a sequence to itself runs over its length twice.
            each, product = each / lengths[-2], product * self._call((second, 0, len(lengths) - 2), None, f"in {second.name}")
        return each * product

    def _exact(self, number: float) -> sympy.Expr:
        """As a fraction. Layers ask for few of them, and sympy takes ten milliseconds for each."""
        if number not in self._fractions:
            self._fractions[number] = sympy.nsimplify(number, rational=True)
        return self._fractions[number]

    def _sum(self, terms: Iterable[tuple[str, sympy.Expr]]) -> sympy.Expr:
        """Terms by module; those of repeated layers are counted by L."""
        found = list(terms)
        layers = self._num_layers
        alike = Counter((pattern_of(module), size) for module, size in found if pattern_of(module) != module)
        total: sympy.Expr = sympy.Add(*(size for module, size in found if pattern_of(module) == module))
        for (_, size), count in alike.items():
            total += size * (self._layers * (count // layers) if layers > 1 and count % layers == 0 else count)
        return sympy.factor_terms(sympy.expand(total))

    @cached_property
    def _num_layers(self) -> int:
        """How many layers there are: as many as most parameters of one pattern."""
        patterns = Counter(pattern_of(item.name) for item, _ in self.program.named_inputs() if item.kind == "parameter")
        numbers = Counter(count for count in patterns.values() if count > 1)
        return numbers.most_common(1)[0][0] if numbers else 1

    @cached_property
    def _layers(self) -> sympy.Symbol:
        symbol = sympy.Symbol("L", positive=True, integer=True)
        self.sizes[symbol], self.meanings[symbol] = self._num_layers, "layers"
        return symbol


def _is_getitem(node: Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"
