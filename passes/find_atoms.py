"""The atoms of every value, and which of them are the batch."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.atom_classes import Atom, AtomClasses
from autopar.atoms import find_atoms
from autopar.keys import BATCH, DIMS
from autopar.program import Program


@dataclass(frozen=True)
class FindAtoms:
    """Break every dim into atoms, and follow the batch from the inputs through all ops.

    Reads: val, the signature's batch dims. Writes: DIMS, BATCH. Ensures: dims with equal labels in an op's rule have
    equal atoms; every atom that walks with an input's batch dim is marked.
    """

    name: str = "find atoms"

    def apply(self, program: Program) -> Program:
        program = find_atoms(program)
        classes = AtomClasses.of(program.graph)
        batch = {classes.find(atom) for atom in _batch_atoms(program)}
        for node in program.graph.nodes:
            if node.op != "output":
                BATCH[node] = tuple(
                    tuple(i for i in range(sum(map(len, dims))) if classes.find((node, result, i)) in batch)
                    for result, dims in enumerate(DIMS[node])
                )
        return program


def _batch_atoms(program: Program) -> list[Atom]:
    found: list[Atom] = []
    for item, node in program.named_inputs():
        if item.batch_dim is not None:
            start = sum(len(dim) for dim in DIMS[node][0][: item.batch_dim])
            found += [(node, 0, start + i) for i in range(len(DIMS[node][0][item.batch_dim]))]
    return found
