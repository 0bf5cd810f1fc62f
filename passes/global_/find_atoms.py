"""The atoms of every value, and which of them are the batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from autopar.ir.keys import PLACED
from autopar.ir.padding import Padding
from autopar.ir.program import Program
from autopar.ir.sharding import Dims, Sharding, outline
from autopar.ops.atoms import find_atoms
from autopar.ops.batch_atoms import with_batch


class Placed(Protocol):
    """How a parameter lies that an earlier capture, or a plan, has placed."""

    @property
    def dims(self) -> Dims: ...
    @property
    def sharding(self) -> Sharding: ...
    @property
    def padding(self) -> Padding | None: ...


@dataclass(frozen=True)
class FindAtoms:
    """Break every dim into atoms, and follow the batch from the inputs through all ops.

    Reads: val, PLACED, the signature's batch dims. Writes: DIMS, BATCH, PLACED, batch dims of outputs. Ensures: dims with equal labels in
    an op's rule have equal atoms; every atom that walks with an input's batch dim is marked, one of a constant where all its uses are. So
    is what walks with the batch dim of an output, which ranks get their shares of, where that walks with no input's: behind an op that goes
    across samples. Of inputs, outputs and tangents only the dim that counts samples is dealt out, which the signature then names.

    A parameter that is `placed` already, by name, keeps the atoms that its sharding needs, where no op of this graph contradicts them.
    """

    placed: Mapping[str, Placed] = field(default_factory=dict[str, Placed])
    name: str = "find atoms"

    def apply(self, program: Program) -> Program:
        return with_batch(find_atoms(_with_placed(program, self.placed)))


def _with_placed(program: Program, placed: Mapping[str, Placed]) -> Program:
    """With the atoms that `placed` parameters are to have; a later search for atoms, of what was padded meanwhile, finds them, too."""
    if not placed:
        return program
    program = program.copy()
    for item, node in program.named_inputs():
        if item.kind == "parameter" and item.name in placed:
            known = placed[item.name]
            PLACED[node] = (outline(known.sharding, known.dims),) if known.padding is None else (known.padding.before, known.padding.after)
    return program
