"""Random dims and legal shardings, for properties."""

from __future__ import annotations

from hypothesis import strategies as st

from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Dims, Sharding, flat

MESHES = (
    Mesh((("dp", 2),)),
    Mesh((("tp", 4),)),
    Mesh((("dp", 2), ("tp", 2))),
    Mesh((("dp", 2), ("tp.0", 2), ("tp.1", 2))),
    Mesh((("dp", 2), ("tp.0", 2), ("tp.1", 3))),
)


def dims_of() -> st.SearchStrategy[Dims]:
    """Up to three dims of up to two atoms; a dim of size 1 has none."""
    atom = st.sampled_from((2, 3, 4, 6, 8, 12))
    return st.lists(st.lists(atom, max_size=2).map(tuple), min_size=1, max_size=3).map(tuple)


@st.composite
def shardings(draw: st.DrawFn, dims: Dims, mesh: Mesh, within: Sharding | None = None) -> Sharding:
    """Every axis splits an atom, is one that the value is unreduced over, or is not used.

    With `within` the value is unreduced over axes only over which `within` is, too.
    """
    atoms = flat(dims)
    kind = draw(st.sampled_from(("sum", "max", "logsumexp")))
    allowed = dict(within.unreduced) if within else dict.fromkeys(mesh.names, kind)
    splits: list[tuple[str, ...]] = [() for _ in atoms]
    unreduced = []
    for axis in draw(st.permutations(mesh.names)):
        places = [i for i, size in enumerate(atoms) if size % mesh.size_of((*splits[i], axis)) == 0]
        choice = draw(st.sampled_from([None, *places, *(["unreduced"] if axis in allowed else [])]))
        if choice == "unreduced":
            unreduced.append((axis, allowed[axis]))
        elif choice is not None:
            splits[choice] = (*splits[choice], axis)
    return Sharding(tuple(splits), tuple(sorted(unreduced, key=lambda entry: mesh.names.index(entry[0]))))
