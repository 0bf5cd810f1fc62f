from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import CaptureError, InputError
from tests.support.captures import compiled

MESH = {"dp": 2, "tp": 2}


class Model(nn.Module):
    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.scale, self.norm = nn.Linear(8, 8), nn.Parameter(torch.rand(8)), nn.GroupNorm(2, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def rotary(model: Any, x: Tensor) -> Tensor:
    """Angles as an outer product of whole positions and frequencies."""
    return model.fc(x.float()) * torch.einsum("i,j->ij", torch.arange(x.shape[1]), model.scale).cos()


REFUSED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "linear": lambda model, x: model.fc(x[:, 0] * 2),
    "matmul": lambda model, x: x @ model.scale,
    "attention": lambda model, x: model.attention(x, x, x)[0],
    "group_norm": lambda model, x: model.norm(x.transpose(1, 2)),
    "index_add": lambda model, x: torch.zeros(4, 8).index_add(0, torch.arange(4), x[:, 0]) * model.scale,
    "binary_cross_entropy": lambda model, x: F.binary_cross_entropy(model.scale.expand(4, 3, 8).sigmoid(), x.sigmoid()),
}
RUN: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "mul": lambda model, x: x * model.scale,
    "cast": lambda model, x: model.fc(x.float()),
    "cat": lambda model, x: torch.cat([x, model.scale.expand(4, 1, 8)], 1),
    "where": lambda model, x: torch.where(x > 0, x, model.scale),
    "einsum that adds nothing up": lambda model, x: torch.einsum("bsd,d->sdb", x, model.scale),
    "einsum of whole numbers": rotary,
    "outer": lambda model, x: x[:, :, :3] * torch.outer(torch.arange(3), model.scale[:3]),
    "mse": lambda model, x: F.mse_loss(model.fc(model.scale).expand(4, 3, 8), x),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_plain_torch_refuses_is_refused_before_it_is_compiled(name: str) -> None:
    model, x = Model(REFUSED[name]), torch.rand(4, 3, 8, dtype=torch.float64)
    with pytest.raises(RuntimeError):
        model(x)
    with pytest.raises(InputError, match="here they are float32 and float64") as refused:
        compiled(model, MESH)(x)
    text = str(refused.value)
    assert "is float64, the model's tensors there are float32: pass args[0].to(torch.float32), or cast the model" in text
    assert "where: " in text and ".py:" in text


@pytest.mark.parametrize("name", RUN)
def test_what_plain_torch_runs_runs(name: str) -> None:
    model, x = Model(RUN[name]), torch.rand(4, 3, 8, dtype=torch.float64)
    torch.testing.assert_close(compiled(model, MESH)(x), model(x))


def test_an_integer_input_where_a_float_is_asked_for() -> None:
    with pytest.raises(
        InputError, match=r"'args\[0\]' is int64, the model's tensors there are float32: pass args\[0\].to\(torch.float32\)"
    ):
        compiled(Model(REFUSED["matmul"]), MESH)(torch.ones(4, 3, 8, dtype=torch.int64))


@pytest.mark.parametrize("equation", ["bsd,d->bs", "bsd,d->b"])
def test_an_einsum_that_adds_up_products_of_two_dtypes(equation: str) -> None:
    model = Model(lambda model, x: torch.einsum(equation, x, model.scale))
    for x in (torch.rand(4, 3, 8, dtype=torch.float64), torch.ones(4, 3, 8, dtype=torch.int64)):
        with pytest.raises(RuntimeError, match="expected scalar type"):
            model(x)
        with pytest.raises(CaptureError, match=f"fails on these inputs: RuntimeError: expected scalar type {x.dtype}"):
            compiled(model, MESH)(x)


def test_an_outer_product_of_whole_numbers_is_split() -> None:
    model, x = Model(lambda model, x: rotary(model, x).square().mean()), torch.rand(4, 6, 8)
    parallel = compiled(model, MESH, (x,), num_microbatches=2)
    assert parallel.verify(x, promote=True).worst <= 1e-9
    assert parallel.summary()["flops_split"] == 1.0


def test_an_input_by_keyword_has_its_own_name() -> None:
    with pytest.raises(InputError, match=r"'x' is float64, the model's tensors there are float32: pass x.to\(torch.float32\)"):
        compiled(Model(REFUSED["matmul"]), MESH)(x=torch.rand(4, 3, 8, dtype=torch.float64))


def test_a_model_that_mixes_dtypes_itself_is_told_where() -> None:
    model = Model(lambda model, x: model.fc(x).half() @ model.scale)
    with pytest.raises(CaptureError, match="matmul takes operands of one dtype, and here they are float16 and float32") as refused:
        compiled(model, MESH)(torch.rand(4, 3, 8))
    assert "test_mixed_dtypes.py" in str(refused.value)
