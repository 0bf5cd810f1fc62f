"""Bags of equal length in plain ops: values and gradients as torch's own, and split over every axis."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.frontend.capture import capture
from autopar.ir.mesh import virtual_mesh
from autopar.ir.program import Program
from autopar.passes.forward.decompose_bags import DecomposeBags

NUM_IDS, COLUMNS = 12, 8


def bag(dtype: torch.dtype = torch.float64, **options: Any) -> nn.EmbeddingBag:
    torch.manual_seed(0)
    made = nn.EmbeddingBag(NUM_IDS, COLUMNS, dtype=dtype, **options)
    nn.init.normal_(made.weight)  # the row of padding, too
    return made


def decomposed(model: nn.Module, *inputs: Tensor) -> Program:
    return DecomposeBags().apply(capture(model, inputs, {}, virtual_mesh(dp=1), outputs="all"))


def has_bags(program: Program) -> bool:
    return any("embedding_bag" in str(node.target) for node in program.graph.nodes)


IDS = torch.randint(0, NUM_IDS, (6, 5), generator=torch.Generator().manual_seed(1))
IDS[2] = 3  # a bag of padding alone


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [*({"mode": mode, "padding_idx": idx} for mode in ("sum", "mean") for idx in (None, 3, -9)), {"mode": "max"}]
)
def test_values_and_gradients_are_torchs(options: dict[str, Any], dtype: torch.dtype) -> None:
    model = bag(dtype, **options)
    program = decomposed(model, IDS)
    assert not has_bags(program)
    ours = model.weight.detach().clone().requires_grad_()
    constants = [program.constants[item.name] for item in program.signature.inputs_of("constant")]
    (got,), wanted = program.module()(ours, *constants, IDS), model(IDS)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
    assert got.dtype == wanted.dtype == dtype and got.shape == program.results[0].meta["val"].shape
    incoming = torch.randn_like(wanted)
    got.backward(incoming)
    wanted.backward(incoming)
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad, model.weight.grad, rtol=tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("shape", [(6, 1), (1, 6)])
def test_a_bag_of_one_and_one_bag(shape: tuple[int, int]) -> None:
    model, ids = bag(mode="mean"), torch.arange(6).reshape(shape)
    program = decomposed(model, ids)
    assert not has_bags(program)
    torch.testing.assert_close(program.module()(model.weight, ids)[0], model(ids))


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = bag(torch.float32, mode="sum")

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        return self.bag(ids, per_sample_weights=weights)


def test_samples_have_weights() -> None:
    model, weights = Weighted(), torch.rand(6, 5)
    program = decomposed(model, IDS, weights)
    assert not has_bags(program)
    constants = [program.constants[item.name] for item in program.signature.inputs_of("constant")]
    torch.testing.assert_close(program.module()(model.bag.weight, *constants, IDS, weights)[0], model(IDS, weights))


class Bounded(nn.Module):
    """Where bags begin is data."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = bag(torch.float32, mode="sum")

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.bag(ids, offsets)


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (Bounded(), (IDS.flatten(), torch.tensor([0, 4, 9, 12, 20, 22]))),
        (bag(mode="max", padding_idx=3), (IDS,)),
        (bag(mode="sum", scale_grad_by_freq=True), (IDS,)),
    ],
)
def test_other_bags_stay_as_they_are(model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    assert has_bags(decomposed(model, *inputs))


class Recommender(nn.Module):
    def __init__(self, mode: str, padding: int | None) -> None:
        super().__init__()
        self.users, self.items = (nn.EmbeddingBag(4096, 64, mode=mode, padding_idx=padding) for _ in range(2))
        self.score = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, users: Tensor, items: Tensor, clicks: Tensor) -> Tensor:
        found = self.score(torch.cat([self.users(users), self.items(items)], -1)).squeeze(-1)
        return nn.functional.binary_cross_entropy_with_logits(found, clicks)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.equivalence)])
@pytest.mark.parametrize(("mode", "padding"), [("sum", None), ("mean", 3), ("max", None)])
def test_a_recommender_is_split_and_exact(mode: str, padding: int | None, backend: str) -> None:
    torch.manual_seed(0)
    model = Recommender(mode, padding)
    batch = {"users": torch.randint(0, 4096, (64, 8)), "items": torch.randint(0, 4096, (64, 5)), "clicks": torch.rand(64)}
    batch["users"][:, 6:] = 3
    parallel = autopar.compile(model, autopar.virtual_mesh(dp=2, tp=2), example_inputs=batch, backend=backend)
    report = parallel.verify(**batch)
    assert report, str(report)
    nodes = [node for each in parallel.compiled.schedule.fragments.values() for node in each.module.graph.nodes]
    assert not any("embedding_bag" in str(node.target) for node in nodes)
    lookups = [node for node in nodes if node.target is torch.ops.aten.embedding.default]
    assert len(lookups) == 2
    for node in lookups:
        table, found = node.args[0].meta["val"], node.meta["val"]
        assert found.shape[0] == 32, "a rank looks up its samples"
        assert table.numel() == 4096 * 64 // 2, "in its part of the table"
