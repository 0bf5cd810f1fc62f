"""The atoms of every value, and which of them are the batch."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch.fx import Node

from autopar.atoms import find_atoms
from autopar.keys import BATCH, DIMS
from autopar.program import Program, operands
from autopar.strategies import factors_of

Atom = tuple[Node, int, int]


@dataclass(frozen=True)
class FindAtoms:
    """Break every dim into atoms, and follow the batch from the inputs through all ops.

    Reads: val, the signature's batch dims. Writes: DIMS, BATCH. Ensures: dims with equal labels in an op's rule have
    equal atoms; every atom that walks with an input's batch dim is marked.
    """

    name: str = "find atoms"

    def apply(self, program: Program) -> Program:
        program = find_atoms(program)
        classes = _Classes()
        for node in program.graph.nodes:
            if node.op == "call_function":
                _join_factors(classes, node)
        batch = {classes.find(atom) for atom in _batch_atoms(program)}
        for node in program.graph.nodes:
            if node.op != "output":
                BATCH[node] = tuple(
                    tuple(i for i in range(sum(map(len, dims))) if classes.find((node, result, i)) in batch)
                    for result, dims in enumerate(DIMS[node])
                )
        return program


class _Classes:
    """Atoms that some op splits together."""

    def __init__(self) -> None:
        self._parent: dict[Atom, Atom] = {}

    def find(self, atom: Atom) -> Atom:
        root = atom
        while (above := self._parent.get(root, root)) != root:
            root = above
        while atom != root:
            self._parent[atom], atom = root, self._parent.get(atom, root)
        return root

    def join(self, left: Atom, right: Atom) -> None:
        self._parent[self.find(left)] = self.find(right)


def _join_factors(classes: _Classes, node: Node) -> None:
    if node.target is operator.getitem:
        sources = [(node.args[0], int(node.args[1]))]  # type: ignore[arg-type]
    else:
        sources = [(operand, 0) for operand in operands(node)]
    for factor in factors_of(node):
        atoms: list[Atom] = [(*source, position) for source, position in zip(sources, factor.operands, strict=True) if position is not None]  # type: ignore[misc]
        atoms += [(node, result, position) for result, position in enumerate(factor.results) if position is not None]
        for atom in atoms[1:]:
            classes.join(atoms[0], atom)


def _batch_atoms(program: Program) -> list[Atom]:
    found: list[Atom] = []
    for item, node in program.named_inputs():
        if item.batch_dim is not None:
            start = sum(len(dim) for dim in DIMS[node][0][: item.batch_dim])
            found += [(node, 0, start + i) for i in range(len(DIMS[node][0][item.batch_dim]))]
    return found
