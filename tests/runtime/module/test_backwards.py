"""What backward begins from is the same on ranks that compute one loss together, and may be another on others."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from autopar.errors import InputError
from tests.support.captures import compiled
from tests.support.models.stages import TwoLayers
from tests.support.ranks import GlooRanks, share


def placed(axes: dict[str, int], model: nn.Module, **options: object) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    mesh, x = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes)), torch.randn(8, 8, dtype=torch.float64)
    mine = share({"x": x}, mesh)["x"]
    reference = model.double()
    return compiled(copy.deepcopy(reference), mesh, (mine,), timeout=180, **options), reference, mine, x


def later_factors(axes: dict[str, int]) -> list[str]:
    """What is said of three backwards: with one factor, with one of each share of the batch, and with one of each rank."""
    parallel, _, mine, _ = placed(axes, TwoLayers())
    said = []
    for factor in (1.0, 1.0 + dist.get_rank() // 2, 1.0 + dist.get_rank()):
        try:
            (factor * parallel(mine)).backward()
            said.append("")
        except InputError as error:
            said.append(str(error))
    return said


def test_factors_are_compared_wherever_they_are_not_those_of_all_ranks(gloo_ranks: GlooRanks) -> None:
    for equal, by_share, by_rank in gloo_ranks.run(later_factors, {"dp": 2, "tp": 2}):
        assert not equal and not by_share and "compute one loss together" in by_rank


class Outputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def factors_of_ranks(axes: dict[str, int]) -> str:
    """What is said where each rank multiplies the loss by a number of its own."""
    parallel, _, mine, _ = placed(axes, TwoLayers())
    try:
        ((1.0 + dist.get_rank()) * parallel(mine)).backward()
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}, {"tp": 4}])
def test_other_factors_of_one_loss_are_refused(gloo_ranks: GlooRanks, axes: dict[str, int]) -> None:
    for said in gloo_ranks.run(factors_of_ranks, axes):
        assert "compute one loss together" in said and " 1 and " in said and "manual_seed" in said


def factors_of_shares() -> float:
    """How far gradients are off, after two backwards, where each share of the batch has a factor of its own: of the loss, which is that of
    all shares, their mean counts."""
    parallel, reference, mine, x = placed({"dp": 2, "tp": 2}, TwoLayers())
    for _ in range(2):
        ((1.0 + dist.get_rank() // 2) * parallel(mine)).backward()
        (1.5 * reference(x)).backward()
    gaps = []
    for ours, plain in zip(parallel.parameters(), reference.parameters(), strict=True):
        assert isinstance(ours.grad, DTensor) and plain.grad is not None
        gaps.append(float((ours.grad.full_tensor() - plain.grad).abs().max()))
    return max(gaps)


def test_shares_of_the_batch_have_factors_of_their_own(gloo_ranks: GlooRanks) -> None:
    assert max(gloo_ranks.run(factors_of_shares)) < 1e-12


def outside(scale: float) -> str:
    """A loss of the outputs, which ranks along tp compute up to `scale` alike."""
    parallel, _, mine, _ = placed({"dp": 2, "tp": 2}, Outputs(), outputs="all")
    try:
        (parallel(mine) * (1.0 + scale * (dist.get_rank() % 2))).square().mean().backward()
    except InputError as error:
        return str(error)
    return ""


def test_losses_outside_of_the_model_may_differ_by_rounding(gloo_ranks: GlooRanks) -> None:
    assert set(gloo_ranks.run(outside, 1e-7)) == {""}
    assert all("compute one loss together" in said for said in gloo_ranks.run(outside, 0.5))


class Complex(Outputs):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.layers(x)
        return hidden, torch.complex(hidden, hidden.sin())


def of_complex(count: float) -> str:
    """A loss whose gradient is a conjugate that torch has not written out, and one that half of the ranks add, `count` times."""
    parallel, _, mine, _ = placed({"dp": 2, "tp": 2}, Complex(), outputs="all")
    hidden, spectrum = parallel(mine)
    loss = (spectrum.conj() * torch.ones(8, dtype=spectrum.dtype)).sum().abs()
    try:
        (loss + count * hidden.mean() if dist.get_rank() % 2 else loss).backward()
    except InputError as error:
        return str(error)
    return ""


def test_what_counts_nothing_may_be_left_out(gloo_ranks: GlooRanks) -> None:
    assert set(gloo_ranks.run(of_complex, 0.0)) == {""}
    assert all("compute one loss together" in said for said in gloo_ranks.run(of_complex, 0.5))
