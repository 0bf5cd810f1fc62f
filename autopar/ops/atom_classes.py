"""Classes of atoms that ops index together: an axis that splits one atom of a class can split all, padding one pads all."""

from __future__ import annotations

import operator
from collections.abc import Collection

from networkx.utils import UnionFind
from torch.fx import Graph, Node

from autopar.ir.arguments import int_at, node_at
from autopar.ir.program import operands
from autopar.ops.strategies import Factor, Spaces

# (node, which of its results, position among the atoms of that result)
Atom = tuple[Node, int, int]


class AtomClasses:
    """Atoms that some op splits together. `spaces` are those of the ops."""

    def __init__(self) -> None:
        self._sets = UnionFind()
        self.spaces = Spaces()

    @staticmethod
    def of(graph: Graph, apart: Collection[Node] = ()) -> AtomClasses:
        """The classes in a graph whose nodes have DIMS. Through what is `apart` nothing else is joined."""
        classes = AtomClasses()
        for node in graph.nodes:
            if node.op == "call_function":
                sources = read_by(node)
                for factor in classes.spaces.of(node).factors:
                    atoms = [atom for atom in atoms_of(node, factor, sources) if node in apart or atom[0] not in apart]
                    classes.join(*atoms)
        return classes

    def find(self, atom: Atom) -> Atom:
        """One atom that stands for all that walk with this one."""
        return self._sets[atom]

    def join(self, *atoms: Atom) -> None:
        self._sets.union(*atoms)


def read_by(node: Node) -> tuple[tuple[Node, int], ...]:
    """What `node` reads, operand by operand: a node, and which of its results."""
    if node.target is operator.getitem:
        return ((node_at(node, 0), int_at(node, 1)),)
    return tuple((operand, 0) for operand in operands(node))


def atoms_of(node: Node, factor: Factor, sources: tuple[tuple[Node, int], ...]) -> list[Atom]:
    """The atoms of operands (`sources`, see `read_by`) and results that are `factor` of `node`."""
    found: list[Atom] = [(*source, place) for source, place in zip(sources, factor.operands, strict=True) if place is not None]
    return found + [(node, result, place) for result, place in enumerate(factor.results) if place is not None]
