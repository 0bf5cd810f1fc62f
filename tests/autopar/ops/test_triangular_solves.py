"""What is solved with a triangle is linear in the right-hand sides: gradients of factors of weights add up over microbatches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar

OF_A_WEIGHT: dict[str, Callable[[Tensor], Tensor]] = {
    "QR": lambda w: torch.linalg.qr(w).Q,
    "cholesky": lambda w: torch.linalg.cholesky(w @ w.mT),
    "solved": lambda w: torch.linalg.solve_triangular(w.triu(), w, upper=True),
    "solved from the right": lambda w: torch.linalg.solve_triangular(w.tril(), w, upper=False, left=False),
}


class Factored(nn.Module):
    def __init__(self, of_weight: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.of_weight, self.weight = (
            of_weight,
            nn.Parameter(torch.eye(6, dtype=torch.float64) + 0.1 * torch.randn(6, 6, dtype=torch.float64)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.of_weight(self.weight)).sin().square().mean()


@pytest.mark.parametrize("name", OF_A_WEIGHT)
def test_factors_of_a_weight_train_in_microbatches(name: str) -> None:
    torch.manual_seed(0)
    model, x = Factored(OF_A_WEIGHT[name]), torch.randn(8, 6, dtype=torch.float64)
    parallel = autopar.compile(model, autopar.virtual_mesh(dp=2), example_inputs=(x,), backend="eager", num_microbatches=2)
    assert parallel.compiled.mesh.num_microbatches == 2 and parallel.verify(x)


@pytest.mark.parametrize("left", [True, False])
def test_matrices_of_a_batch_are_solved_on_the_rank_that_has_them(left: bool) -> None:
    class Solved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            matrices = self.inner(x.flatten(1)).unflatten(1, (4, 4))
            triangle = matrices.tril(-1) + 2 * torch.eye(4, dtype=x.dtype)
            return torch.linalg.solve_triangular(triangle, x, upper=False, left=left).square().mean()

    torch.manual_seed(0)
    x = torch.randn(8, 4, 4, dtype=torch.float64)
    parallel = autopar.compile(Solved(), autopar.virtual_mesh(dp=2), example_inputs=(x,), backend="eager")
    assert parallel.verify(x) and parallel.summary()["flops_split"] == 1.0
