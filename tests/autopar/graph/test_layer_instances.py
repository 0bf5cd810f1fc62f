"""A joint graph of few layers, written out for all, is that of all, call by call: names, shapes, records, numbers of autograd's."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar import virtual_mesh
from autopar.compiler import Options
from autopar.cost.hardware.cluster import Cluster
from autopar.driver.manager import run_passes
from autopar.frontend.capture import capture
from autopar.graph.layer_instances import with_all_layers, with_few_layers
from autopar.graph.layers import SHOWN, LayerRun, NotRepeatedError, run_of
from autopar.ir.keys import PHASE, SOURCE
from autopar.ir.printing import print_program
from autopar.ir.program import Program
from autopar.passes.default_passes import default_passes
from autopar.passes.forward.key_random import number_sites
from autopar.passes.global_ import trace_joint as tracing
from autopar.passes.global_.trace_joint import TraceJoint, trace_joint
from benchmarks.golden import ZOO

LAYERS = 9


def forward_of(name: str, cluster: str, **sizes: object) -> Program:
    """A model of the zoo after the forward passes."""
    case = ZOO[name](num_layers=LAYERS, **sizes)
    captured = capture(case.model, (), dict(case.batch), virtual_mesh(dp=1), None, dict.fromkeys(range(len(case.batch)), 0))
    passes = default_passes(Options(Cluster.named(cluster)), training=True)
    return run_passes(number_sites(captured), passes[: next(n for n, each in enumerate(passes) if isinstance(each, TraceJoint))])


def traced_whole(program: Program, monkeypatch: pytest.MonkeyPatch, training: bool = True) -> Program:
    with monkeypatch.context() as patched:
        patched.setattr(tracing, "run_of", lambda program: None)
        return trace_joint(program, training)


def assert_equal(found: Program, whole: Program) -> None:
    assert print_program(found) == print_program(whole)
    assert found.signature == whole.signature
    numbers: list[list[int]] = [[], []]
    for node, other in zip(found.graph.nodes, whole.graph.nodes, strict=True):
        if node.op != "call_function":
            continue
        assert (node.name, SOURCE[node], PHASE[node]) == (other.name, SOURCE[other], PHASE[other])
        for kept, each in zip(numbers, (node, other), strict=True):
            kept.append(each.meta["seq_nr"])
    first, second = ([number - min(each) for number in each] for each in numbers)
    assert first == second, "calls of forward and backward that belong together"


@pytest.mark.parametrize(("name", "cluster"), [("gpt2", "cpu"), ("llama", "8xH100"), ("bert", "8xH100")])
def test_forward_and_backward(name: str, cluster: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "autopar")
    program = forward_of(name, cluster)
    before = print_program(program)
    found = trace_joint(program, training=True)
    assert not any("all layers are traced" in each for each in caplog.messages)
    assert_equal(found, traced_whole(program, monkeypatch))
    assert print_program(program) == before


def test_forward_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "autopar")
    program = forward_of("llama", "cpu")
    found = trace_joint(program, training=False)
    assert not any("all layers are traced" in each for each in caplog.messages)
    assert_equal(found, traced_whole(program, monkeypatch, training=False))


def test_draws_are_numbered_so_all_layers_are_traced(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "autopar")
    program = forward_of("gpt2", "cpu", dropout=0.1)
    found = trace_joint(program, training=True)
    assert any("all layers are traced" in each for each in caplog.messages)
    assert_equal(found, traced_whole(program, monkeypatch))


class Net(nn.Module):
    """Nine layers, and what a test has of it."""

    def __init__(self, variant: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(LAYERS))
        self.variant = variant

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        kept = x
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if self.variant == "between":
                x = x.tanh()
            if number == 5:
                kept = x
        return {"loss": (x + kept if self.variant == "reads the fifth" else x).square().mean()}


def captured(model: nn.Module) -> Program:
    return capture(model, (), {"x": torch.zeros(2, 4)}, virtual_mesh(dp=1), None, {0: 0})


def test_few_layers_are_the_first_ones() -> None:
    program = captured(Net())
    run = run_of(program)
    assert run == LayerRun("layers", LAYERS)
    few = with_few_layers(program, run)
    assert few.num_nodes == program.num_nodes - (LAYERS - SHOWN)
    assert [item.name for item in few.signature.inputs_of("parameter")] == [
        f"layers.{layer}.{name}" for layer in range(SHOWN) for name in ("weight", "bias")
    ]
    assert print_program(with_all_layers(few, run)) == print_program(program)


@pytest.mark.parametrize(("variant", "reason"), [("between", "stands between two layers"), ("reads the fifth", "of a layer")])
def test_refusals(variant: str, reason: str) -> None:
    program = captured(Net(variant))
    run = run_of(program)
    assert run is not None
    with pytest.raises(NotRepeatedError, match=reason):
        with_few_layers(program, run)


def frozen(model: Net) -> None:
    for layer in model.layers[:5]:
        layer.requires_grad_(False)


def longer(model: Net) -> None:
    model.layers[6].scale = nn.Parameter(torch.randn(7))


def lent(model: Net) -> None:
    vars(model.layers[0])["lender"] = model.layers[6]


class Scaled(nn.Linear):
    """Reads what a parameter of some length adds up to, or that of another layer."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scale = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * vars(self).get("lender", self).scale.sum()


@pytest.mark.parametrize(
    ("change", "reason"),
    [(frozen, "layer 5 are not those of layer 2"), (longer, "layer 6 are not"), (lent, "layer 6 are not|of a layer")],
)
def test_tensors_that_are_not_alike(change: Callable[[Net], None], reason: str) -> None:
    model = Net()
    model.layers = nn.ModuleList(Scaled() for _ in range(LAYERS))
    change(model)
    program = captured(model)
    run = run_of(program)
    assert run is not None
    with pytest.raises(NotRepeatedError, match=reason):
        with_few_layers(program, run)
    found = trace_joint(program, training=True)
    gradients = {item.name: item.shape for item in found.signature.outputs if item.kind == "gradient"}
    trained = {item.name: item.shape for item in program.signature.inputs_of("parameter") if item.requires_grad}
    assert gradients == trained


class PassesOn(nn.Linear):
    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x * scale), self.bias


class PassingNet(nn.Module):
    """The gradient of a layer's bias comes from the backward of the layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))
        self.layers = nn.ModuleList(PassesOn(4, 4) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scale: Tensor = self.scale
        for layer in self.layers:
            x, scale = layer(x, scale)
        return {"loss": (x * scale).square().mean()}


def test_a_gradient_that_another_layer_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    program = captured(PassingNet())
    assert_equal(trace_joint(program, training=True), traced_whole(program, monkeypatch))


def test_few_layers_are_no_run() -> None:
    model = Net()
    model.layers = model.layers[: 2 * SHOWN - 1]
    assert run_of(captured(model)) is None
