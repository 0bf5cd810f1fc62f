"""A sweep over torch's losses, layers and ops: none may be wrong, by the default plan or by random ones.

Each row runs at sizes that are all equal, which a rule may take for one another, and all different, on a virtual dp = 2 × tp = 2.
Loss and gradients are compared with the original's in float64. What is refused is named here, with what the refusal says.
"""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.checks.checker import Checker
from autopar.compiler import Options, default_passes
from autopar.cost.hardware.cluster import Cluster
from autopar.driver.manager import History, run_passes
from autopar.errors import AutoparError
from autopar.ir.mesh import virtual_mesh
from autopar.ir.program import Form, Program
from autopar.passes.global_.choose_shardings import ChooseShardings
from autopar.testing.random_shardings import RandomShardings
from tests.support.programs import Values, assert_close, forward_program, inputs_of, run_schedule
from tests.support.sweep.ops import OPS
from tests.support.sweep.rows import DIFFERENT, EQUAL, LAYERS, LOSSES, Computed

ROWS = {f"{kind}: {name}": row for kind, rows in (("loss", LOSSES), ("layer", LAYERS), ("op", OPS)) for name, row in rows.items()}
SIZES = {"equal": EQUAL, "different": DIFFERENT}
SEEDS = (0, 1)
MESH = virtual_mesh(dp=2, tp=2)
TOLERANCE = 1e-9
# What is refused, and what the refusal says.
REFUSED = {
    "layer: Embedding of bounded norm": "writes into parameter",
    "op: cartesian": "goes by the values of a tensor inside",
    "loss: CTC": "cannot be captured as one graph: the size of a result depends on values",
    **dict.fromkeys(
        ("op: unique", "op: nonzero", "op: masked_select"),
        "cannot be captured as one graph: the size of a result depends on values",
    ),
}
# Each was wrong once, or stands for many.
QUICK = (
    "layer: EmbeddingBag, mean, padded",
    "layer: weight norm",
    "loss: cross entropy, weighted and smoothed",
    "op: gather over the batch",
    "op: kron",
    "op: unbind",
)


class Swept(nn.Module):
    """A Linear, what is computed of it, and the sum of all results, each number weighted by its place."""

    def __init__(self, width: int, compute: Computed) -> None:
        super().__init__()
        self.linear, self.compute = nn.Linear(width, width), compute

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        results = pytree.tree_leaves(self.compute(self.linear(x), *others))
        return torch.stack([_by_place(result) for result in results if result.is_floating_point()]).sum()


def _by_place(result: Tensor) -> Tensor:
    """No two elements may be exchanged unseen."""
    places = torch.arange(result.numel(), dtype=result.dtype).reshape(result.shape)
    return (result * (1 + 0.1 * places).cos()).sum()


def module_of(name: str, sizes: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    compute, inputs = ROWS[name](SIZES[sizes])
    model = Swept(inputs[0].shape[-1], compute).double()
    return model, tuple(inputs)


def wanted_of(name: str, sizes: str) -> Values:
    model, inputs = module_of(name, sizes)
    loss = model(*inputs)
    loss.backward()
    found: Values = {("gradient", key): each.grad for key, each in model.named_parameters() if each.grad is not None}
    return {("loss", "0"): loss.detach()} | found


@cache
def forward_of(name: str, sizes: str) -> Program:
    model, inputs = module_of(name, sizes)
    return forward_program(copy.deepcopy(model), {}, MESH, *inputs)


def found_by(name: str, sizes: str, seed: int | None) -> Values:
    """Loss and gradients by the default plan, or by a random one."""
    model, inputs = module_of(name, sizes)
    passes = default_passes(Options(Cluster.ideal()), training=True)
    chosen = [RandomShardings(seed) if seed is not None and isinstance(each, ChooseShardings) else each for each in passes]
    history = History()
    schedule = run_passes(forward_of(name, sizes), chosen, (history, Checker()) if seed is None else (history,))
    local = history.last(Form.LOCAL)
    values = inputs_of(local, model, inputs, {})
    found = run_schedule(schedule.places[0], local.mesh, values)
    return {key: value for key, value in found.items() if key[0] in ("loss", "gradient")}


def check(name: str, sizes: str, seed: int | None) -> None:
    wanted = wanted_of(name, sizes)
    got = found_by(name, sizes, seed)
    # A parameter that nothing reads has zeros here, and nothing there.
    assert wanted.keys() <= got.keys() and all(not got[key].any() for key in got.keys() - wanted.keys())
    assert_close({key: got[key] for key in wanted}, wanted, TOLERANCE)


def check_row(name: str, sizes: str, seeds: tuple[int | None, ...]) -> None:
    if name in REFUSED:
        with pytest.raises(AutoparError, match=REFUSED[name]):
            check(name, sizes, None)
        return
    for seed in seeds:
        try:
            check(name, sizes, seed)
        except Exception as error:
            error.add_note(f"{name}, {sizes} sizes, {'the default plan' if seed is None else f'random plan {seed}'}")
            raise


@pytest.mark.parametrize("name", QUICK)
def test_some_rows_are_exact(name: str) -> None:
    check_row(name, "equal", (None, 0))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", ROWS)
def test_every_row_is_exact_or_refused(name: str, sizes: str) -> None:
    check_row(name, sizes, (None, *SEEDS))


def test_what_is_refused_is_in_the_table() -> None:
    assert REFUSED.keys() | set(QUICK) <= ROWS.keys()
