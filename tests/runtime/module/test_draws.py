"""Random draws into parameters and gradients on processes: those of one device, whatever the ranks' own seeds."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from autopar import ParallelModule
from autopar.errors import AutoparError
from tests.support.captures import compiled
from tests.support.models.stages import Tied
from tests.support.ranks import GlooRanks, share

SEED = 7


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 18), nn.Tanh(), nn.Linear(18, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def trained(module: nn.Module, x: Tensor) -> list[float]:
    """A head drawn anew, and noise on gradients and on parameters, dropout on a parameter; a look at where the generator is then."""
    losses = list[float]()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    module.layers[2].reset_parameters()  # type: ignore[index, operator, union-attr]
    for _ in range(3):
        loss = module(x)
        loss.backward()
        with torch.no_grad():
            for parameter in module.parameters():
                assert parameter.grad is not None
                parameter.grad.add_(torch.randn_like(parameter.grad), alpha=0.1)
                parameter.add_(torch.empty_like(parameter).exponential_(2.0) * 0.01)
                parameter.mul_(nn.functional.dropout(parameter, 0.2).ne(0))
                parameter.add_(torch.bernoulli(torch.rand_like(parameter)) * 0.01)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def placed(axes: dict[str, int], options: dict[str, Any]) -> tuple[nn.Module, ParallelModule, Tensor, Tensor]:
    torch.manual_seed(0)
    model, x = Net().double(), torch.randn(8, 8, dtype=torch.float64)
    reference = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    mine = share({"x": x}, mesh)["x"]
    return reference, compiled(model, mesh, (mine,), timeout=180, **options), x, mine


def on_a_process(axes: dict[str, int], options: dict[str, Any], has_own_seed: bool) -> tuple[Any, ...]:
    reference, parallel, x, mine = placed(axes, options)
    rank = torch.distributed.get_rank()
    torch.manual_seed(SEED)
    wanted, expected = trained(reference, x), torch.rand(1).item()
    torch.manual_seed(SEED + rank * has_own_seed)
    found, drawn_next = trained(parallel, mine), torch.rand(1).item()
    torch.manual_seed(SEED + rank)
    own = torch.rand(1).item()
    parameters: list[Any] = list(parallel.parameters())
    weights = [each.full_tensor().detach() for each in parameters]
    is_split = any(not word.is_replicate() for each in parameters for word in each.placements)
    own_next = expected if rank == 0 else own
    return found, wanted, weights, [each.detach() for each in reference.parameters()], drawn_next, own_next, expected, is_split


@pytest.mark.parametrize(("axes", "options"), [({"dp": 2, "tp": 2}, {}), ({"dp": 4}, {"zero": 3}), ({"dp": 4}, {})])
def test_draws_are_those_of_one_device(gloo_ranks: GlooRanks, axes: dict[str, int], options: dict[str, Any]) -> None:
    for has_own_seed in (False, True):
        for rank, each in enumerate(gloo_ranks.run(on_a_process, axes, options, has_own_seed)):
            found, wanted, weights, expected, drawn_next, own_next, same_next, is_split = each
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-12)
            assert drawn_next == (own_next if has_own_seed else same_next), f"the generator of rank {rank}"
            assert is_split == (axes != {"dp": 4} or bool(options))


def with_a_generator() -> tuple[Tensor, Tensor, str]:
    _, parallel, _, _ = placed({"tp": 4}, {})
    weight: Any = parallel.layers[0].weight
    generator = torch.Generator().manual_seed(100 + torch.distributed.get_rank())
    nn.init.uniform_(weight, generator=generator)
    plain = torch.empty(18, 8, dtype=torch.float64).uniform_(generator=torch.Generator().manual_seed(100))
    total = weight.norm()
    try:
        with torch.no_grad():  # torch 2.15 makes the sum for `detach`
            total.normal_()
    except AutoparError as error:
        return weight.full_tensor().detach(), plain, str(error)
    return weight.full_tensor().detach(), plain, "" if total.placements[0].is_partial() else "draws into a norm"


def test_a_generator_is_taken_and_a_sum_not_made_yet_refused(gloo_ranks: GlooRanks) -> None:
    for found, wanted, refused in gloo_ranks.run(with_a_generator):
        assert torch.equal(found, wanted)
        assert "draws into a norm" in refused


def of_stages() -> tuple[list[str], str]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    x = torch.randn(4, 8, dtype=torch.float64)
    parallel = compiled(Tied().double(), mesh, (x,), timeout=180)
    parallel(x).backward()
    tied: Any = dict(parallel.named_parameters())["first.weight"]
    assert tied.grad is not None
    ways: list[Any] = [lambda: nn.init.normal_(tied), lambda: tied.data.normal_(), lambda: tied.detach().view(-1)[:4].uniform_()]
    ways += [lambda: torch.randn_like(tied), lambda: torch.rand_like(tied.grad), lambda: tied.grad.bernoulli_(0.5)]
    refused = list[str]()
    for way in ways:
        with pytest.raises(AutoparError) as found:
            way()
        refused.append(str(found.value))
    for name, each in parallel.named_parameters():
        if name.startswith("middle"):
            each.data.normal_()
    with pytest.raises(AutoparError) as undrawn:
        torch.multinomial((tied + 1).detach().abs(), 2)
    return refused, str(undrawn.value)


def test_what_cannot_be_drawn_alike_is_refused(gloo_ranks: GlooRanks) -> None:
    for refused, undrawn in gloo_ranks.run(of_stages):
        assert len(refused) == 6 and all("several stages of the pipeline" in each and "load_state_dict" in each for each in refused)
        assert "multinomial" in undrawn and "full_tensor()" in undrawn


def truncated() -> tuple[Tensor, Tensor, bool]:
    _, parallel, _, _ = placed({"dp": 2, "tp": 2}, {"zero": 3})
    rank = torch.distributed.get_rank()
    pairs = []
    for bound in (2.0, 0.2):  # torch rejects what is out of bounds, or where bounds are narrow draws from an even density
        weight: Any = parallel.layers[0].weight
        torch.manual_seed(SEED + rank)
        nn.init.trunc_normal_(weight, std=1.0, a=-bound, b=bound)
        torch.manual_seed(SEED)
        pairs.append(
            (weight.full_tensor().detach(), nn.init.trunc_normal_(torch.empty(18, 8, dtype=torch.float64), std=1.0, a=-bound, b=bound))
        )
    is_split = any(not word.is_replicate() for word in weight.placements)
    return torch.stack([found for found, _ in pairs]), torch.stack([wanted for _, wanted in pairs]), is_split


def test_truncated_normals_are_those_of_one_device(gloo_ranks: GlooRanks) -> None:
    for found, wanted, is_split in gloo_ranks.run(truncated):
        assert torch.equal(found, wanted) and is_split
