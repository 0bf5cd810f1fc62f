"""Values that only rank 0 has; and what holds a model's parameters once their parts are placed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from autopar.errors import WeightsError
from autopar.runtime.module import placement
from autopar.runtime.module.placement import held_part
from tests.support.captures import compiled
from tests.support.models.zoo import ZOO
from tests.support.ranks import share


def from_rank0(name: str, axes: dict[str, int], has_values: bool = True) -> tuple[dict[str, Tensor], float, int]:
    """Whole values, the loss, and how many of the model's own parameters are still there."""
    torch.manual_seed(7)
    case = ZOO[name](num_layers=axes.get("pp", 1)).to(torch.float32)
    model: Any = case.model
    if not has_values or dist.get_rank():
        with torch.device("meta"):
            model = type(model)(model.config).train()
    own = [weakref.ref(each) for each in model.parameters()]
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    parallel = compiled(model, mesh, weights="rank0")
    loss = float(parallel(**share(case.batch, mesh)).loss.detach())
    gc.collect()
    return parallel.full_state_dict() | dict(parallel.named_buffers()), loss, sum(each() is not None for each in own)


@pytest.mark.parametrize(
    ("name", "axes"), [("gpt2", {"pp": 2, "dp": 2}), pytest.param("llama", {"dp": 2, "tp": 2}, marks=pytest.mark.slow)]
)
def test_all_ranks_get_what_rank_0_has(gloo_ranks: Any, name: str, axes: dict[str, int]) -> None:
    torch.manual_seed(7)
    case = ZOO[name](num_layers=axes.get("pp", 1)).to(torch.float32)
    loss = float(case.model(**case.batch).loss.detach())
    for state, found, num_left in gloo_ranks.run(from_rank0, name, axes):
        assert all(torch.equal(state[each], tensor) for each, tensor in (*case.model.named_parameters(), *case.model.named_buffers()))
        assert found == pytest.approx(loss, rel=1e-5) and num_left == 0


def refused() -> str:
    with pytest.raises(WeightsError) as error:
        from_rank0("gpt2", {"dp": 4}, has_values=False)
    return str(error.value)


def test_rank_0_must_have_values(gloo_ranks: Any) -> None:
    assert all("parameters and buffers are on meta on rank 0, too" in text for text in gloo_ranks.run(refused))


def num_alive() -> tuple[int, int]:
    """How many of the model's own parameters there are before, and once a step ran with their parts, while Python collects nothing."""
    case = ZOO["gpt2"]().to(torch.float32)
    own = [weakref.ref(each) for each in case.model.parameters()]
    own += [weakref.ref(each.untyped_storage()) for each in case.model.parameters()]
    before = sum(each() is not None for each in own)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    parallel = compiled(case.model, mesh)
    parallel.__dict__["_capture"] = partial(captured_with_garbage, case.model, parallel.__dict__["_capture"])
    gc.disable()
    try:
        parallel(**case.batch).loss.backward()
    finally:
        gc.enable()
    return before, sum(each() is not None for each in own)


def captured_with_garbage(model: nn.Module, capture: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As torch's export leaves cycles behind that hold parameters."""
    cycle: list[Any] = [*model.parameters()]
    cycle.append(cycle)
    return capture(*args, **kwargs)


def test_the_models_own_parameters_are_let_go_of(gloo_ranks: Any) -> None:
    assert all(after == 0 < before for before, after in gloo_ranks.run(num_alive))


def num_alive_at_each() -> list[int]:
    """How many of the model's own parameters there are as each of them is placed."""
    case = ZOO["gpt2"]().to(torch.float32)
    own = [weakref.ref(each) for each in case.model.parameters()]
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    found: list[int] = []

    def part(*args: Any) -> Tensor:
        found.append(sum(each() is not None for each in own))
        return held_part(*args)

    with patch.object(placement, "held_part", part):
        compiled(case.model, mesh)(**share(case.batch, mesh)).loss.backward()
    return found


def test_each_parameter_is_let_go_of_before_the_next_is_placed(gloo_ranks: Any) -> None:
    for found in gloo_ranks.run(num_alive_at_each):
        assert found == [*range(len(found), 0, -1)] and len(found) > 10
