"""Parameters that lie in parts of which the atoms of a later graph know nothing are read in other atoms than they lie in."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch.fx import Node

from autopar.graph.emit import Emitter
from autopar.graph.parameter_readers import read_through
from autopar.ir.keys import DIMS, PHASE, PLACED
from autopar.ir.markers import recut
from autopar.ir.placement import Placement
from autopar.ir.program import Program
from autopar.ir.sharding import carried, shape_of
from autopar.passes.global_.find_atoms import FindAtoms

logger = logging.getLogger("autopar")


@dataclass(frozen=True)
class RecutParameters:
    """Put a `recut` node between a parameter that is `placed` already, by name, and its readers, and one behind its gradient, where the
    atoms of this graph cannot say how it lies.

        w [48@tp], of a graph that knows (3, 16)  →  gathered [48] → recut [(3, 16)], and of its gradient: [(3, 16)] → recut [48] → [48@tp]

    The parameter keeps the atoms that it was placed with. What both have alike stays split on the way; the rest is gathered where it is
    read.

    Reads: DIMS. Writes: `recut` nodes with PHASE, PLACED, DIMS, BATCH. Ensures: a parameter has atoms in
    which its placement can be said.
    """

    placed: Mapping[str, Placement] = field(default_factory=dict[str, Placement])
    name: str = "recut parameters"

    def apply(self, program: Program) -> Program:
        names = frozenset(self._contradicted(program))
        if not names:
            return program
        program = program.copy()
        for item, node in program.named_inputs():
            if item.kind == "parameter" and item.name in names:
                placed = self.placed[item.name]
                logger.info("%s lies as %s, and is gathered where it is read", item.name, placed.sharding.describe(placed.dims))
                PLACED[node] = (placed.dims,)
                read_through(program, node, lambda emit, value, _: emit.call(recut, value))
        for number, output in enumerate(program.signature.outputs):
            if output.kind == "gradient" and output.name in names:
                _recut_result(program, number)
        return FindAtoms().apply(program)

    def _contradicted(self, program: Program) -> Iterator[str]:
        for item, node in program.named_inputs():
            placed = self.placed.get(item.name) if item.kind == "parameter" else None
            if placed is None or item.padding is not None or placed.padding is not None:
                continue
            dims = DIMS[node][0]
            if shape_of(placed.dims) == shape_of(dims) and carried(placed.sharding, placed.dims, dims, program.mesh) is None:
                yield item.name


def _recut_result(program: Program, number: int) -> None:
    results, last = list(program.results), program.graph.output_node()
    node: Node = results[number]
    results[number] = Emitter(program.graph, last, node).call(recut, node)
    PHASE[results[number]] = PHASE.get(node) or "backward"
    last.args = (tuple(results),)
