"""Random fills tile by tile."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.ir.mesh import virtual_mesh
from autopar.ir.sharding import Sharding
from autopar.runtime.birth.draws import LENGTH, SIDE, Drawn, Ranges, TiledFills
from autopar.runtime.birth.initialise import Initialised
from autopar.runtime.module.parameters import Placement
from autopar.runtime.module.placement import held_part


def filled(shape: tuple[int, ...], wanted: Ranges | None = None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    tensor = torch.full(shape, 9.0, dtype=dtype)
    with TiledFills([Drawn(tensor, "key", wanted)]):
        tensor.data.normal_(1, 2)
    return tensor


@pytest.mark.parametrize("shape", [(SIDE + 88, 2 * SIDE + 1), (LENGTH + 5,), (3, 2, 5)])
def test_all_of_a_tensor_is_filled_as_the_fill_says(shape: tuple[int, ...]) -> None:
    tensor = filled(shape)
    assert not bool((tensor == 9).any()) and torch.equal(tensor, filled(shape))
    if tensor.numel() > 1000:
        assert tensor.mean() == pytest.approx(1, abs=0.02) and tensor.std() == pytest.approx(2, abs=0.02)


def test_a_part_has_the_values_of_the_whole_and_other_tiles_are_left_alone() -> None:
    shape = (3 * SIDE, 2 * SIDE)
    whole, part = filled(shape), filled(shape, [[(600, 700)], [(0, 10), (20, 30)]])
    drawn = torch.zeros(shape, dtype=torch.bool)
    drawn[SIDE : 2 * SIDE, :SIDE] = True
    assert torch.equal(part[drawn], whole[drawn]) and bool((part[~drawn] == 9).all())


def test_half_precision_is_drawn_in_float32_and_rounded() -> None:
    assert torch.equal(filled((40, 50), dtype=torch.bfloat16), filled((40, 50)).bfloat16())


def test_two_fills_and_two_tiles_are_different_draws() -> None:
    tensor = torch.zeros(SIDE, 2 * SIDE)
    with TiledFills([Drawn(tensor, "key")]):
        first = tensor.normal_().clone()
        second = tensor.normal_()
    assert not bool((first == second).any()) and not bool((first[:, :SIDE] == first[:, SIDE:]).any())


class Scaled(nn.Linear):
    """Its values depend on their norm: all of them must be drawn for any."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        self.weight.data.div_(self.weight.data.norm())
        nn.init.uniform_(self.bias, -3, 3)
        self.bias.data.mul_(2).clamp_(-5, 5)


def test_parts_of_what_initialisers_write_are_those_of_the_whole() -> None:
    mesh = virtual_mesh(tp=4)
    with torch.device("meta"):
        model = nn.ModuleDict({"plain": nn.Linear(2 * SIDE, 3 * SIDE), "scaled": Scaled(2 * SIDE, 2 * SIDE)})
    whole, values = Initialised(model, 3), Initialised(model, 3)
    for name, tensor in model.named_parameters():
        dims = tuple((size,) for size in tensor.shape)
        placement = Placement(dims, Sharding((*((),) * (len(dims) - 1), ("tp",))), mesh)
        expected = whole.whole(name)
        for rank in range(4):
            assert torch.equal(values.part(name, placement, rank), held_part(expected, placement, rank)), name
    assert torch.linalg.vector_norm(whole.whole("scaled.weight")) == pytest.approx(1, rel=1e-4)
