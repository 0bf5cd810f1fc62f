"""Where a value lies."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.mesh import Mesh
from autopar.ir.padding import Padding
from autopar.ir.sharding import Dims, Sharding, shape_of


@dataclass(frozen=True)
class Placement:
    """Where a value of `dims` lies on `mesh`; `padding` is in `dims`, and in nothing that the user sees.

    `stages` are those of a pipeline that hold it. A parameter that `is_written` by forward lies whole wherever it is, as a buffer does.
    """

    dims: Dims
    sharding: Sharding
    mesh: Mesh
    padding: Padding | None = None
    stages: tuple[int, ...] = ()
    is_written: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""
        return shape_of(self.dims if self.padding is None else self.padding.before)

    def local_padding(self, rank: int) -> Padding | None:
        """The padding in the part that lies with `rank`."""
        return self.padding and self.padding.local(self.sharding, self.mesh, rank)
