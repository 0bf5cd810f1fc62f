"""What a rank holds, counted as torch.optim allocates it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopar
from autopar.cost.memory import MemoryBudget, OptimizerKind, bytes_of
from autopar.errors import AutoparError
from autopar.ir.program import Input
from autopar.ir.sharding import Sharding
from tests.support.models.trained import Lamb, batch, small_gpt


@pytest.mark.parametrize(
    ("size", "expected"),
    [("40GiB", 40 * 1024**3), ("80 GB", 80e9), ("1.5 MiB", 1.5 * 1024**2), ("512", 512), (1e6, 1e6), ("7 b", 7), ("2gib", 2 * 1024**3)],
)
def test_sizes_are_read(size: str | float, expected: float) -> None:
    assert bytes_of(size) == expected


@pytest.mark.parametrize(
    ("size", "problem"),
    [
        ("forty", "memory_budget is 'forty', no number; write '80 GB' or its value in B"),
        ("1.2.3 GB", "memory_budget is '1.2.3 GB', no number; write '80 GB' or its value in B"),
        ("40 GiBs", "memory_budget is '40 GiBs', where 'GiBs' is not a unit for B; write '80 GB' or a plain number in B"),
        ("-1GB", "memory_budget must be more than 0, got '-1GB'"),
        ("0", "memory_budget must be more than 0, got '0'"),
        (-5, "memory_budget must be more than 0, got -5"),
    ],
)
def test_what_is_no_size_is_refused(size: str | float, problem: str) -> None:
    with pytest.raises(AutoparError) as raised:
        bytes_of(size)
    assert str(raised.value) == problem


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.AdamW(parameters),
        lambda parameters: torch.optim.Adam(parameters),
        lambda parameters: torch.optim.SGD(parameters),
        lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
        lambda parameters: torch.optim.RMSprop(parameters),
        lambda parameters: torch.optim.Adagrad(parameters),
        lambda parameters: torch.optim.NAdam(parameters),
    ],
)
def test_state_is_what_the_optimizer_allocates(make) -> None:  # type: ignore[no-untyped-def]
    parameter = torch.nn.Parameter(torch.ones(6, 5))
    parameter.grad = torch.ones(6, 5)
    optimizer = make([parameter])
    optimizer.step()
    tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    # Scalars beyond the step count (NAdam's mu_product) are a few bytes a parameter and are left out.
    allocated = sum(value.nbytes for value in tensors if value.numel() > 1) + max((v.nbytes for v in tensors if v.numel() == 1), default=0)
    item = Input("parameter", "w", (6, 5), torch.float32, requires_grad=True)
    assert OptimizerKind.of(optimizer).state_bytes(item, parameter.nbytes) == allocated


def test_a_frozen_parameter_has_neither_gradient_nor_state() -> None:
    frozen = Input("parameter", "w", (4,), torch.float32)
    assert OptimizerKind.of("adamw").held_bytes(frozen, 16) == 16


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(AutoparError, match=r"optimizer='lamb' is unknown; use one of adadelta, adagrad"):
        MemoryBudget.of("1GB", "lamb")


@pytest.mark.parametrize(
    ("splits", "irregular", "split"),
    [(((), (), ()), False, False), ((("tp",), (), ()), False, True), (((), ("tp",), ()), True, True), ((("dp", "tp"), (), ()), True, True)],
    ids=["whole", "of a dim", "within a dim", "by two axes"],
)
def test_what_no_dtensor_describes_is_gathered(splits: Any, irregular: bool, split: bool) -> None:
    """The first dim has two atoms, as queries, keys and values in one matrix."""
    item = Input("parameter", "weight", (6, 4), torch.float32, True, ((3, 2), (4,)), Sharding(splits))
    kinds = (OptimizerKind(gathers="none"), OptimizerKind(gathers="irregular"), OptimizerKind(gathers="split"))
    assert [kind.is_gathered(item) for kind in kinds] == [False, irregular, split]
    assert not OptimizerKind(gathers="split", away="host").is_gathered(item)


def test_memory_counts_what_updates_on_processes_gather() -> None:
    """State of what is split within dims is whole; and an update has the parameter, its gradient and all parts of one."""
    model, mesh = small_gpt(), autopar.virtual_mesh(tp=2)

    def optimizer_bytes(**known: Any) -> float:
        options = {"optimizer": Lamb, "train_step": autopar.TrainStep(**known), "backend": "eager"}
        memory = autopar.compile(model, mesh, example_inputs=batch(0), **options).memory()
        return memory.fullest.kinds["optimizer"]

    assert optimizer_bytes(update_scope="parameter") > optimizer_bytes(update_scope="element")
