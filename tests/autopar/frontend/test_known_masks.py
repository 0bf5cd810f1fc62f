"""Reads by masks that shapes alone give are captured: values and gradients as torch's own, and what others make of masks is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.errors import CaptureError
from autopar.frontend.capture import capture
from tests.support.models.layer import MESH, assert_as_model, of

N = 6


class Contrastive(nn.Module):
    """SimCLR's loss as its most widely used PyTorch code has it: positives and negatives by masks, the diagonal left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, images: Tensor) -> Tensor:
        features = F.normalize(self.encoder(images), dim=1)
        labels = torch.cat([torch.arange(len(images) // 2) for _ in range(2)], dim=0)
        labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float()
        similarity = torch.matmul(features, features.T)
        mask = torch.eye(labels.shape[0], dtype=torch.bool)
        labels = labels[~mask].view(labels.shape[0], -1)
        similarity = similarity[~mask].view(similarity.shape[0], -1)
        positives = similarity[labels.bool()].view(labels.shape[0], -1)
        negatives = similarity[~labels.bool()].view(similarity.shape[0], -1)
        logits = torch.cat([positives, negatives], dim=1) / 0.5
        return F.cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.long))


@pytest.mark.parametrize("axes", [{"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_a_contrastive_loss_by_masks_is_split_and_exact(axes: dict[str, int]) -> None:
    model, images = Contrastive().double(), torch.randn(8, 3, 4, 4, dtype=torch.float64)
    parallel = autopar.compile(model, autopar.virtual_mesh(**axes), example_inputs={"images": images}, backend="eager")
    assert parallel.verify(images=images)
    assert "all matmuls, convolutions and attention are split" in str(parallel.explain())


def test_default_backend_runs_a_contrastive_loss_by_masks() -> None:
    model, images = Contrastive(), torch.randn(8, 3, 4, 4)
    parallel = autopar.compile(model, autopar.virtual_mesh(dp=2), example_inputs={"images": images})
    parallel(images=images).backward()
    assert parallel.verify(images=images)


def written(sim: Tensor) -> Tensor:
    """In place, through a view, after another reader."""
    mask = torch.ones(N, N).bool()
    first = sim[mask.clone()].sum()
    sim = sim.clone().masked_fill_(mask.triu(4), 0.5)  # reads the mask, and writes what is not known
    mask.fill_diagonal_(False)
    mask[0].logical_and_(torch.arange(N) < 3)
    return first * sim[mask.clone()].square().sum()


def of_one_dim(sim: Tensor) -> Tensor:
    return sim[:, torch.tensor([True, False, True, True, False, False])].tanh()


def beside_others(sim: Tensor) -> Tensor:
    """A mask of two dims behind one that is read whole, and a mask beside an index."""
    pairs = torch.ones_like(sim, dtype=torch.bool).triu(1)
    return sim.expand(2, N, N)[:, pairs].sum() * sim[torch.tensor([1, 0]), :][:, pairs[0]].square().sum()


def beside_columns(sim: Tensor) -> Tensor:
    """Masks beside indices of more dims, and of none."""
    columns = torch.arange(N) > 2
    y = sim.clone()
    y[torch.tensor([0, 2])[:, None], columns] = sim[sim.argmax(1)[:2, None], columns] * 3
    return (
        y[torch.tensor([0, 2, 4])[:, None], columns]
        * sim.expand(3, N, N)[torch.arange(3)[:, None], torch.eye(N).bool()][:, :3]
        * y[torch.tensor(2), columns]
    )


def selected(sim: Tensor) -> Tensor:
    return torch.masked_select(sim, torch.arange(N) % 2 == 0).exp() * sim.masked_select(sim.new_ones(1, N).bool()).view(N, N)[
        :, :3
    ].reshape(-1)


def where(sim: Tensor) -> Tensor:
    rows, columns = torch.where(torch.eye(N).roll(1, 0) > 0)
    return sim[rows, columns] * sim[torch.nonzero(torch.tril(torch.ones(N, N)))[:N, 1], columns]


def in_parts(sim: Tensor) -> Tensor:
    """Values of which an op gives several."""
    low, high = torch.arange(N * 2).chunk(2)
    return sim[(low + high) % 4 == 0].square()


def nothing(sim: Tensor) -> Tensor:
    return sim[torch.zeros(N, dtype=torch.bool)].sum() + sim.sum()


def put_back(sim: Tensor) -> Tensor:
    """What is written by a mask has a row for each place."""
    mask, rows = torch.eye(N).bool(), torch.arange(N) > 2
    y = torch.zeros_like(sim)
    y[mask] = sim[mask].exp()
    y[rows] += 1.5 * sim[rows].flip(0)
    y[:, rows] = y[:, rows] * 2
    return y.square()


def after_others(sim: Tensor) -> Tensor:
    """Masks that were written from data, and are gone."""
    for _ in range(40):
        mask = torch.eye(N).bool()
        mask[0] |= sim[0, 0] > 0
        del mask
    return sim[torch.eye(N).bool()].square()


READS = [put_back, after_others, written, of_one_dim, beside_others, beside_columns, selected, where, in_parts, nothing]


@pytest.mark.parametrize("read", READS, ids=lambda read: read.__name__)
def test_what_is_read_by_a_known_mask_is_as_torchs(read: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(N, 4)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            features = self.linear(x)
            return read(features @ features.t()).mean()

    assert_as_model(Model(), (x,), {})


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_what_is_written_by_known_masks_is_as_torchs(axis: str) -> None:
    """A row for each place, one for all, a number."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            y, columns = self.linear(x), torch.arange(8) % 3 == 0
            z = y.clone()
            z[:, columns] = y[:, columns].exp()
            z[:, ~columns] *= 0.5
            z[:, torch.arange(8) > 5] = 1.0
            return z.square().mean()

    x = torch.randn(N, 4, dtype=torch.float64)
    parallel = autopar.compile(Model().double(), autopar.virtual_mesh(**{axis: 2}), example_inputs={"x": x}, backend="eager")
    assert parallel.verify(x=x)


def test_equal_masks_have_one_constant_and_factories_stay_calls() -> None:
    program = capture(Contrastive(), (torch.randn(8, 3, 4, 4),), {}, MESH)
    # Rows and columns off the diagonal, of positives, of negatives.
    assert len(program.constants) == 6
    assert {"aten.arange.default", "aten.cat.default"} <= {str(node.target) for node in program.graph.nodes}


def data_in_it(layer: Any, x: Tensor) -> Tensor:
    mask = torch.eye(8, dtype=torch.bool)
    mask[0] |= x[0, 0] > 0
    return layer.linear(x)[mask[1]].sum()


def through_another_shape(layer: Any, x: Tensor) -> Tensor:
    sim, mask = layer.linear(x) @ layer.linear(x).t(), torch.eye(8).bool()
    mask.view_as(sim).copy_(torch.roll(torch.eye(8), 1, 0).bool())
    return sim[mask].sum()


def cast(layer: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums = (torch.arange(8).float()[:, None] * 100.7) @ torch.ones(1, 8)
        return layer.linear(x)[sums[:, 0] > 302.0].float().sum()


def of_one_number(layer: Any, x: Tensor) -> Tensor:
    return layer.linear(x).sum() * torch.nonzero(torch.eye(8).bool()[0, 0]).shape[1]


def drawn(layer: Any, x: Tensor) -> Tensor:
    return layer.linear(x)[torch.rand(8) > 0.5].sum()


def drawn_in_place(layer: Any, x: Tensor) -> Tensor:
    mask = torch.zeros(8)
    mask[1:].uniform_()
    return layer.linear(x)[mask > 0.5].sum()


def never_written(layer: Any, x: Tensor) -> Tensor:
    return layer.linear(x)[torch.empty(8) > 0.5].sum()


@pytest.mark.parametrize(
    "read", [data_in_it, through_another_shape, cast, of_one_number, drawn, drawn_in_place, never_written], ids=lambda read: read.__name__
)
def test_masks_that_data_or_draws_are_in_are_refused(read: Callable[..., Tensor]) -> None:
    with pytest.raises(CaptureError, match="the size of a result depends on values|are not in its graph"):
        of(read, torch.randn(8, 4))


def test_a_mask_in_a_buffer_is_refused() -> None:
    """Its values are state: a checkpoint may bring others."""

    class Coupling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("mask", torch.tensor([True, False, True, False]))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)[:, self.mask].sum()

    with pytest.raises(CaptureError, match="the size of a result depends on values"):
        capture(Coupling(), (torch.randn(8, 4),), {}, MESH)
