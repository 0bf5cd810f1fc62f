"""Models with many equal layers are captured by few of them; what comes out is what a capture of all gives."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
import autopar.captured
from autopar import CaptureError, virtual_mesh
from autopar.frontend.capture import capture
from autopar.ir.keys import SOURCE
from autopar.ir.printing import print_program
from autopar.ir.program import Program
from autopar.ir.source import module_calls
from benchmarks.golden import ZOO
from tests.support.models.zoo import Batch

LAYERS = 9
MESH = virtual_mesh(dp=1)


def by_layers(model: nn.Module, batch: Batch) -> Program:
    """As a compile captures it."""
    return autopar.captured._captured(model, (), dict(batch), MESH, None, _batch_dims(batch))


def _batch_dims(batch: Batch) -> dict[int, int]:
    return dict.fromkeys(range(len(batch)), 0)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    """Why all layers were captured; nothing where a few were."""
    caplog.set_level(logging.INFO, "autopar")
    return lambda: "\n".join(each for each in caplog.messages if "captured one by one" in each)


def assert_equal(found: Program, whole: Program) -> None:
    assert print_program(found) == print_program(whole)
    assert found.signature == whole.signature
    for node, other in zip(found.graph.nodes, whole.graph.nodes, strict=True):
        assert (node.name, SOURCE.get(node), node.meta.get("stack_trace")) == (other.name, SOURCE.get(other), other.meta.get("stack_trace"))
        if node.op == "call_function":
            assert list(module_calls(node)) == list(module_calls(other))


@pytest.mark.equivalence
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_a_program_of_few_layers_written_out_is_that_of_all(name: str, said: Callable[[], str]) -> None:
    case = ZOO[name](num_layers=LAYERS)
    found = by_layers(case.model, case.batch)
    assert not said()
    assert_equal(found, capture(case.model, (), dict(case.batch), MESH, None, _batch_dims(case.batch)))


@pytest.mark.equivalence
def test_dropout_is_drawn_in_each_layer(said: Callable[[], str]) -> None:
    case = ZOO["gpt2"](num_layers=LAYERS, dropout=0.1)
    found = by_layers(case.model, case.batch)
    assert not said()
    assert_equal(found, capture(case.model, (), dict(case.batch), MESH, None, _batch_dims(case.batch)))


@pytest.mark.equivalence
def test_evaluation_without_gradients(said: Callable[[], str]) -> None:
    case = ZOO["llama"](num_layers=LAYERS)
    case.model.eval()
    with torch.no_grad():
        found = by_layers(case.model, case.batch)
        assert not said()
        assert_equal(found, capture(case.model, (), dict(case.batch), MESH, None, _batch_dims(case.batch)))


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.linear = number, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    """The user's own: what it computes between layers is up to a test."""

    def __init__(self, around: Callable[[Net, Layer, Tensor], Tensor], num_layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(number) for number in range(num_layers))
        self.around = around

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = self.around(self, layer, x)
        return {"loss": x.square().mean()}


def plain(net: Net, layer: Layer, x: Tensor) -> Tensor:
    return layer(x)


def one_differs(net: Net, layer: Layer, x: Tensor) -> Tensor:
    return layer(x * 2 if layer.number == 6 else x)


def by_their_number(net: Net, layer: Layer, x: Tensor) -> Tensor:
    return layer(x / len(net.layers))


def scaled_by_place(net: Net, layer: Layer, x: Tensor) -> Tensor:
    return layer(x) / (layer.number + 1)


def the_fifth_twice(net: Net, layer: Layer, x: Tensor) -> Tensor:
    return net.layers[4](layer(x)) if layer.number == 8 else layer(x)


@pytest.mark.parametrize("around", [one_differs, by_their_number, scaled_by_place, the_fifth_twice])
def test_layers_that_are_not_alike_are_all_captured(around: Callable[..., Tensor], said: Callable[[], str]) -> None:
    model, batch = Net(around), {"x": torch.zeros(2, 4)}
    found = by_layers(model, batch)
    assert "layers are captured one by one" in said()
    assert_equal(found, capture(model, (), dict(batch), MESH, None, {0: 0}))


class InPlace(Layer):
    """Says by nothing but when it runs which value it reads."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2).add_(torch.tanh(self.linear(x.clone())))


class InPlaceNet(nn.Module):
    def __init__(self, variant: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(InPlace, range(LAYERS)))
        self.variant = variant

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = x.clone()
        order = list(range(len(self.layers)))
        if self.variant == "another order":
            order[4:] = order[:3:-1]
        for number in order:
            self.layers[number](x)
            if number == 3 and self.variant == "written behind the fourth":
                x.mul_(3)
        return {"loss": x.square().mean()}


@pytest.mark.parametrize("variant", ["", "another order", "written behind the fourth"])
def test_what_is_written_in_place_between_layers_and_in_which_order(variant: str, said: Callable[[], str]) -> None:
    model, batch = InPlaceNet(variant), {"x": torch.zeros(2, 4)}
    found = by_layers(model, batch)
    assert ("do not all do the same" in said()) == bool(variant)
    assert_equal(found, capture(model, (), dict(batch), MESH, None, {0: 0}))


class Borrows(Layer):
    """Where it has a lender, reads the weight of that."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * vars(self).get("lender", self).linear.bias


@pytest.mark.parametrize(("reader", "lender"), [(0, 1), (0, 3), (1, 3)])
def test_the_first_layers_read_no_later_ones(reader: int, lender: int, said: Callable[[], str]) -> None:
    model, batch = Net(plain), {"x": torch.zeros(2, 4)}
    model.layers = nn.ModuleList(map(Borrows, range(LAYERS)))
    vars(model.layers[reader])["lender"] = model.layers[lender]
    found = by_layers(model, batch)
    assert said()
    assert_equal(found, capture(model, (), dict(batch), MESH, None, {0: 0}))


def test_a_frozen_layer_is_no_other_layer(said: Callable[[], str]) -> None:
    model, batch = Net(plain), {"x": torch.zeros(2, 4)}
    model.layers[5].requires_grad_(False)
    found = by_layers(model, batch)
    assert said()
    frozen = [item.name for item in found.signature.inputs_of("parameter") if not item.requires_grad]
    assert frozen == ["layers.5.linear.weight", "layers.5.linear.bias"]


def test_shared_weights_are_one_parameter(said: Callable[[], str]) -> None:
    model, batch = Net(plain), {"x": torch.zeros(2, 4)}
    model.layers[7].linear.weight = model.layers[4].linear.weight
    found = by_layers(model, batch)
    assert said()
    assert len(found.signature.inputs_of("parameter")) == 2 * LAYERS - 1


def test_a_hook_on_one_layer_is_traced(said: Callable[[], str]) -> None:
    model, batch = Net(plain), {"x": torch.zeros(2, 4)}
    model.layers[6].register_forward_hook(lambda layer, args, output: output * 3)
    found = by_layers(model, batch)
    assert "hooks" in said()
    assert sum("mul" in node.name for node in found.graph.nodes) == 1


def test_the_model_has_all_its_layers_afterwards(said: Callable[[], str]) -> None:
    model = Net(plain)
    before = list(model.layers)
    by_layers(model, {"x": torch.zeros(2, 4)})
    assert not said()
    assert list(model.layers) == before


def test_what_capture_refuses_it_refuses_still() -> None:
    def asks(net: Net, layer: Layer, x: Tensor) -> Tensor:
        return layer(x if x.sum() > 0 else -x)

    model = Net(asks)
    with pytest.raises(CaptureError):
        by_layers(model, {"x": torch.zeros(2, 4)})
    assert len(model.layers) == LAYERS


@pytest.mark.equivalence
def test_what_runs_is_exact(said: Callable[[], str]) -> None:
    case = ZOO["llama"](num_layers=LAYERS)
    parallel = autopar.compile(case.model, virtual_mesh(pp=2, tp=2), example_inputs=dict(case.batch), backend="eager")
    assert not said()
    assert parallel.verify(**case.batch)
