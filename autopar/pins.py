"""What the user fixes by hand: parameters by name or pattern, one entry per dim.

    pins={"transformer.h.*.mlp.c_fc.weight": (None, "tp"),      dim 1 over tp
          "transformer.wte.weight": ("tp", None),               dim 0 over tp
          "lm_head.weight": (("dp", "tp"), None),               dim 0 over dp and tp, dp major
          "*.bias": ()}                                         on every rank

A later pattern overrides an earlier one. On a dim of several atoms (a fused qkv dim is 3 × heads × head size) an
axis splits the first atom that it divides.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from autopar.errors import PlanError
from autopar.keys import DIMS
from autopar.mesh import Mesh
from autopar.plan import DimPin, Pins, Plan, PlannedInput
from autopar.program import Program
from autopar.sharding import Dims, Sharding


def plan_of(pins: Pins | Plan, program: Program) -> Plan:
    """`pins` as a plan for the parameters of `program` (which has atoms); a plan is returned as its pins.

    Raises `PlanError` naming every pin that cannot be kept: a pattern that no parameter matches, an unknown axis,
    one used twice, another number of dims, or sizes that do not divide.
    """
    if isinstance(pins, Plan):
        return pins.pins()
    parameters = {item.name: DIMS[node][0] for item, node in program.named_inputs() if item.kind == "parameter"}
    found, problems = dict[str, PlannedInput](), list[str]()
    for pattern, pin in pins.items():
        names = [name for name in parameters if fnmatchcase(name, pattern)]
        if not names:
            problems.append(f"{pattern!r} matches no parameter; there are {', '.join(list(parameters)[:4])}, …")
        for name in names:
            sharding = _sharding(pin, parameters[name], program.mesh)
            if isinstance(sharding, str):
                problems.append(f"{name!r} {tuple(pin)}: {sharding}")
            else:
                found[name] = PlannedInput(parameters[name], sharding)
    if problems:
        raise PlanError(
            "pins that cannot be kept:\n" + "\n".join(f"  {problem}" for problem in problems) + "\npin another dim, or drop the pin"
        )
    return Plan(program.mesh, found, reasons={name: "pinned by the user" for name in found})


def _sharding(pin: Sequence[DimPin], dims: Dims, mesh: Mesh) -> Sharding | str:
    """The sharding that `pin` means for a parameter of `dims`, or why there is none."""
    if pin and len(pin) != len(dims):
        return f"{len(pin)} entries for {len(dims)} dims"
    splits: list[tuple[str, ...]] = []
    used: list[str] = []
    for dim, entry in zip(dims, pin or (None,) * len(dims), strict=True):
        axes = [entry] if isinstance(entry, str) else list(entry or ())
        parts = [part for axis in axes for part in (mesh.parts(axis) or (axis,))]
        unknown = [axis for axis in parts if axis not in mesh.names]
        if unknown:
            return f"axis {unknown[0]!r} is not on the mesh ({mesh})"
        placed = _place(parts, dim, mesh)
        if placed is None:
            sizes = " × ".join(map(str, dim)) or "1"
            return f"a dim of {sizes} does not divide over {'·'.join(axes)} = {mesh.size_of(parts)}"
        splits += placed
        used += parts
    twice = [axis for axis in used if used.count(axis) > 1]
    return f"axis {twice[0]!r} is used twice" if twice else Sharding(tuple(splits))


def _place(axes: Sequence[str], dim: Sequence[int], mesh: Mesh) -> list[tuple[str, ...]] | None:
    """Axes on the atoms of one dim, each on the first that it divides; None when one divides none."""
    splits: list[tuple[str, ...]] = [()] * len(dim)
    for axis in axes:
        for index, atom in enumerate(dim):
            if atom % (mesh.size_of(splits[index]) * mesh.size_of([axis])) == 0:
                splits[index] += (axis,)
                break
        else:
            return None
    return splits
