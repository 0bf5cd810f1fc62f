"""Parameters whose placement the atoms of a graph cannot say are read in other atoms than they lie in."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.driver.manager import run_passes
from autopar.ir.keys import BATCH, DIMS
from autopar.ir.markers import recut
from autopar.ir.padding import Padding
from autopar.ir.placement import Placement
from autopar.ir.program import Program
from autopar.ir.sharding import Dims, Sharding, carried
from autopar.passes.global_.find_atoms import FindAtoms
from autopar.passes.global_.recut_parameters import RecutParameters
from tests.support.graphs import MESH, assert_unchanged, find, text, traced

aten = torch.ops.aten
TENSORS = torch.randn(8, 4), torch.randn(4, 48)


def function(x: Tensor, weight: Tensor) -> Tensor:
    return aten.relu.default(aten.view.default(aten.mm.default(x, weight), [8, 3, 16]))


def placed(atoms: tuple[int, ...], *splits: tuple[str, ...], padding: Padding | None = None) -> dict[str, Placement]:
    return {"1": Placement(((4,), atoms), Sharding(((), *splits)), MESH, padding)}


def program(placements: dict[str, Placement]) -> tuple[Program, Program]:
    """Before and after."""
    before = run_passes(traced(function, *TENSORS, parameters=(1,)), (FindAtoms(placements),))
    return before, run_passes(before, (RecutParameters(placements),))


def dims_of(found: Program) -> Dims:
    return DIMS[found.placeholders[1]][0]


def test_what_contradicts_the_graph_is_read_through_a_recut() -> None:
    placements = placed((48,), ("tp",))
    before, after = program(placements)
    (node,) = find(after, recut)
    assert dims_of(before) == DIMS[node][0] == ((4,), (3, 16)) and dims_of(after) == ((4,), (48,))
    assert "mm: aten.mm.default(x_1, recut)" in text(after)
    assert carried(placements["1"].sharding, placements["1"].dims, dims_of(after), MESH) is not None
    assert all(BATCH[each] == BATCH[other] for each, other in zip(before.placeholders, after.placeholders, strict=True))
    assert_unchanged(before, after, *TENSORS)


def test_what_the_graph_can_say_is_left_alone() -> None:
    for placements in (placed((48,), ()), placed((3, 16), (), ("tp",)), placed((3, 4, 4), (), (), ("tp",))):
        before, after = program(placements)
        assert before is after
        known = placements["1"]
        assert (known.sharding.is_replicated and dims_of(after) == ((4,), (3, 16))) or carried(
            known.sharding, known.dims, dims_of(after), MESH
        )


def test_of_what_is_padded_nothing_is_recut() -> None:
    before, after = program(placed((48,), ("tp",), padding=Padding(((4,), (47,)), ((4,), (48,)))))
    assert before is after
