"""Capture: what a program says of the model it came from, and how what cannot be captured is refused."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.checks.checker import check
from autopar.driver.compiled import TENSOR
from autopar.errors import CaptureError
from autopar.frontend.capture import capture
from autopar.ir.keys import SOURCE
from autopar.ir.program import Form, Program
from autopar.passes.global_.trace_joint import TraceJoint
from autopar.runtime._torch import AllocatorLog
from tests.support.models.layer import MESH, Layer, X, Y, assert_as_model, of
from tests.support.models.zoo import ZOO
from tests.support.programs import assert_close, inputs_of, run, run_forward


class Named(nn.Module):
    """Arguments that a caller may name in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor | None = None, scale: float = 1.0, **others: Tensor) -> Tensor:
        result = self.linear(x) * scale
        result = result if y is None else result - 2 * y
        for name, value in others.items():
            result = result + value * len(name)
        return (result**2).mean()


def signature(program: Program) -> list[str]:
    return [f"{item.kind} {item.name}" for item in program.signature.inputs] + [
        f"→ {item.kind} {item.name}" for item in program.signature.outputs
    ]


@pytest.mark.parametrize("name", ZOO)
def test_the_zoo_is_captured_as_it_is(name: str) -> None:
    case = ZOO[name]()
    case.model.eval()
    inputs = inputs_of(program := capture(case.model, (), case.batch, MESH), case.model, (), case.batch)
    loss = case.model(**case.batch).loss
    names = [item.name for item in program.signature.inputs if item.requires_grad]
    gradients = torch.autograd.grad(loss, [case.model.get_parameter(name) for name in names])
    wanted = {("loss", "0"): loss.detach()} | {("gradient", name): value for name, value in zip(names, gradients, strict=True)}
    assert_close(run_forward(program, inputs), wanted, 1e-10)
    unnamed = [node for node in program.graph.nodes if node.op == "call_function" and not SOURCE[node].file]
    assert len(unnamed) <= 2, unnamed


def test_inputs_come_in_the_order_parameters_buffers_constants_batch() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.norm = nn.BatchNorm1d(4)
            self.table = torch.arange(4.0)

        def forward(self, x: Tensor) -> Tensor:
            return (self.norm(self.linear(x)) * self.table * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum()

    program = capture(Model(), (X,), {}, MESH)
    kinds = [item.kind for item in program.signature.inputs]
    assert kinds == sorted(kinds, key=["parameter", "buffer", "constant", "batch"].index)
    assert {"linear.weight", "linear.bias", "norm.weight", "norm.bias"} == {item.name for item in program.signature.inputs_of("parameter")}
    assert [value.tolist() for value in program.constants.values()] == [[0, 1, 2, 3], [1, 2, 3, 4]]
    assert program.form is Form.FORWARD
    for item, node in program.named_inputs():
        assert tuple(node.meta["val"].shape) == item.shape and node.meta["val"].dtype == item.dtype


def test_the_same_tensor_twice_stays_two_inputs() -> None:
    program = capture(Named(), (), {"x": X, "y": X}, MESH)
    assert [item.name for item in program.signature.inputs_of("batch")] == ["0", "1"]
    model = Named()
    assert_as_model(model, (), {"x": X, "y": Y}, program)


@pytest.mark.parametrize("order", [("x", "y"), ("y", "x"), ("zeta", "x", "alpha"), ("alpha", "y", "zeta", "x")])
def test_batch_inputs_are_numbered_as_the_call_is_flattened(order: tuple[str, ...]) -> None:
    kwargs = {name: torch.randn(8, 4) for name in order}
    assert_as_model(Named(), (), kwargs)


def test_leaves_that_are_no_tensors_count() -> None:
    model = Named()
    program = capture(model, (X, None), {"scale": 3.0, "other": Y}, MESH)
    leaves = pytree.tree_leaves(((X, None), {"scale": 3.0, "other": Y}))
    assert [leaves[int(item.name)] is X or leaves[int(item.name)] is Y for item in program.signature.inputs_of("batch")] == [True, True]
    assert_as_model(model, (X, None), {"scale": 3.0, "other": Y}, program)


def test_nested_inputs() -> None:
    model = Layer(lambda self, batch, pair: (self.linear(batch["b"]) + pair[0] * batch["a"] - pair[1]["c"]).square().sum())
    args = ({"b": X, "a": Y}, (torch.randn(8, 1), {"c": torch.randn(4)}))
    program = capture(model, args, {}, MESH)
    assert [item.batch_dim for item in program.signature.inputs_of("batch")] == [0, 0, 0, None]
    assert_as_model(model, args, {}, program)


Pair = namedtuple("Pair", "loss y")


@dataclass
class Result:
    y: Tensor
    loss: Tensor
    note: str = "as it is"


OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], tuple[Any, ...], str]] = {
    "scalar": (lambda y: y.sum(), (TENSOR,), "0"),
    "dict": (lambda y: {"y": y, "loss": y.sum(), "n": 3}, (TENSOR, TENSOR, 3), "1"),
    "named tuple": (lambda y: Pair(y.sum(), y), (TENSOR, TENSOR), "0"),
    "dataclass": (lambda y: Result(y, y.sum()), (TENSOR, TENSOR, "as it is"), "1"),
    "model output": (lambda y: transformers.modeling_outputs.MaskedLMOutput(loss=y.sum(), logits=y), (TENSOR, TENSOR), "0"),
    "logits, loss": (lambda y: (y, y.sum()), (TENSOR, TENSOR), "1"),
    "a list": (lambda y: [y, None, y.sum(), y.argmax()], (TENSOR, None, TENSOR, TENSOR), "2"),
    "nested": (lambda y: {"a": (y, None), "loss": y.sum()}, (TENSOR, None, TENSOR), "2"),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_output_structures(name: str) -> None:
    make, leaves, index = OUTPUTS[name]
    program = of(lambda self, x: make(self.linear(x)), X)
    assert program.signature.leaves == leaves
    assert [(item.kind, item.name, item.shape) for item in program.signature.outputs] == [("loss", index, ())]
    rebuilt = pytree.tree_unflatten(list(leaves), program.signature.structure)
    assert type(rebuilt) is type(make(X)) or name == "scalar"
    if name != "scalar":
        whole = of(lambda self, x: make(self.linear(x)), X, outputs="all")
        tensors = [str(place) for place, leaf in enumerate(leaves) if leaf is TENSOR]
        wanted = [("loss" if each == index else "output", each) for each in tensors]
        assert [(item.kind, item.name) for item in whole.signature.outputs] == wanted


def test_without_a_loss_every_tensor_is_an_output() -> None:
    program = of(lambda self, x: (self.linear(x), [x, 5]), X)
    assert [(item.kind, item.name, item.shape) for item in program.signature.outputs] == [("output", "0", (8, 4)), ("output", "1", (8, 4))]
    assert program.signature.leaves == (TENSOR, TENSOR, 5)


def test_without_gradients_what_lies_beside_the_loss_is_kept_but_for_a_cache() -> None:
    case = ZOO["gpt2"]()
    case.model.config.use_cache = True
    with torch.no_grad():
        program = capture(case.model, (), case.batch, MESH)
        alone = capture(case.model, (), case.batch, MESH, outputs="loss")
    assert [(item.kind, item.name) for item in program.signature.outputs] == [("loss", "0"), ("output", "1")]
    assert program.signature.outputs[1].shape[:2] == case.batch["input_ids"].shape
    assert [item.kind for item in alone.signature.outputs] == ["loss"]


@pytest.mark.parametrize("name", ["dict", "named tuple", "dataclass", "model output", "logits, loss"])
def test_without_gradients_outputs_have_their_places(name: str) -> None:
    make, leaves, index = OUTPUTS[name]
    with torch.no_grad():
        program = of(lambda self, x: make(self.linear(x)), X)
    tensors = [str(place) for place, leaf in enumerate(leaves) if leaf is TENSOR]
    assert [(item.kind, item.name) for item in program.signature.outputs] == [
        ("loss" if each == index else "output", each) for each in tensors
    ]


def test_of_two_scalars_none_is_the_loss() -> None:
    program = of(lambda self, x: (self.linear(x).sum(), self.linear(x).mean()), X)
    assert [item.kind for item in program.signature.outputs] == ["output", "output"]


def test_a_loss_per_sample_is_an_output_like_others() -> None:
    program = of(lambda self, x: {"loss": self.linear(x).sum(1)}, X)
    assert [item.kind for item in program.signature.outputs] == ["output"]


def test_a_cache_beside_the_loss_is_left_out() -> None:
    case = ZOO["gpt2"]()
    case.model.config.use_cache = True
    program = capture(case.model, (), case.batch, MESH)
    assert [item.kind for item in program.signature.outputs] == ["loss"]
    assert set(program.signature.leaves) == {TENSOR}


@pytest.mark.parametrize("trains", [True, False])
def test_without_a_loss_a_cache_is_left_out_too(trains: bool) -> None:
    case = ZOO["gpt2"]()
    case.model.config.use_cache = True
    ids = {"input_ids": case.batch["input_ids"]}
    with torch.set_grad_enabled(trains):
        program = capture(case.model, (), ids, MESH)
        with pytest.raises(CaptureError, match="use_cache=False"):
            capture(case.model, (), ids, MESH, outputs="all")
    assert [(item.kind, item.name) for item in program.signature.outputs] == [("output", "0")]
    assert program.signature.outputs[0].shape[:2] == case.batch["input_ids"].shape


def test_tied_frozen_and_unused_parameters() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(12, 4)
            self.frozen = nn.Linear(4, 4)
            self.frozen.requires_grad_(False)
            self.unused = nn.Linear(4, 4)
            self.head = nn.Linear(4, 12, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids: Tensor) -> Tensor:
            return F.cross_entropy(self.head(self.frozen(self.table(ids))), ids)

    model, ids = Model(), torch.randint(0, 12, (8,))
    program = capture(model, (ids,), {}, MESH)
    assert signature(program) == ["parameter table.weight", "parameter frozen.weight", "parameter frozen.bias", "batch 0", "→ loss 0"]
    assert [item.requires_grad for item in program.signature.inputs] == [True, False, False, False]
    assert_as_model(model, (ids,), {}, program)
    with torch.device("meta"):
        empty = Model()
    empty.head.weight = empty.table.weight
    assert signature(capture(empty, (ids,), {}, MESH)) == signature(program)


@pytest.mark.parametrize("training", [True, False])
def test_buffers_mutated_in_forward(training: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double().train(training)
    x = torch.randn(8, 4, dtype=torch.float64)
    program = capture(model, (x,), {}, MESH, outputs="all")
    before = {name: value.clone() for name, value in model.named_buffers()}
    mutated = ["1.num_batches_tracked", "1.running_mean", "1.running_var"] if training else []
    joint = TraceJoint(training).apply(program)
    assert sorted(item.name for item in joint.signature.outputs_of("buffer")) == mutated
    found = run(joint, inputs_of(joint, model, (x,), {}))
    assert all(torch.equal(before[name], value) for name, value in model.named_buffers()), "capture changed the model"
    with torch.no_grad():
        torch.testing.assert_close(found["output", "0"], model(x))
    for name in mutated:
        torch.testing.assert_close(found["buffer", name], model.get_buffer(name))


def test_capture_leaves_modes_and_generators_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    state = torch.get_rng_state()
    with torch.no_grad():
        capture(model, (X,), {}, MESH)
        assert not torch.is_grad_enabled()
    assert torch.equal(state, torch.get_rng_state())
    assert model.training and all(parameter.grad is None for parameter in model.parameters())


def test_evaluation_is_another_program() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).eval()
    program = capture(model, (X,), {}, MESH)
    inputs = inputs_of(program, model, (X,), {})
    torch.testing.assert_close(run_forward(program, inputs)["output", "0"], model(X).detach())


def test_a_region_without_gradients() -> None:
    def compute(self: Layer, x: Tensor) -> Tensor:
        with torch.no_grad():
            fixed = self.linear(x)
            factor = fixed * 2
        return (self.linear(x) * factor + fixed).square().sum()

    assert_as_model(Layer(compute), (X,), {})


def test_constants_made_in_forward_are_detached_out_of_place() -> None:
    """Dynamo detaches what `torch.tensor` makes in place, which no view allows."""

    def scaled(self: Layer, x: Tensor) -> Tensor:
        return (self.linear(x) / torch.sqrt(torch.tensor(x.size(-1), dtype=torch.float))).sum()

    program = of(scaled, X)
    assert not [node for node in program.graph.nodes if "detach_." in str(node.target)]
    check(program)
    assert_as_model(Layer(scaled), (X,), {})


def test_batch_dims() -> None:
    def dims(**options: Any) -> list[int | None]:
        program = of(
            lambda self, x, table, step: (self.linear(x) + table[0] + step).sum(), X, torch.randn(3, 4), torch.tensor(1.0), **options
        )
        return [item.batch_dim for item in program.signature.inputs_of("batch")]

    assert dims() == [0, None, None]
    assert dims(batch_dims={0: 1, 1: 1}) == [1, 1, None]
    assert dims(batch_dims={}) == [None, None, None]


def test_values_are_on_the_cpu_and_sources_are_the_users() -> None:
    program = of(lambda self, x: self.linear(x).relu().sum(), X)
    for node in program.graph.nodes:
        if node.op == "call_function":
            assert node.meta["val"].device.type == "cpu"
            assert SOURCE[node].file == __file__, SOURCE[node]
            assert "self.linear(x).relu().sum()" in SOURCE[node].code
    assert any(SOURCE[node].module == "linear" for node in program.graph.nodes if node.op == "call_function")


class OfFour(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(4, 3) * 2


def test_what_others_export_is_checked_by_torch_after_a_capture() -> None:
    capture(OfFour(), (torch.ones(4, 3),), {}, MESH)
    with pytest.raises(CaptureError):
        capture(OfFour(), (torch.ones(4, 2),), {}, MESH)
    with pytest.raises(Exception, match="Constraints violated"):
        torch.export.export(OfFour(), (torch.ones(4, 3),), dynamic_shapes={"x": {0: torch.export.Dim("n")}}, strict=True)


def test_parameters_are_not_copied() -> None:
    """Dynamo would copy each twice, and torch.export hold the copies while it traces."""
    model = nn.Linear(2048, 2048, bias=False)
    with AllocatorLog() as log:
        capture(model, (torch.zeros(2, 2048),), {}, MESH)
    assert max(size for _, size in log.events) < 2048 * 2048 * 4


def test_what_asks_for_a_parameter_itself_gets_a_copy() -> None:
    @torch.compiler.assume_constant_result
    def size(value: Tensor) -> int:
        value.detach().zero_()
        return value.numel()

    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) / size(self.weight)

    model = Scaled(4, 4)
    before = model.weight.detach().clone()
    capture(model, (torch.randn(2, 4),), {}, MESH)
    assert model.weight.equal(before)


class WithHidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.linear(x)
        return hidden.square().mean(), hidden


@pytest.mark.parametrize(("outputs", "is_said"), [(None, True), ("loss", False), ("all", False)])
def test_outputs_that_are_left_out_are_named(caplog: pytest.LogCaptureFixture, outputs: str | None, is_said: bool) -> None:
    with caplog.at_level("INFO", logger="autopar"):
        capture(WithHidden(), (torch.randn(4, 4),), {}, MESH, outputs)
    assert ('and not 1: outputs="all" computes all' in caplog.text) == is_said
