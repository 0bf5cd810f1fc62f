"""A program gets the casts of an autocast as nodes: which, where, and how often."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import CaptureError
from autopar.frontend.capture import capture
from autopar.graph import autocast
from autopar.ir.mesh import virtual_mesh
from autopar.ir.program import Program

BF16 = torch.bfloat16
X = torch.zeros(4, 8)


class Model(nn.Module):
    def __init__(self, compute: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.LayerNorm(8)
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], batch_first: bool) -> None:
        super().__init__()
        self.layers, self.head = kind(8, 16, num_layers=2, batch_first=batch_first, bidirectional=True), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0]).float().square().mean()


def captured(compute: Callable[[Any, Tensor], Tensor], **options: Any) -> Program:
    with torch.autocast("cpu", **({"dtype": BF16} | options)):
        return capture(Model(compute), (X,), {}, virtual_mesh(dp=1), outputs="all")


def text(program: Program) -> list[str]:
    lines = []
    for node in [node for node in program.graph.nodes if node.op == "call_function"]:
        operands = ", ".join(str(operand) for operand in node.all_input_nodes)
        lines.append(f"{str(node.target).split('.')[1]}({operands}) {str(node.meta['val'].dtype).removeprefix('torch.')}")
    return lines


def test_casts_stand_before_the_calls_that_need_them() -> None:
    assert captured(lambda model, x: model.second(model.norm(model.first(x)))).autocast == "cpu"
    assert sorted(text(captured(lambda model, x: model.norm(model.first(x))))) == [
        "_to_copy(input_0) bfloat16",
        "_to_copy(p_first_weight) bfloat16",
        "layer_norm(linear, p_norm_weight, p_norm_bias) bfloat16",
        "linear(_to_copy_default_1, _to_copy_default) bfloat16",
    ]


@pytest.mark.parametrize(("options", "number"), [({}, 1), ({"cache_enabled": False}, 2)])
def test_a_parameter_is_cast_once_where_casts_are_kept(options: dict[str, Any], number: int) -> None:
    lines = text(captured(lambda model, x: model.first(model.first(x)), **options))
    assert lines.count("_to_copy(p_first_weight) bfloat16") == number


def test_two_contexts_cast_a_parameter_twice_and_one_within_another_does_not() -> None:
    def apart(model: Any, x: Tensor) -> Tensor:
        for _ in range(2):
            with torch.autocast("cpu", BF16):
                x = model.first(x)
        return x

    program = capture(Model(apart), (X,), {}, virtual_mesh(dp=1), outputs="all")
    assert text(program).count("_to_copy(p_first_weight) bfloat16") == 2
    assert text(captured(apart)).count("_to_copy(p_first_weight) bfloat16") == 1


def test_a_disabled_context_within_an_enabled_one_casts_nothing() -> None:
    def compute(model: Any, x: Tensor) -> Tensor:
        low = model.first(x)
        with torch.autocast("cpu", enabled=False):
            return model.second(low.float())

    assert text(captured(compute))[-2:] == ["to(linear) float32", "linear(to, p_second_weight) float32"]


def test_what_forward_asks_of_dtypes_is_what_it_is_under_autocast() -> None:
    def compute(model: Any, x: Tensor) -> Tensor:
        low = model.first(x)
        return low + torch.full((8,), torch.finfo(low.dtype).max, dtype=low.dtype)

    program = captured(compute)
    assert program.signature.outputs[0].dtype == BF16
    assert torch.finfo(BF16).max in [argument for node in program.graph.nodes for argument in node.args]


def test_an_output_of_a_region_has_its_dtype() -> None:
    def compute(model: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            return model.first(x)

    assert capture(Model(compute), (X,), {}, virtual_mesh(dp=1), outputs="all").signature.outputs[0].dtype == BF16


def test_contexts_of_other_devices_do_nothing() -> None:
    def compute(model: Any, x: Tensor) -> Tensor:
        with torch.autocast("cuda", BF16):
            return model.first(x)

    program = capture(Model(compute), (X,), {}, virtual_mesh(dp=1), outputs="all")
    assert text(program) == ["linear(input_0, p_first_weight) float32"] and program.autocast is None


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
@pytest.mark.parametrize("batch_first", [False, True])
def test_recurrent_layers_are_taken_apart(kind: type[nn.RNNBase], batch_first: bool) -> None:
    """With samples first torch turns the results round in place, of which a graph has no two shapes."""
    torch.manual_seed(0)
    model, x = Recurrent(kind, batch_first), torch.randn(4, 2, 8) if batch_first else torch.randn(2, 4, 8)
    # oneDNN's LSTM has no bfloat16 on a CPU without AVX-512, where torch itself cannot run the model.
    with torch.backends.mkldnn.flags(enabled=False), torch.autocast("cpu", BF16):
        parallel = autopar.compile(
            model, autopar.virtual_mesh(dp=2), example_inputs=(x,), batch_dims=0 if batch_first else 1, backend="eager"
        )
        assert parallel.verify(x)
        torch.testing.assert_close(parallel(x), model(x), rtol=0.02, atol=0.0)


class Convolutions(nn.Module):
    """Two alike, the first under autocast, of 17 samples with their channels last: torch has other kernels for as many without oneDNN."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 3, 1, 2)
        with torch.autocast("cpu", BF16):
            low = self.first(x)
        return (self.second(x) + low).square().mean()


def test_convolutions_in_and_out_of_a_region_have_strides_of_one_kind() -> None:
    """torch keeps what an op gives on fake tensors: what was asked of one without oneDNN would be found for the other."""
    x = torch.randn(17, 4, 2, 8)
    model = Convolutions()
    parallel = autopar.compile(model, virtual_mesh(tp=2), example_inputs=(x,), backend="eager")
    assert parallel.verify(x)
    torch.testing.assert_close(parallel(x), model(x), rtol=0.02, atol=0.0)


def test_what_cannot_be_cast_is_refused_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autocast, "_OF_A_DEVICE", ("bmm",))  # as if einsum were made of what one kind of device has
    with pytest.raises(CaptureError, match=r"einsum\.default is cast inside, where it is made of aten\.bmm\.default") as refused:
        captured(lambda model, x: torch.einsum("ij,kj->ik", x, model.first.weight))
    assert "where: " in str(refused.value) and "enabled=False" in str(refused.value)


def test_operands_that_a_region_leaves_unlike_are_refused() -> None:
    def compute(model: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            low = model.first(x)
        return model.second(low)

    with pytest.raises(RuntimeError):
        Model(compute)(X)
    with pytest.raises(CaptureError, match=r"here they are bfloat16 and float32\n  where: .*test_fake_values\.py"):
        capture(Model(compute), (X,), {}, virtual_mesh(dp=1), outputs="all")
