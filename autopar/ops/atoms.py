"""Atoms: the pieces of every dim that some op of the graph tells apart.

A merged `B * S` dim, or a fused qkv dim of (3, heads, head dim), cannot be split by dims. So each dim
keeps a set of *cuts*: inner strides at which some view, somewhere, breaks it. Ops join dims that they index together
(equal labels in their rule), views translate cuts between the dims they merge and break. Propagated to a
fixpoint, the cuts of a dim are its atoms, and every view is the identity on atoms.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch
from torch.fx import Graph, Node

from autopar.ir.arguments import int_at
from autopar.ir.keys import DIMS, PLACED
from autopar.ir.markers import recut
from autopar.ir.program import Program, operands, results_of
from autopar.ir.sharding import Dims, shape_of
from autopar.ops.lookup import rule_of
from autopar.ops.rule import Rule

DimKey = Hashable


class Cuts:
    """Classes of dims that have equal cuts, and the views that translate between classes.

    The classes are a union-find of our own: with networkx's, finding atoms takes 1.4 times as long.
    """

    def __init__(self) -> None:
        self._parent: dict[DimKey, DimKey] = {}
        self._sizes: dict[DimKey, int] = {}
        self._cuts: dict[DimKey, set[int]] = {}
        self._views: list[tuple[tuple[DimKey, ...], tuple[DimKey, ...]]] = []

    def add(self, key: DimKey, size: int) -> None:
        self._parent[key] = key
        self._sizes[key] = size

    def __contains__(self, key: DimKey) -> bool:
        return key in self._parent

    def find(self, key: DimKey) -> DimKey:
        while self._parent[key] != key:
            self._parent[key] = self._parent[self._parent[key]]
            key = self._parent[key]
        return key

    def join(self, left: DimKey, right: DimKey) -> None:
        """Both dims have the same cuts from now on; they must have one size."""
        left, right = self.find(left), self.find(right)
        if left != right:
            assert self._sizes[left] == self._sizes[right], (left, self._sizes[left], right, self._sizes[right])
            self._parent[left] = right

    def relate(self, left: Iterable[DimKey], right: Iterable[DimKey]) -> None:
        """Record that `left` and `right`, major first, are two ways to break one flat range; nothing of one that is empty."""
        left, right = ([key for key in keys if self._sizes[key] != 1] for keys in (left, right))
        if all(self._sizes[key] for key in (*left, *right)):
            self._views += list(self._groups(left, right))

    def _groups(self, left: list[DimKey], right: list[DimKey]) -> Iterable[tuple[tuple[DimKey, ...], tuple[DimKey, ...]]]:
        """Break a view into its smallest independent parts: `[8, 16, 32] → [128, 32]` is (8, 16 | 128) and (32 | 32)."""
        i = j = 0
        while i < len(left) and j < len(right):
            first_i, first_j = i, j
            sizes = [self._sizes[left[i]], self._sizes[right[j]]]
            i, j = i + 1, j + 1
            while sizes[0] != sizes[1]:
                if sizes[0] < sizes[1]:
                    sizes[0] *= self._sizes[left[i]]
                    i += 1
                else:
                    sizes[1] *= self._sizes[right[j]]
                    j += 1
            yield tuple(left[first_i:i]), tuple(right[first_j:j])

    def solve(self) -> None:
        """Translate cuts through the views until nothing changes."""
        for left, right in self._views:
            if len(left) == len(right) == 1:
                self.join(left[0], right[0])
        self._views = [view for view in self._views if len(view[0]) > 1 or len(view[1]) > 1]
        changed = True
        while changed:
            changed = False
            for left, right in self._views:
                cuts = self._spread(left) | self._spread(right)
                changed |= self._collect(left, cuts) or self._collect(right, cuts)

    def cut(self, key: DimKey, atoms: Iterable[int]) -> bool:
        """Let a dim have `atoms`, major first, but for cuts that contradict those it has; whether any was new. To be solved anew then."""
        known, inner, changed = self._cuts.setdefault(self.find(key), set()), 1, False
        for atom in reversed(tuple(atoms)):
            if 1 < inner < self._sizes[key] and inner not in known and all(cut % inner == 0 or inner % cut == 0 for cut in known):
                known.add(inner)
                changed = True
            inner *= atom
        return changed

    def _spread(self, keys: tuple[DimKey, ...]) -> set[int]:
        """The cuts of one side, as inner strides of the whole flat range."""
        found, inner = set[int](), 1
        for key in reversed(keys):
            found |= {inner * cut for cut in self._cuts.get(self.find(key), ())} | {inner}
            inner *= self._sizes[key]
        return found

    def _collect(self, keys: tuple[DimKey, ...], cuts: set[int]) -> bool:
        """Give each dim of one side the cuts that fall inside it; whether any was new."""
        inner, changed = 1, False
        for key in reversed(keys):
            size, known = self._sizes[key], self._cuts.setdefault(self.find(key), set())
            new = {cut // inner for cut in cuts if cut % inner == 0 and inner < cut < inner * size and size % (cut // inner) == 0}
            changed |= not new <= known
            known |= new
            inner *= size
        return changed

    def atoms(self, key: DimKey) -> tuple[int, ...]:
        """The atoms of a dim, major first. Cuts that contradict each other (4 and 6 in 12) leave the smaller standing."""
        size, chain = self._sizes[key], [1]
        if size == 1:
            return ()
        for cut in sorted(self._cuts.get(self.find(key), ())):
            if cut % chain[-1] == 0 and cut > chain[-1]:
                chain.append(cut)
        chain.append(size)
        return tuple(outer // inner for inner, outer in reversed(list(zip(chain, chain[1:], strict=False))))


def find_atoms(program: Program) -> Program:
    """Set DIMS on every node of a GLOBAL program: per result, the atoms of each dim."""
    program = program.copy()
    cuts = _cuts(program.graph)
    _join_signature(cuts, program)
    cuts.solve()
    _cut_as_placed(cuts, program)
    _write(cuts, program.graph)
    return program


def find_atoms_of(graph: Graph) -> None:
    """Set DIMS on every node of a graph of calls that is no program."""
    cuts = _cuts(graph)
    cuts.solve()
    _write(cuts, graph)


def _cuts(graph: Graph) -> Cuts:
    """Every dim of every value, joined and related as the rules say."""
    cuts = Cuts()
    for node in graph.nodes:
        for index, value in enumerate(results_of(node) if node.op != "output" else ()):
            for dim, size in enumerate(value.shape if value is not None else ()):
                cuts.add((node, index, dim), int(size))
    for node in graph.nodes:
        rule = rule_of(node) if node.op == "call_function" else None
        if rule is not None:
            _relate(cuts, node, rule)
    return cuts


def _write(cuts: Cuts, graph: Graph) -> None:
    for node in graph.nodes:
        if node.op != "output":
            DIMS[node] = tuple(_dims(cuts, node, index, value) for index, value in enumerate(results_of(node)))


def _dims(cuts: Cuts, node: Node, index: int, value: torch.Tensor | None) -> Dims:
    return tuple(cuts.atoms((node, index, dim)) for dim in range(value.ndim)) if value is not None else ()


def operand_result(node: Node, operand: Node) -> int:
    """Which result of `operand` the call `node` reads: a getitem names one, every other call reads the only one."""
    return int_at(node, 1) if len(results_of(operand)) > 1 else 0


def _cut_as_placed(cuts: Cuts, program: Program) -> None:
    """Parameters that lie already have the atoms in which they do, where nothing in the graph contradicts these, and so has all that walks
    with them: a backward tells more apart than a forward does."""
    for node in program.placeholders:
        shape = tuple(node.meta["val"].shape) if node in PLACED else ()
        for dims in PLACED.get(node) or ():
            changed = [cuts.cut((node, 0, dim), atoms) for dim, atoms in enumerate(dims) if shape_of(dims) == shape]
            if any(changed):
                cuts.solve()


def _relate(cuts: Cuts, node: Node, rule: Rule) -> None:
    read = [
        [(operand, operand_result(node, operand), dim) for dim in range(_rank(operand, operand_result(node, operand)))]
        for operand in operands(node)
    ]
    made = [[(node, index, dim) for dim in range(_rank(node, index))] for index in range(len(results_of(node)))]
    if node.target is recut:
        return
    if rule.view:
        cuts.relate(read[0], made[0])
        return
    labelled = [*zip(read, rule.operands, strict=True), *zip(made, rule.results, strict=True)]
    merged: list[tuple[DimKey, tuple[str, ...]]] = []
    for keys, labels in labelled:
        for key, label in zip(keys, labels, strict=True):
            if isinstance(label, tuple):
                merged.append((key, label))
            elif label is not None:
                _join_label(cuts, node, label, key)
    for key, names in merged:
        for label in names:
            if (node, label) not in cuts:
                cuts.add((node, label), rule.sizes[label])
        cuts.relate([(node, label) for label in names], [key])


def _rank(node: Node, index: int) -> int:
    value = results_of(node)[index]
    return value.ndim if value is not None else 0


def _join_label(cuts: Cuts, node: Node, label: str, key: DimKey) -> None:
    name = (node, label)
    if name not in cuts:
        cuts.add(name, cuts._sizes[key])
    cuts.join(name, key)


def _join_signature(cuts: Cuts, program: Program) -> None:
    """A gradient lies like its parameter, a buffer's new value like the buffer, a tangent like its output."""
    inputs: dict[tuple[str | None, str], Node] = {(item.kind, item.name): node for item, node in program.named_inputs()}
    for output, node in program.named_outputs():
        kind = {"gradient": "parameter", "buffer": "buffer", "loss": "tangent", "output": "tangent"}.get(output.kind)
        other = inputs.get((kind, output.name))
        if other is not None:
            for dim in range(len(output.shape)):
                cuts.join((node, 0, dim), (other, 0, dim))
