"""Determinants of matrices that lie in memory this way and that: torch's kernel factors the matrix or its transpose by how it lies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.graph.determinants import det, logdet, slogdet

DETERMINANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "det": lambda x: torch.linalg.det(x),
    "slogdet": lambda x: torch.linalg.slogdet(x)[1],
    "logdet": lambda x: torch.logdet(x @ x.mT),
    "of old": lambda x: torch.det(x) + torch.slogdet(x)[1],
}
LAYOUTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a parameter": lambda weight, _: weight,
    "a transposed parameter": lambda weight, _: weight.t(),
    "a matrix a sample": lambda _, h: h,
    "a transposed matrix a sample": lambda _, h: h.mT,
    "samples inside": lambda _, h: h.transpose(0, 1).contiguous().transpose(0, 1),
}


class Model(nn.Module):
    def __init__(self, determinant: str, layout: str, columns_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        weight = torch.randn(4, 4) + 4 * torch.eye(4)
        self.weight = nn.Parameter(weight.t().contiguous().t() if columns_first else weight)
        self.inner, self.determinant, self.layout = nn.Linear(4, 4), DETERMINANTS[determinant], LAYOUTS[layout]

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x) @ self.weight + 4 * torch.eye(4, dtype=x.dtype)
        return (h.square().sum((-1, -2)) + self.determinant(self.layout(self.weight, h))).mean()


@pytest.mark.parametrize("axes", [{"dp": 1}, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize(
    ("layout", "columns_first"), [(each, False) for each in LAYOUTS] + [("a parameter", True), ("a transposed parameter", True)]
)
@pytest.mark.parametrize("determinant", DETERMINANTS)
def test_gradients_are_right_however_the_matrix_lies(determinant: str, layout: str, columns_first: bool, axes: Mapping[str, int]) -> None:
    model, x = Model(determinant, layout, columns_first).double(), torch.randn(8, 4, 4, dtype=torch.float64)
    plain = copy.deepcopy(model)
    plain(x).backward()
    parallel = autopar.compile(model, autopar.virtual_mesh(**axes), example_inputs=(x,), backend="eager")
    parallel(x).backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)
    assert parallel.verify(x)


def test_on_the_default_backend() -> None:
    model, x = Model("slogdet", "a transposed parameter", False).double(), torch.randn(8, 4, 4, dtype=torch.float64)
    assert autopar.compile(model, autopar.virtual_mesh(dp=2), example_inputs=(x,)).verify(x)


def test_matrices_of_samples_stand_apart() -> None:
    model, x = Model("slogdet", "a matrix a sample", False).double(), torch.randn(8, 4, 4, dtype=torch.float64)
    parallel = autopar.compile(model, autopar.virtual_mesh(pp=2, dp=2), example_inputs=(x,), num_microbatches=2, backend="eager")
    assert parallel.verify(x) and "lu_" not in str(parallel.summary()["replicated"])


@pytest.mark.parametrize(
    "matrix", [[[1.0, 2.0], [2.0, 4.0]], [[0.0, 1.0], [1.0, 0.0]], [[-1.0, 0.0], [0.0, 2.0]]], ids=["singular", "exchanged", "negative"]
)
def test_values_at_the_edges_are_torchs(matrix: list[list[float]]) -> None:
    x = torch.tensor(matrix, dtype=torch.float64)
    torch.testing.assert_close(det(x), torch.linalg.det(x))
    for ours, theirs in zip(slogdet(x), torch.linalg.slogdet(x), strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(logdet(x), torch.logdet(x), equal_nan=True)
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    det(ours).backward()
    torch.linalg.det(theirs).backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
