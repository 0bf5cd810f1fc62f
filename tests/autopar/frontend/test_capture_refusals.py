"""What cannot be captured is refused with the user's line and a way out; what is captured leaves the model as it was."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils import parametrize as named_here

import autopar
from autopar.errors import CaptureError, ModelError
from autopar.frontend.capture import capture
from tests.support.models.language import SIZES, decoder
from tests.support.models.layer import MESH, Layer, X, assert_as_model, of


def branch(self: Layer, x: Tensor) -> Tensor:
    y = self.linear(x)
    if y.sum() > 0:
        return y.sum()
    return y.mean()


def item(self: Layer, x: Tensor) -> Tensor:
    return self.linear(x).sum() * x.sum().item()


def boolean_index(self: Layer, x: Tensor) -> Tensor:
    return self.linear(x)[x > 0].sum()


def graph_break(self: Layer, x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return self.linear(x).sum()


def numpy_call(self: Layer, x: Tensor) -> Tensor:
    return self.linear(torch.from_numpy(x.numpy() * 2)).sum()


REFUSALS: dict[Callable[..., Tensor], tuple[str, str]] = {
    branch: ("if y.sum() > 0", "torch.where"),
    item: ("x.sum().item()", "decide it before the call"),
    boolean_index: ("self.linear(x)[x > 0]", "mask with torch.where"),
    graph_break: ("graph_break()", "move it out of forward"),
    numpy_call: ("torch.from_numpy", "move it out of forward"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compute", REFUSALS, ids=lambda compute: compute.__name__)
def test_what_cannot_be_captured_names_the_users_line_and_a_way_out(compute: Callable[..., Tensor]) -> None:
    code, fix = REFUSALS[compute]
    with pytest.raises(CaptureError) as caught:
        of(compute, X)
    message = str(caught.value)
    where = next(line for line in message.splitlines() if line.strip().startswith("where:"))
    assert f"{__file__}:" in where and code in where, message
    what, _, mend, torchs = message.splitlines()
    assert what.startswith("Layer cannot be captured as one graph: "), message
    assert mend.startswith("  how to mend it: ") and fix in mend and torchs.startswith("  torch says: "), message


def test_printing_in_forward_is_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    def compute(self: Layer, x: Tensor) -> Tensor:
        print("a shape:", x.shape)
        return self.linear(x).sum()

    assert [item.kind for item in of(compute, X).signature.outputs] == ["loss"]


def test_a_disabled_autocast_is_no_matter() -> None:
    def compute(self: Layer, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            y = self.linear(x)
        return y.square().sum()

    assert_as_model(Layer(compute), (X,), {})


class Opaque:
    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


def test_a_loss_inside_an_unknown_class_is_refused() -> None:
    with pytest.raises(CaptureError, match="Opaque is no structure that torch can take apart"):
        of(lambda self, x: Opaque(self.linear(x).sum()), X)


def test_outputs_are_loss_or_all() -> None:
    with pytest.raises(CaptureError, match="returns no scalar"):
        of(lambda self, x: self.linear(x), X, outputs="loss")
    with pytest.raises(CaptureError, match="'everything' is neither"):
        of(lambda self, x: self.linear(x), X, outputs="everything")


class Caching(nn.Module):
    """Makes its mask and its scales at the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.mask: Tensor | None = None
        self.scales: dict[int, Tensor] = {}
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.mask is None:
            self.mask = torch.tril(torch.ones(4, 4))
        if 4 not in self.scales:
            self.scales[4] = torch.full((4,), 2.0)
        return ((self.linear(x) @ self.mask) * self.scales[4]).sum()


def test_what_forward_keeps_on_its_modules_is_as_before_the_capture() -> None:
    model = nn.Sequential(Caching())
    caching, scales = model[0], model[0].scales
    program = capture(model, (X,), {}, MESH)
    assert caching.mask is None and caching.scales is scales and not scales and caching.num_calls == 0
    expected = model(X)
    (loss,) = program.module()(*model.state_dict(keep_vars=True).values(), X)
    torch.testing.assert_close(loss, expected)
    assert type(caching.mask) is Tensor and caching.mask.shape == (4, 4)


def test_attributes_are_kept_when_the_capture_fails() -> None:
    def compute(module: Layer, x: Tensor) -> Tensor:
        module.made = x + 1
        return module.linear(x) if x.sum().item() > 0 else x

    model = Layer(compute)
    with pytest.raises(CaptureError):
        capture(model, (X,), {}, MESH)
    assert not hasattr(model, "made")


def other_data(self: Layer, x: Tensor) -> Tensor:
    self.linear.weight.data = self.linear.weight.data * 0.5
    return self.linear(x).sum()


def other_data_of_an_input(self: Layer, x: Tensor) -> Tensor:
    x.data = x * 0.5
    return self.linear(x).sum()


def other_data_inside(self: Layer, x: Tensor) -> Tensor:
    y = self.linear(x)
    y.data = y.data * 2
    return y.sum()


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (other_data, "writes into parameter 'linear.weight'"),
        (other_data_of_an_input, "writes into its batch input 0"),
        (other_data_inside, "mutate tensor data attribute"),
    ],
)
def test_other_data_for_a_tensor_is_refused_with_its_line(compute: Callable[[Layer, Tensor], Tensor], expected: str) -> None:
    with pytest.raises(CaptureError, match=r"test_capture_refusals.py:\d+") as caught:
        autopar.compile(Layer(compute), autopar.virtual_mesh(dp=2), example_inputs=(X,), backend="eager")
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda x: x.sum(), "of type function, but must be an instance of torch.nn.Module.*Put a function into the forward"),
        (nn.Linear(4, 4).forward, "of type method, but must be an instance of torch.nn.Module"),
        (nn.Linear, "the class Linear, but must be an instance"),
        (None, "of type NoneType"),
        (
            torch.compile(nn.Linear(4, 4)),
            "OptimizedModule, which wraps a model; pass the model itself: the one that torch.compile was given",
        ),
        (nn.DataParallel(nn.Linear(4, 4)), r"DataParallel, which wraps a model; pass the model itself: model\.module"),
        (autopar.compile(nn.Linear(4, 4), MESH), "ParallelModule.*the one that autopar.compile was given"),
    ],
)
def test_what_is_no_model_is_refused(model: Any, expected: str) -> None:
    with pytest.raises(ModelError, match=expected) as caught:
        autopar.compile(model, MESH)
    assert isinstance(caught.value, TypeError)


def test_experts_visited_one_by_one_are_refused_with_the_setting_that_helps() -> None:
    sizes = SIZES | {"num_hidden_layers": 1, "num_key_value_heads": 2, "num_local_experts": 4}
    case = decoder(transformers.MixtralConfig, experts_implementation="eager", **sizes)
    with pytest.raises(CaptureError) as caught:
        capture(case.model, (), case.batch, MESH)
    assert "modeling_mixtral.py" in str(caught.value) and 'model.set_experts_implementation("grouped_mm")' in str(caught.value)
    case.model.set_experts_implementation("grouped_mm")
    capture(case.model, (), case.batch, MESH)


def test_numbers_that_forward_changes_are_named(caplog: pytest.LogCaptureFixture) -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls, self.scale = nn.Linear(4, 4), 0, 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return (self.linear(x) * self.calls * self.scale).square().mean()

    model = Counted()
    with caplog.at_level(logging.WARNING, "autopar"):
        capture(model, (torch.randn(2, 4),), {}, MESH)
    assert "calls (0 → 1)" in caplog.text and "scale" not in caplog.text and model.calls == 0


class Scaled(nn.Module):
    """Scales by a tensor that asks for its gradient, held as `held` says, and read as it is or `detached`."""

    def __init__(self, held: str, detached: bool = False) -> None:
        super().__init__()
        scale = torch.ones(4, requires_grad=True)
        self.linear, self.held, self.detached = nn.Linear(4, 4), held, detached
        self.outside = lambda: scale
        if held == "buffer":
            self.register_buffer("scale", scale)
        elif held != "closure":
            self.scale = [scale] if held == "list" else scale

    def forward(self, x: Tensor) -> Tensor:
        scale = self.outside() if self.held == "closure" else self.scale[0] if self.held == "list" else self.scale
        return (self.linear(x) * (scale.detach() if self.detached else scale)).sum()


CALLED = {
    "attribute": "the tensor 'inner.scale'",
    "list": "the tensor 'inner.scale'",
    "buffer": "the buffer 'inner.scale'",
    "closure": "a tensor that is held outside of the model",
}


@pytest.mark.parametrize("held", CALLED)
def test_a_tensor_that_asks_for_its_gradient_is_refused_where_it_is_no_parameter(held: str) -> None:
    model = nn.Sequential()
    model.add_module("inner", Scaled(held))
    with pytest.raises(CaptureError) as caught:
        capture(model, (X,), {}, MESH)
    what, where, mend = str(caught.value).splitlines()
    assert what.startswith(f"{CALLED[held]} requires grad and is no nn.Parameter"), what
    assert f"{__file__}:" in where and "self.linear(x) * " in where
    assert "self.w = nn.Parameter(w)" in mend and "requires_grad_(False)" in mend and ".detach()" in mend
    with torch.no_grad():
        capture(model, (X,), {}, MESH)


@pytest.mark.parametrize("held", CALLED)
def test_a_tensor_that_asks_for_its_gradient_and_is_detached_is_a_constant(held: str) -> None:
    assert autopar.compile(Scaled(held, detached=True), MESH, backend="eager").verify(X)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_weight_that_a_hook_computes_of_parameters_is_no_leaf() -> None:
    model = Layer(lambda layer, x: layer.linear(x).square().sum())
    torch.nn.utils.weight_norm(model.linear)
    assert_as_model(model, (X,), {})


@pytest.mark.parametrize("kind", ["buffer", "parameter"])
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_sparse_tensors_of_the_model_are_refused(kind: str) -> None:
    model = Layer(lambda layer, x: torch.sparse.mm(layer.adjacency, layer.linear(x)).sum())
    if kind == "buffer":
        model.register_buffer("adjacency", torch.eye(8).to_sparse())
    else:
        model.adjacency = nn.Parameter(torch.eye(8).to_sparse())
    with pytest.raises(CaptureError, match=rf"the {kind} 'adjacency' of the model is of layout torch\.sparse_coo.*\.to_dense\(\)"):
        capture(model, (X,), {}, MESH)


def test_a_sparse_buffer_that_nobody_reads_is_no_matter() -> None:
    model = Layer(lambda layer, x: layer.linear(x).sum())
    model.register_buffer("adjacency", torch.eye(8).to_sparse())
    assert capture(model, (X,), {}, MESH).signature.outputs_of("loss")


SEEN: list[Tensor] = []


def test_globals_that_forward_changes_are_named(caplog: pytest.LogCaptureFixture) -> None:
    def compute(layer: Layer, x: Tensor) -> Tensor:
        y = layer.linear(x)
        SEEN.append(y.detach())
        return y.sum()

    with caplog.at_level(logging.WARNING, "autopar"):
        of(compute, X)
        SEEN.clear()
        of(lambda layer, x: layer.linear(x).sum(), X)
    (text,) = caplog.messages
    assert "forward changes globals, which a call of the captured program leaves as they are" in text and f"SEEN of {__name__}" in text


def test_globals_of_a_library_are_its_own_by_a_name_of_the_users_too(caplog: pytest.LogCaptureFixture) -> None:
    def compute(layer: Layer, x: Tensor) -> Tensor:
        with named_here.cached():  # counts in a global of its own
            return layer.linear(x).sum()

    with caplog.at_level(logging.WARNING, "autopar"):
        of(compute, X)
    assert caplog.messages == []


def _is_said_of_combinations() -> bool:
    """Since 2.15 torch makes combinations by ops of which shapes are known."""
    try:
        return torch.combinations(torch.empty(4, device="meta")).shape != (6, 2)
    except NotImplementedError:
        return True


@pytest.mark.skipif(not _is_said_of_combinations(), reason="torch captures torch.combinations")
def test_an_op_that_goes_by_values_inside_is_said() -> None:
    with pytest.raises(CaptureError, match=r"aten\.combinations\.default goes by the values of a tensor inside.*(?s:.*)triu_indices"):
        of(lambda layer, x: torch.combinations(layer.linear(x)[0]).prod(1).sum(), X)


@pytest.mark.skipif(_is_said_of_combinations(), reason="torch does not capture torch.combinations")
@pytest.mark.parametrize("repeats", [False, True])
def test_combinations_are_captured_where_torch_makes_them_by_ops(repeats: bool) -> None:
    model = Layer(lambda layer, x: torch.combinations(layer.linear(x)[0], with_replacement=repeats).prod(1).sum())
    parallel = autopar.compile(model, autopar.virtual_mesh(dp=2), example_inputs=(X,), backend="eager")
    assert parallel.verify(X) and parallel.verify(X.flip(0)) and parallel.verify(X, promote=True)
