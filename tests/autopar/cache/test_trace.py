"""What a model does: equal lines for equal models, others wherever anything that a program depends on is another."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar.cache.describe import NotKnown
from autopar.cache.trace import Trace, traced
from autopar.frontend.capture import capture
from autopar.ir.mesh import virtual_mesh

SCALE = 2.0


@dataclass
class Config:
    """Read by forward alone."""

    heads: int = 2
    power: float = 1.0
    literal: float = 1.0
    has_bias: bool = True
    detaches: bool = False
    freezes: bool = False
    forgets: bool = False
    order: tuple[str, ...] = ("loss", "logits")
    dropout: float = 0.1
    name: str = "relu"
    keeps_shape: bool = True


class Net(nn.Module):
    def __init__(self, config: Config, width: int = 8) -> None:
        super().__init__()
        self.config = config
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 16), nn.Linear(16, width)
        self.drop = nn.Dropout(config.dropout)
        self.mean = nn.Buffer(torch.zeros(width))

    def forward(self, x: Tensor, y: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        config = self.config
        x = self.norm(x).unflatten(-1, (config.heads, -1)).transpose(0, 1).transpose(0, 1).flatten(1)
        hidden = getattr(F, config.name)(F.linear(x, self.up.weight, self.up.bias if config.has_bias else None)) ** config.power
        hidden = hidden.data if config.forgets else hidden
        if config.detaches:
            hidden = hidden + hidden.detach() - hidden.detach()
        with torch.set_grad_enabled(not config.freezes and torch.is_grad_enabled()):
            logits = self.down(self.drop(hidden)) * SCALE * scale * torch.tensor(config.literal) + self.mean
        results = {"loss": F.mse_loss(logits, y), "logits": logits if config.keeps_shape else logits.flatten()}
        return {name: results[name] for name in config.order}


def of(model: nn.Module | None = None, samples: int = 4, dtype: torch.dtype = torch.float32, **options: Any) -> Trace:
    batch = {"x": torch.ones(samples, 8, dtype=dtype), "y": torch.ones(samples, 8, dtype=dtype)}
    return traced(model or Net(Config()), (), batch | options)


def test_equal_models_do_the_same() -> None:
    assert of().lines == of().lines
    assert any(line.startswith("aten.native_dropout") or line.startswith("aten.bernoulli") for line in of().lines)


def changed(model: nn.Module, change: Callable[[Any], Any]) -> nn.Module:
    change(model)
    return model


CHANGES: dict[str, Callable[[], Trace]] = {
    "dropout p": lambda: of(Net(Config(dropout=0.2))),
    "p set later": lambda: of(changed(Net(Config()), lambda model: setattr(model.drop, "p", 0.3))),
    "eps": lambda: of(changed(Net(Config()), lambda model: setattr(model.norm, "eps", 1e-6))),
    "heads": lambda: of(Net(Config(heads=4))),
    "an exponent": lambda: of(Net(Config(power=2.0))),
    "a literal": lambda: of(Net(Config(literal=3.0))),
    "a branch": lambda: of(Net(Config(has_bias=False))),
    "a function by name": lambda: of(Net(Config(name="sigmoid"))),
    "a gradient stopped": lambda: of(Net(Config(detaches=True))),
    "data in place of the value": lambda: of(Net(Config(forgets=True))),
    "a part without gradients": lambda: of(Net(Config(freezes=True))),
    "the order of outputs": lambda: of(Net(Config(order=("logits", "loss")))),
    "an output left out": lambda: of(Net(Config(order=("loss",)))),
    "the shape of an output": lambda: of(Net(Config(keeps_shape=False))),
    "evaluation": lambda: of(Net(Config()).eval()),
    "one module in evaluation": lambda: of(changed(Net(Config()), lambda model: model.norm.eval())),
    "batch size": lambda: of(samples=8),
    "dtype": lambda: of(Net(Config()).double(), dtype=torch.float64),
    "an argument that is no tensor": lambda: of(scale=3.0),
    "a frozen parameter": lambda: of(changed(Net(Config()), lambda model: model.up.weight.requires_grad_(False))),
    "a buffer in place of a parameter": lambda: of(changed(Net(Config()), buffered)),
    "a subclass": lambda: of(Subclass(Config())),
    "a layer of another class": lambda: of(changed(Net(Config()), lambda model: setattr(model, "drop", AlsoDropout(0.1)))),
}


class Subclass(Net):
    pass


class AlsoDropout(nn.Dropout):
    pass


def buffered(model: Any) -> None:
    value = model.norm.bias.detach()
    del model.norm.bias
    model.norm.bias = nn.Buffer(value)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_what_a_model_does_is_seen(change: str) -> None:
    assert CHANGES[change]().lines != of().lines


def test_a_changed_global_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = of()
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert of().lines != before.lines


def test_tied_parameters_are_seen() -> None:
    plain, tied = (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2))
    tied[1].weight = tied[0].weight
    assert traced(plain, (torch.ones(2, 8),), {}).lines != traced(tied, (torch.ones(2, 8),), {}).lines


def test_values_of_parameters_and_inputs_are_none_of_it() -> None:
    model = Net(Config())
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    assert of(model).lines == of().lines


class Crossing(nn.Module):
    """Ops, shapes and lines are the same whatever `order` says."""

    def __init__(self, order: tuple[int, int]) -> None:
        super().__init__()
        self.order, self.first, self.second = order, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        values = x.sin(), y.sin(), self.first(x), self.second(x)
        return values[self.order[0]] - values[self.order[1]]


@pytest.mark.parametrize("order", [(1, 0), (2, 3), (0, 0)])
@pytest.mark.parametrize("is_grad_enabled", [True, False])
def test_which_operand_is_which_is_seen(order: tuple[int, int], is_grad_enabled: bool) -> None:
    batch = (torch.ones(2, 8), torch.ones(2, 8))
    with torch.set_grad_enabled(is_grad_enabled):
        assert traced(Crossing((0, 1)), batch, {}).lines != traced(Crossing(order), batch, {}).lines


def test_autocast_is_seen() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert of().lines != CHANGES["dropout p"]().lines
        lines = of().lines
    assert lines != of().lines


SOURCE = """
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return helped(self.layer(x)).sum()


def helped(x):
    return x * 1.0
"""


def imported(file: Path, source: str) -> nn.Module:
    file.write_text(source)
    names: dict[str, Any] = {"__name__": "written"}
    exec(compile(source, str(file), "exec"), names)
    return names["Model"]()


@pytest.mark.parametrize(
    "old, new",
    [
        ("x * 1.0", "x * 1.5"),
        ("x * 1.0", "x + 1.0"),
        ("x * 1.0", "x * 1.0  # as it is"),
        ("def helped", "# one line further down\ndef helped"),
        ("def helped(x):", "def helped(x, unused=None):"),
    ],
)
def test_a_changed_line_is_seen(tmp_path: Path, old: str, new: str) -> None:
    file = tmp_path / "written.py"
    before = traced(imported(file, SOURCE), (torch.ones(2, 8),), {})
    assert traced(imported(file, SOURCE), (torch.ones(2, 8),), {}).lines == before.lines
    assert traced(imported(file, SOURCE.replace(old, new)), (torch.ones(2, 8),), {}).lines != before.lines


def test_code_that_was_imported_before_its_file_changed_is_not_taken_for_the_new_one(tmp_path: Path) -> None:
    file = tmp_path / "written.py"
    model, changed_source = imported(file, SOURCE), SOURCE.replace("helped(self.layer(x))", "helped(self.layer(x), )")
    file.write_text(changed_source.replace("x * 1.0", "1.0 * x"))
    old = traced(model, (torch.ones(2, 8),), {})
    new = traced(imported(file, changed_source.replace("x * 1.0", "1.0 * x")), (torch.ones(2, 8),), {})
    assert old.lines != new.lines


def hooked() -> nn.Module:
    model = Net(Config())
    model.up.register_forward_hook(lambda module, args, output: output * 2)
    return model


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


@torch.library.custom_op("cached_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Plain(nn.Module):
    def __init__(self, compute: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.compute, self.table, self.calls = nn.Linear(8, 8), compute, torch.ones(8), 0

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, self.layer(x))


def counted(model: Any, x: Tensor) -> Tensor:
    model.calls += 1
    return x


def with_a_hook(model: Any, x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: 2 * gradient)
    return x


def with_a_hook_on_a_node(model: Any, x: Tensor) -> Tensor:
    assert x.grad_fn is not None
    x.grad_fn.register_hook(lambda *gradients: None)
    return x


def with_packed(model: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda each: 2 * each, lambda each: each):
        return x.sigmoid()


def seeded(model: Any, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return F.dropout(x, 0.5)


REFUSED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "an autograd function": lambda model, x: Doubled.apply(x),
    "an op of the user's": lambda model, x: doubled(x),
    "a hook of a tensor": with_a_hook,
    "a hook of a node": with_a_hook_on_a_node,
    "hooks of what is saved": with_packed,
    "a checkpoint": lambda model, x: checkpoint(torch.sigmoid, x, use_reentrant=False),
    "a tensor that is neither parameter nor buffer": lambda model, x: x * model.table,
    "a counter": counted,
    "a seed": seeded,
    "a draw of Python's": lambda model, x: x if random.random() < 2 else -x,
    "a draw of numpy's": lambda model, x: x if numpy.random.rand() < 2 else -x,
    "a generator": lambda model, x: x * torch.rand(8, generator=torch.Generator()),
    "a buffer of Python's": lambda model, x: x * torch.frombuffer(bytearray(32), dtype=torch.float32),
    "a leaf made inside": lambda model, x: x * torch.ones(8, requires_grad=True),
    "values read": lambda model, x: x if x.sum() > 0 else -x,
    "a sparse tensor": lambda model, x: x.to_sparse().to_dense(),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_ops_do_not_say_is_refused(what: str) -> None:
    with pytest.raises(NotKnown):
        traced(Plain(REFUSED[what]), (torch.ones(2, 8),), {})


def caught(model: Any, x: Tensor) -> Tensor:
    try:
        return x * model.table
    except Exception:
        return x * model.layer.bias


def test_what_is_refused_is_so_where_the_model_catches_it() -> None:
    with pytest.raises(NotKnown):
        traced(Plain(caught), (torch.ones(2, 8),), {})


def test_modules_with_hooks_are_refused() -> None:
    with pytest.raises(NotKnown, match="hooks"):
        of(hooked())


def test_a_default_device_is_refused() -> None:
    with torch.device("cpu"), pytest.raises(NotKnown, match="mode"):
        of()


def test_arguments_of_unknown_classes_are_refused() -> None:
    with pytest.raises(NotKnown, match="Config"):
        of(scale=Config())


def test_nothing_of_the_model_is_changed() -> None:
    model = Plain(lambda model, x: x)
    model.register_buffer("seen", torch.zeros(()))
    model.compute = lambda model, x: model.seen.add_(1) + x
    before = {name: value.clone() for name, value in model.state_dict().items()}
    traced(model, (torch.ones(2, 8),), {})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# As code does that imports the function itself.
is_dynamo_compiling = torch.compiler.is_dynamo_compiling


def test_who_asks_hears_that_it_is_exported() -> None:
    asked: list[bool] = []

    def ask(model: Any, x: Tensor) -> Tensor:
        asked.append(torch.compiler.is_compiling() and torch.compiler.is_exporting() and is_dynamo_compiling())
        return x

    traced(Plain(ask), (torch.ones(2, 8),), {})
    assert asked == [True] and not torch.compiler.is_exporting() and not is_dynamo_compiling()


def test_a_capture_of_the_same_is_found() -> None:
    batch = {"x": torch.ones(4, 8), "y": torch.ones(4, 8)}
    program = capture(Net(Config()), (), batch, virtual_mesh(dp=2))
    assert of().is_done_by(program)
    assert not of(Net(Config(power=2.0))).is_done_by(program)
    assert of().is_done_by(capture(Net(Config()), (), batch, virtual_mesh(dp=2), outputs="all"))
