"""The casts of `precision=`: which calls get which dtypes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar._torch import OpOverload
from autopar.errors import AutoparError
from autopar.frontend.capture import capture
from autopar.graph.promote import default_float64, promote
from autopar.ir.mesh import virtual_mesh
from autopar.ir.precision import MixedPrecision
from autopar.ir.program import Program
from autopar.passes.forward.cast_to_precision import CastToPrecision
from tests.support.programs import assert_close, inputs_of, run_forward

BF16 = MixedPrecision()
IDS = torch.zeros(4, 6, dtype=torch.int64)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


class Model(nn.Module):
    """A table, a linear layer, a norm, a table of angles that is not trained, and a scale."""

    def __init__(self, compute: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.linear, self.norm = nn.Embedding(10, 8), nn.Linear(8, 8, bias=False), nn.LayerNorm(8)
        self.batch_norm, self.scale = nn.BatchNorm1d(6), nn.Parameter(torch.ones(8))
        self.register_buffer("angles", torch.rand(8, 1))
        self.compute = compute

    def forward(self, ids: Tensor) -> Tensor:
        return self.compute(self, ids)


def cast(compute: Callable[[Any, Tensor], Tensor], precision: MixedPrecision | None = BF16, model: Any = None) -> Program:
    captured = capture(model or Model(compute), (IDS,), {}, virtual_mesh(dp=1), outputs="all")
    return CastToPrecision(precision).apply(captured)


def dtypes(program: Program) -> dict[str, tuple[str, ...]]:
    """By op what its floating-point operands are, and what it gives."""
    found: dict[str, tuple[str, ...]] = {}
    for node in program.graph.nodes:
        if isinstance(node.target, OpOverload) and isinstance(node.meta["val"], Tensor) and "_to_copy" not in str(node.target):
            values = [each.meta["val"] for each in (*node.all_input_nodes, node)]
            name = str(node.target).split(".")[1]
            found[name] = tuple(str(value.dtype).removeprefix("torch.") for value in values if value.is_floating_point())
    return found


LOW, WIDE = "bfloat16", "float32"
RULES: dict[str, tuple[Callable[[Any, Tensor], Tensor], dict[str, tuple[str, ...]]]] = {
    "a table, and what follows": (lambda model, ids: model.linear(model.table(ids)), {"embedding": (LOW, LOW), "linear": (LOW, LOW, LOW)}),
    "a norm": (lambda model, ids: model.norm(model.table(ids)), {"embedding": (LOW, LOW), "layer_norm": (WIDE, WIDE, WIDE, WIDE)}),
    "batch norm": (lambda model, ids: model.batch_norm(model.table(ids)), {"batch_norm": (WIDE,) * 6}),
    "softmax": (lambda model, ids: model.table(ids).softmax(-1), {"softmax": (LOW, WIDE)}),
    "a sum": (lambda model, ids: model.table(ids).sum(-1), {"sum": (LOW, WIDE)}),
    "a loss": (lambda model, ids: F.cross_entropy(model.table(ids).flatten(0, 1), ids.flatten()), {"cross_entropy_loss": (WIDE, WIDE)}),
    "a scale": (lambda model, ids: model.table(ids) * model.scale, {"mul": (LOW, LOW, LOW)}),
    "residual": (lambda model, ids: (x := model.table(ids)) + model.linear(model.norm(x)), {"linear": (LOW,) * 3, "add": (LOW,) * 3}),
    "angles": (
        lambda model, ids: model.table(ids) * (model.angles @ ids[:1].float()[:, :1]).cos().mT,
        {"matmul": (WIDE, WIDE, WIDE), "mul": (LOW, WIDE, WIDE)},
    ),
    "a move": (lambda model, ids: model.table(ids) + model.table(ids).to("cpu"), {"add": (LOW, LOW, LOW)}),
    "asked to be float32": (lambda model, ids: model.table(ids).float() * 2, {"to": (LOW, WIDE), "mul": (WIDE, WIDE)}),
    "asked to be as another": (
        lambda model, ids: model.table(ids).type_as(model.angles) * 2,
        {"type_as": (LOW, WIDE, WIDE), "mul": (WIDE, WIDE)},
    ),
    "written in place": (
        lambda model, ids: torch.zeros(4, 8).index_add(0, ids[0, :4], model.linear(model.table(ids[:, 0]))),
        {"linear": (LOW, LOW, LOW), "index_add": (WIDE, WIDE, WIDE)},
    ),
    "Fourier": (
        lambda model, ids: torch.fft.irfft(torch.fft.rfft(model.linear(model.table(ids)), n=16) * model.scale[0], n=16),
        {"linear": (LOW, LOW, LOW), "fft_irfft": (WIDE,)},
    ),
    "a determinant of a parameter": (
        lambda model, ids: model.table(ids) * torch.linalg.slogdet(model.linear.weight[:6, :6])[1],
        {"slice": (LOW, LOW), "mul": (LOW, WIDE, LOW)},
    ),
    "a factorization": (lambda model, ids: torch.linalg.svdvals(model.linear(model.table(ids))), {"linalg_svdvals": (WIDE, WIDE)}),
    "a quantile": (lambda model, ids: model.linear(model.table(ids)).quantile(0.3, -1), {"quantile": (WIDE, WIDE)}),
    "polar coordinates": (lambda model, ids: torch.polar(*model.table(ids).split(4, -1)).abs(), {"abs": (WIDE,)}),
    "a function of the user's": (lambda model, ids: Double.apply(model.table(ids)) + 1, {"add": (WIDE, WIDE)}),
}


@pytest.mark.parametrize("name", RULES)
def test_calls_compute_in(name: str) -> None:
    compute, expected = RULES[name]
    found = dtypes(cast(compute))
    assert {op: found[op] for op in expected} == expected


@pytest.mark.parametrize("name", RULES)
def test_casts_are_all_that_is_new(name: str) -> None:
    """Promoted, where no cast rounds, both compute the same."""
    compute, _ = RULES[name]
    model = Model(compute)
    plain, low = (cast(compute, precision, model) for precision in (None, BF16))
    wide = {key: value.double() if value.is_floating_point() else value for key, value in inputs_of(plain, model, (IDS,), {}).items()}
    with default_float64():
        assert_close(run_forward(promote(low), wide), run_forward(promote(plain), wide), 1e-12)
    assert [item.dtype for item in low.signature.outputs] == [item.dtype for item in plain.signature.outputs]


def test_without_one_nothing_changes() -> None:
    captured = capture(Model(RULES["residual"][0]), (IDS,), {}, virtual_mesh(dp=1), outputs="all")
    assert CastToPrecision(None).apply(captured) is captured


def test_a_parameter_is_cast_once() -> None:
    program = cast(lambda model, ids: model.linear(model.linear(model.table(ids))))
    assert sum(node.target is torch.ops.aten._to_copy.default for node in program.graph.nodes) == 3  # two parameters, and the output


def test_what_is_kept_computes_in_float32() -> None:
    def compute(model: Any, ids: Tensor) -> Tensor:
        return model.linear(model.table(ids))

    assert dtypes(cast(compute, MixedPrecision(keep=("linear",)))) == {"embedding": (LOW, LOW), "linear": (WIDE, WIDE, WIDE)}


def test_a_disabled_autocast_is_kept_in_float32() -> None:
    def compute(model: Any, ids: Tensor) -> Tensor:
        x = model.table(ids)
        with torch.autocast("cpu", enabled=False):
            return model.linear(x)

    assert dtypes(cast(compute)) == {"embedding": (LOW, LOW), "linear": (WIDE, WIDE, WIDE)}


def test_a_program_says_what_it_was_cast_by() -> None:
    program = cast(RULES["residual"][0], MixedPrecision(torch.float16, torch.bfloat16))
    assert program.precision == MixedPrecision(torch.float16, torch.bfloat16) and program.reduce == torch.bfloat16


def test_parameters_that_are_no_masters_are_refused() -> None:
    model = Model(RULES["residual"][0]).to(torch.bfloat16)
    with pytest.raises(AutoparError, match=r"'table\.weight', one of \d, is torch\.bfloat16: call model\.float\(\) before"):
        cast(RULES["residual"][0], model=model)


class Writes(nn.Module):
    """`write` changes what the linear layer made, in a module that is kept in float32."""

    def __init__(self, write: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.kept = nn.Linear(4, 4), Kept(write)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.kept(h).square().mean()


class Kept(nn.Module):
    def __init__(self, write: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.write = write

    def forward(self, h: Tensor) -> Tensor:
        self.write(h)
        return h


def test_a_write_that_a_cast_would_lose_is_refused() -> None:
    model = Writes(lambda h: h[:, 0].mul_(5.0))
    with pytest.raises(AutoparError, match="the write would be lost"):
        autopar.compile(
            model,
            virtual_mesh(dp=1),
            example_inputs=(torch.randn(4, 4),),
            backend="eager",
            precision=MixedPrecision(param=torch.bfloat16, keep=("kept",)),
        )


def test_rows_that_an_embedding_renormalises_are_the_parameters_own() -> None:
    class Renormed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 4, max_norm=0.5)

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids).square().mean()

    with pytest.raises(AutoparError):
        autopar.compile(Renormed(), virtual_mesh(dp=1), example_inputs=(torch.arange(8),), backend="eager", precision="bf16")


def test_a_copy_and_a_dtype_that_were_asked_for_are_kept() -> None:
    class Copies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            copy = h.to(h.device, torch.float32, copy=True)
            copy.mul_(3.0)
            exact = ((h.to(h.device, torch.float32) + 1000.0) - 1000.0).square().mean()
            return (copy * h).mean() + exact

    torch.manual_seed(0)
    model, x = Copies(), torch.randn(8, 4)
    parallel = autopar.compile(model, virtual_mesh(dp=2), example_inputs=(x,), backend="eager", precision="bf16")
    torch.testing.assert_close(parallel(x), model(x), rtol=0.02, atol=1e-3)


class Convolved(nn.Module):
    """Over what a transposition leaves, which a fake GPU does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(6, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).square().mean()


@pytest.mark.parametrize("trains", [True, False])
def test_a_convolution_of_strided_operands_is_cast(trains: bool) -> None:
    x = torch.randn(4, 5, 6)
    with torch.set_grad_enabled(trains):
        parallel = autopar.compile(Convolved(), virtual_mesh(dp=2), example_inputs=(x,), backend="eager", precision="bf16")
        assert parallel.verify(x)
    (node,) = [each for each in parallel.compiled.forward.graph.nodes if "conv" in str(each.target)]
    assert {operand.meta["val"].dtype for operand in node.all_input_nodes} == {torch.bfloat16}


@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTMCell, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_what_is_one_kernel_on_a_gpu_computes_in_the_lower_dtype(kind: type[nn.Module], backend: str) -> None:
    class Stepped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.cell = nn.Embedding(8, 4), kind(4, 4)

        def forward(self, ids: Tensor) -> Tensor:
            found = self.cell(self.embedding(ids))
            return (found[0] if isinstance(found, tuple) else found).square().mean()

    torch.manual_seed(0)
    ids = torch.randint(0, 8, (4,) if "Cell" in kind.__name__ else (4, 4))
    parallel = autopar.compile(Stepped(), virtual_mesh(dp=2), example_inputs=(ids,), backend=backend, precision="bf16")
    assert parallel.verify(ids)
    products = [each for each in parallel.compiled.forward.graph.nodes if str(each.target).startswith(("aten.lstm", "aten.gru"))]
    assert products and all(each.meta["val"].dtype == torch.bfloat16 for node in products for each in node.all_input_nodes)


@pytest.mark.parametrize(
    "update",
    [
        lambda mean, h: mean.lerp_(h.mean(0), 0.1),
        lambda mean, h: mean.mul_(0.9).add_(h.mean(0), alpha=0.1),
        lambda mean, h: mean.addcmul_(h.mean(0), h.mean(0)),
        lambda mean, h: mean.copy_(torch.lerp(mean, h.mean(0), 0.1)),
    ],
    ids=["lerp_", "add_", "addcmul_", "lerp"],
)
def test_what_is_written_into_keeps_its_dtype(update: Callable[[Tensor, Tensor], Any]) -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.register_buffer("mean", torch.full((4,), 1.0 + 2.0**-12))

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            with torch.no_grad():
                update(self.mean, h)
            return (h - self.mean).square().mean()

    torch.manual_seed(0)
    model, x = Running(), torch.randn(8, 4)
    parallel = autopar.compile(model, virtual_mesh(dp=2), example_inputs=(x,), backend="eager", precision="bf16")
    assert parallel.verify(x, promote=True)
    reference = copy.deepcopy(model)
    wanted = reference(x)
    torch.testing.assert_close(parallel(x), wanted, rtol=0.02, atol=1e-3)
    assert model.mean.dtype == torch.float32
    torch.testing.assert_close(model.mean, reference.mean, rtol=0, atol=8e-3)
