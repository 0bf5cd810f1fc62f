"""Numbers and arrays of NumPy that a model holds are what they are to PyTorch: numbers, and constants with their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import CaptureError

NUMBER, ROW = np.float64(0.3), np.array([0.1, 0.2, 0.3, 0.4, 0.5])


class Scaled(nn.Module):
    def __init__(self, compute: Callable[[Scaled, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.compute = nn.Linear(5, 5, dtype=torch.float64), compute
        self.scale, self.single, self.count, self.is_on, self.row = np.sqrt(5.0), np.float32(0.7), np.int64(2), np.bool_(True), ROW.copy()

        self.row.flags.writeable = False

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, self.inner(x)).square().mean()


def written(h: Tensor, number: Any) -> Tensor:
    weights = torch.ones(5, dtype=h.dtype)
    weights[-1] = number
    return h * weights


def added(number: Any) -> Any:
    number += 0.1
    return number


COMPUTE: dict[str, Callable[[Scaled, Tensor], Tensor]] = {
    "a global": lambda self, h: h * NUMBER,
    "an attribute": lambda self, h: h / self.scale,
    "in single precision": lambda self, h: self.single * h,
    "a size": lambda self, h: h[:, : self.count].reshape(-1, int(self.count)),
    "a flag": lambda self, h: h.tanh() if self.is_on else h,
    "written": lambda self, h: written(h, self.scale) + written(h, NUMBER),
    "a fill": lambda self, h: h * torch.full((5,), NUMBER, dtype=h.dtype).clamp(-self.scale, self.scale),
    "a power": lambda self, h: h.abs() ** NUMBER + torch.add(h, h, alpha=self.scale),
    "of NumPy's functions": lambda self, h: h * np.sqrt(self.scale) * np.cos(h.shape[-1]),
    "made of a shape": lambda self, h: h.reshape(-1, np.prod(h.shape[1:])) * np.maximum(h.shape[1], 2),
    "made of a number": lambda self, h: h[:, : np.ceil(np.log(h.shape[1])).astype("int").item()] * float(np.float32(self.scale)),
    "what they are": lambda self, h: h if isinstance(self.count, int) or isinstance(self.single, float) else h.tanh(),
    "as tensors": lambda self, h: h * torch.tensor(NUMBER) * torch.as_tensor(self.single),
    "compared": lambda self, h: h if ~(self.scale > 1) else 2 * h,
    "single precision, rounded": lambda self, h: h * (0.1 + self.single) * (1 / self.single) + added(self.single) * self.single**2,
    "a sum in single precision": lambda self, h: h if np.float32(0.1) + np.float32(0.2) == np.float32(0.3) else -h,
    "of several": lambda self, h: h * (max((self.single, 0.1)) + 0.1) + min(self.single, 2) * 0.1 + divmod(self.count, 2)[1],
    "flags": lambda self, h: h * float(self.is_on + self.is_on) + (self.is_on & 3) + (self.is_on is True),
    "a flag, inverted": lambda self, h: h if ~self.is_on else 2 * h,
    "a flag that NumPy makes": lambda self, h: h if ~np.isfinite(5.0) else 2 * h,
    "an integer that wraps": lambda self, h: h * float(np.prod([2**62]) * 4 + 1) + float((self.count * 2**31 * 2**31) * 2),
    "an array": lambda self, h: h * torch.from_numpy(self.row.copy()) + torch.as_tensor(self.row[0]),
    "a global array, twice": lambda self, h: h * torch.tensor(ROW) + torch.from_numpy(ROW),
}


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("name", COMPUTE)
def test_they_are_what_they_are_to_torch(name: str) -> None:
    torch.manual_seed(0)
    model, x = Scaled(COMPUTE[name]), torch.randn(4, 5, dtype=torch.float64)
    parallel = autopar.compile(model, autopar.virtual_mesh(dp=2), example_inputs=(x,), backend="eager")
    wanted = model(x)
    torch.testing.assert_close(parallel(x), wanted, rtol=1e-12, atol=0.0)
    assert parallel.verify(x, promote=True)


@pytest.mark.parametrize(
    "compute", [lambda self, h: h * -self.is_on, lambda self, h: h * sum((self.single, 0.1))], ids=["NumPy refuses it", "a sum of several"]
)
def test_what_is_not_computed_as_numpy_does_is_refused(compute: Callable[[Scaled, Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError):
        autopar.compile(Scaled(compute), autopar.virtual_mesh(dp=2), example_inputs=(torch.randn(4, 5).double(),), backend="eager")


@pytest.mark.parametrize("value", [np.float64(0.5), np.float32(0.5), np.int64(1), np.full(5, 0.5)], ids=lambda value: type(value).__name__)
def test_another_one_is_seen(value: Any) -> None:
    torch.manual_seed(0)
    model, x = (
        Scaled(lambda self, h: h * (torch.from_numpy(self.row) if isinstance(self.row, np.ndarray) else self.row)),
        torch.randn(4, 5).double(),
    )
    model.row = value
    parallel = autopar.compile(model, autopar.virtual_mesh(dp=2), example_inputs=(x,), backend="eager")
    first = parallel(x)
    model.row = 3 * value
    torch.testing.assert_close(parallel(x), 9 * first, rtol=1e-12, atol=0.0)
    if isinstance(model.row, np.ndarray):
        model.row *= 2
        torch.testing.assert_close(parallel(x), 36 * first, rtol=1e-12, atol=0.0)
