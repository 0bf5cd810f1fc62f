"""A fresh head, or another parameter, in the place of one that lies on processes: it is placed as that was, and trains as on one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from autopar import ParallelModule
from autopar.errors import AutoparError
from tests.support.captures import compiled
from tests.support.ranks import GlooRanks, share


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.body, self.out = nn.Sequential(nn.Linear(8, 16), nn.Tanh()), nn.Linear(16, width)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.out(self.body(x)) - y).square().mean()


def head(seed: int = 1, width: int = 8) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(16, width, dtype=torch.float64)


def steps(module: nn.Module, batch: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> list[float]:
    losses = list[float]()
    for _ in range(3):
        loss = module(**batch)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def swapped_and_trained(module: Any, model: Any, batch: dict[str, Tensor]) -> list[Any]:
    """`model` is what `module` runs."""
    found: list[Any] = [steps(module, batch, adam(module))]
    model.out = head()
    found.append(steps(module, batch, adam(module)))  # made before the next call
    model.out.weight = nn.Parameter(torch.full((8, 16), 0.1, dtype=torch.float64))
    model.body[0] = nn.Linear(8, 16, dtype=torch.float64).requires_grad_(False)
    model.body[0].load_state_dict({"weight": torch.ones(16, 8) / 8, "bias": torch.zeros(16)})
    found.append(module(**batch).item())
    found.append(steps(module, batch, adam(module)))  # made after it
    old, model.out = model.out, head(2)
    found.append(module(**batch).item())
    model.out = old
    found.append(steps(module, batch, adam(module)))
    return found


def set_up(axes: dict[str, int], **options: Any) -> tuple[ParallelModule, Net, dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    model, batch = Net().double(), {name: torch.randn(8, 8, dtype=torch.float64) for name in "xy"}
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    mine = share(batch, mesh)
    return compiled(model, mesh, tuple(mine.values()), timeout=180, **options), model, mine, batch


def on_a_process(axes: dict[str, int], options: dict[str, Any]) -> tuple[list[Any], list[Any], bool, bool]:
    parallel, model, mine, batch = set_up(axes, **options)
    reference = copy.deepcopy(Net().double())
    reference.load_state_dict(parallel.full_state_dict())
    found, wanted = swapped_and_trained(parallel, model, mine), swapped_and_trained(reference, reference, batch)
    are_equal = all(torch.allclose(each, reference.state_dict()[name], rtol=1e-9) for name, each in parallel.full_state_dict().items())
    are_placed = all(isinstance(each, DTensor) or each.is_meta for each in model.parameters())
    return found, wanted, are_equal, are_placed


@pytest.mark.parametrize(("axes", "options"), [({"dp": 2, "tp": 2}, {}), ({"dp": 4}, {"zero": 3}), ({"pp": 2, "dp": 2}, {})])
def test_what_takes_the_place_of_parameters_is_trained_as_on_one_device(
    gloo_ranks: GlooRanks, axes: dict[str, int], options: dict[str, Any]
) -> None:
    for found, wanted, are_equal, are_placed in gloo_ranks.run(on_a_process, axes, options):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
        assert are_equal and are_placed


def said(call: Any) -> str:
    try:
        call()
    except AutoparError as error:
        return str(error)
    return ""


def refused_on_a_process() -> list[str]:
    parallel, model, mine, _ = set_up({"dp": 2, "tp": 2})
    found = list[str]()
    model.out = head(seed=dist.get_rank() // 2)
    list(parallel.parameters() if dist.get_rank() else ())  # on some ranks placed before the call, on others by it
    found += [said(lambda: parallel(**mine)), said(lambda: parallel(**mine))]
    parallel.load_state_dict(parallel.state_dict() | head().state_dict(prefix="out."))
    found.append(said(lambda: parallel(**mine)))
    model.out = head()
    early = adam(model)
    parallel(**mine).backward()
    found.append(said(early.step))
    weight: Any = parallel.out.weight
    model.out.weight = nn.Parameter(distribute_tensor(torch.zeros(8, 16).double(), weight.device_mesh, [Replicate(), Replicate()]))
    found.append(said(lambda: parallel(**mine)))
    model.out.weight = nn.Parameter(torch.empty(8, 16, dtype=torch.float64, device="meta"))
    found.append(said(lambda: parallel(**mine)))
    model.out.weight = weight
    found.append(said(lambda: parallel(**mine)))
    return found


def test_what_cannot_take_the_place_of_parameters_is_refused_on_all_ranks(gloo_ranks: GlooRanks) -> None:
    for unlike, again, loaded, early, otherwise, on_meta, back in gloo_ranks.run(refused_on_a_process):
        assert "ranks 0 and 2 make different calls, in the values of parameters that were put in the place of others" in unlike
        assert again == unlike and not loaded and not back
        assert "made of 2 parameters of the model, the first is 'out.weight', before they were placed" in early
        assert "'out.weight' lay as (" in otherwise and otherwise.count("Replicate()") == 3 and "and lies on meta" in on_meta


def of_another_shape_on_a_process() -> tuple[str, list[float], list[float]]:
    """What is refused, and what is to be done instead, done."""
    parallel, model, mine, batch = set_up({"dp": 2, "tp": 2})
    steps(parallel, mine, adam(parallel))
    state = parallel.full_state_dict()
    model.out = head(width=4)
    mine, batch = ({name: each[:, :4] if name == "y" else each for name, each in given.items()} for given in (mine, batch))
    mine["y"], batch["y"] = mine["y"].contiguous(), batch["y"].contiguous()
    refused = said(lambda: parallel(**mine))
    anew = Net().double()
    anew.load_state_dict(state)
    anew.out = head(width=4)
    reference = copy.deepcopy(anew)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    again = compiled(anew, mesh, tuple(mine.values()), timeout=180)
    return refused, steps(again, mine, adam(again)), steps(reference, batch, adam(reference))


def test_another_shape_is_refused_with_a_way_that_works_on_processes(gloo_ranks: GlooRanks) -> None:
    for refused, found, wanted in gloo_ranks.run(of_another_shape_on_a_process):
        assert "'out.weight' was [8, 16] float64 and is [4, 16] float64" in refused
        assert "load parallel.full_state_dict(), taken before the change, into it, change it, and compile that" in refused
        assert "compile the changed model again" not in refused
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
