"""A parameter that several stages of a pipeline hold, each its copy: calls of other shapes train all copies, or are refused."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from autopar.errors import PlanError
from tests.support.captures import compiled
from tests.support.models.stages import Tied
from tests.support.ranks import GlooRanks, share


def of_two_shapes() -> tuple[list[float], list[float], str]:
    """Losses of steps of two shapes beside the model's; what is refused is left out of both."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    x, y = torch.randn(8, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
    model, refused = Tied().double(), ""
    reference = copy.deepcopy(model)
    parallel = compiled(model, mesh, (share({"x": x}, mesh)["x"],), timeout=180)
    optimizers = [torch.optim.SGD(each.parameters(), 5.0) for each in (parallel, reference)]
    found, wanted = list[float](), list[float]()
    for batch in (y, x, y, x):
        try:
            loss = parallel(share({"x": batch}, mesh)["x"])
        except PlanError as error:
            refused = str(error)
            continue
        expected = reference(batch)
        found.append(loss.item())
        wanted.append(expected.item())
        loss.backward()
        expected.backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
    return found, wanted, refused


def test_copies_on_stages_stay_equal_over_calls_of_two_shapes(gloo_ranks: GlooRanks) -> None:
    for found, wanted, refused in gloo_ranks.run(of_two_shapes):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
        assert "'first.weight' is held by stages 0 and 1" in refused and "train that of stage 0 alone" in refused


class WithMore(nn.Module):
    """A layer that some calls leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.more = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, deep: bool = False) -> Tensor:
        hidden = self.last(self.first(x).tanh())
        return (self.more(hidden.tanh()) if deep else hidden).square().mean()


def trained_since_a_later_call() -> tuple[float, float]:
    """How far whole values, and the norm of gradients, are from the model's after steps that train what the first capture did not read."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    x, model = torch.randn(8, 8, dtype=torch.float64), WithMore().double()
    reference = copy.deepcopy(model)
    mine = share({"x": x}, mesh)["x"]
    parallel = compiled(model, mesh, (mine,), timeout=180)
    optimizers = [torch.optim.SGD(each.parameters(), 1.0) for each in (parallel, reference)]
    for _ in range(3):
        for each in optimizers:
            each.zero_grad()
        parallel(mine, deep=True).backward()
        reference(x, deep=True).backward()
        norm = float(parallel.clip_grad_norm_(0.01)) - float(nn.utils.clip_grad_norm_(reference.parameters(), 0.01))
        for each in optimizers:
            each.step()
    state, wanted = parallel.full_state_dict(), reference.state_dict()
    return max(float((state[name] - wanted[name]).abs().max()) for name in wanted), norm


def test_what_a_later_call_reads_first_is_that_of_the_stage_that_reads_it(gloo_ranks: GlooRanks) -> None:
    for gap, norm in gloo_ranks.run(trained_since_a_later_call):
        assert gap < 1e-9 and abs(norm) < 1e-9
