"""A mesh axis that is larger than an atom becomes several sub-axes, so that one of them can split the atom."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.ir.keys import DIMS
from autopar.ir.mesh import MICROBATCHES, Mesh, parent
from autopar.ir.program import Program
from autopar.plans.json import Json
from autopar.plans.plan import Plan

# What splits the batch, stages or time is no smaller than it is.
_WHOLE = ("dp", "pp", MICROBATCHES)


@dataclass(frozen=True)
class RefineMesh:
    """Break tp = 4 into 2 × 2 where a parameter has 2 key-value heads: two ranks split heads, two something else.

    Only the outermost atom of a parameter's dim that shares a factor with the axis is looked at: the inner ones
    are reached anyway, and every sub-axis multiplies the strategies of an op. The axes of the batch stay whole, but for `dp` where ZeRO
    splits parameters over groups of it: dp.0 counts the groups, dp.1 the neighbours inside. A `plan` that was made for this graph and
    these ranks says how it broke them. Where parameters are `placed` by an earlier capture the mesh is the one that they lie on.

    Reads: DIMS, freedom. Writes: the program's mesh. Ensures: the same ranks in the same order.
    """

    plan: Plan | None = None
    placed: bool = False
    name: str = "refine mesh"

    def decide(self, program: Program) -> Mesh:
        if self.placed:
            return program.mesh
        if self.plan is not None and self.plan.refines(program):
            return self.plan.mesh
        mesh, zero = program.mesh, program.freedom.zero
        if zero is not None and zero.group is not None and "dp" in mesh.names:
            mesh = mesh.refine("dp", (mesh.size_of(["dp"]) // zero.group, zero.group))
        for axis, size in program.mesh.axes:
            divisors = {found for found in _divisors(program, size) if 1 < found < size}
            if axis == parent(axis) and axis not in _WHOLE and divisors:  # a part of an axis stays as it is
                part = max(divisors)
                mesh = mesh.refine(axis, (part, size // part))
        return mesh

    def apply(self, program: Program, decision: Mesh) -> Program:
        return replace(program, mesh=decision)

    def written(self, program: Program, decision: Mesh) -> dict[str, Json]:
        return dict(decision.axes)

    def read(self, program: Program, value: Mapping[str, int]) -> Mesh:
        return Mesh(tuple(value.items()))


def _divisors(program: Program, size: int) -> set[int]:
    """For each dim of each parameter, what the axis and the first atom that it can split at all have in common."""
    found: set[int] = set()
    for item, node in program.named_inputs():
        for dim in DIMS[node][0] if item.kind == "parameter" else ():
            common = next((math.gcd(atom, size) for atom in dim if math.gcd(atom, size) > 1), size)
            found.add(common)
    return found
