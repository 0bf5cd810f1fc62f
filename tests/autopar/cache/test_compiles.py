"""A capture is read where all that a capture could look at is the same: each way to change a model is one in which none may be read."""

from __future__ import annotations

import enum
import functools
import importlib
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.cache.compiles import Call, CompileCache
from autopar.cache.folder import Folder
from autopar.frontend.capture import capture
from autopar.ir.mesh import virtual_mesh
from autopar.ir.printing import print_program
from autopar.ir.program import Program
from autopar.passes.global_.trace_joint import trace_joint

HERE: ModuleType = sys.modules[__name__]
MESH = virtual_mesh(dp=2)
SCALE, TABLE = 2.0, {"scale": 2.0, "more": [1, {"deep": 3}]}
CONSTANT, NOTED = torch.arange(4.0), list[int]()


class MissedError(Exception):
    """The model would have been captured."""


def _missed() -> Program:
    raise MissedError


def call_of(model: nn.Module, *args: Any, **kwargs: Any) -> Call:
    return Call(model, args or (torch.randn(8, 4),), kwargs, MESH, "all", None)


def kept(folder: Path, call: Call) -> Program:
    """What is captured, and kept in `folder` where that can be."""
    make = functools.partial(capture, call.model, call.args, call.kwargs, call.mesh, call.outputs, call.batch_dims)
    return CompileCache(Folder(folder)).captured(call, make)


def is_read(folder: Path, call: Call) -> bool:
    try:
        CompileCache(Folder(folder)).captured(call, _missed)
    except MissedError:
        return False
    return True


# ---- what models are made of


def helper(x: Tensor) -> Tensor:
    return x * 2


def other_helper(x: Tensor) -> Tensor:
    return x * 3


def decorated(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def call(*args: Any) -> Tensor:
        return function(*args) + 1

    return call


@decorated
def decorated_helper(x: Tensor) -> Tensor:
    return helper(x)


@functools.lru_cache(maxsize=8)
def cached_number(key: int) -> float:
    return key * SCALE


class Kind(enum.Enum):
    PLUS = "plus"


@dataclass
class Config:
    scale: float = 2.0
    layers: list[Any] = field(default_factory=lambda: [{"scale": [1.0, 2.0]}])
    kind: Kind = Kind.PLUS


class Pair(NamedTuple):
    first: float
    second: float


class Base(nn.Module):
    factor = 2.0

    def __init__(self, forward: Callable[[Any, Tensor], Tensor] | None = None, **attributes: Any) -> None:
        super().__init__()
        self.linear, self.config = nn.Linear(4, 4), Config()
        self.drop = nn.Dropout(0.5)
        self.computed = forward
        for name, value in attributes.items():
            setattr(self, name, value)


class Model(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.computed(self, self.drop(self.linear(x)))  # type: ignore[misc]


class Returns(Base):
    def scaled(self, x: Tensor) -> Tensor:
        return x * self.factor

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.linear(x))


def scaled_otherwise(self: Any, x: Tensor) -> Tensor:
    return x * 5


def with_default(x: Tensor, scale: float = 2.0) -> Tensor:
    return x * scale


def of_closure(scale: float) -> Callable[[Any, Tensor], Tensor]:
    return lambda self, x: x * scale


def times(x: Tensor, factor: float) -> Tensor:
    return x * factor


def set_cell(function: Any, value: Any) -> None:
    function.__closure__[0].cell_contents = value


def hooked() -> nn.Module:
    model = Returns()
    model.linear.register_forward_hook(lambda module, args, output: output * 2)
    return model


def more_hooks(model: Any) -> None:
    model.linear._forward_hooks.clear()
    model.linear.register_forward_hook(lambda module, args, output: output * 3)


def tie(model: Any) -> None:
    model.other.weight = model.linear.weight


def two_layers() -> nn.Module:
    return Model(lambda self, x: self.other(x), other=nn.Linear(4, 4))


# (the model, what is changed of it)
CHANGES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "a global": (lambda: Model(lambda self, x: x * SCALE), lambda model: setattr(HERE, "SCALE", 3.0)),
    "an entry of a global dict": (lambda: Model(lambda self, x: x * TABLE["scale"]), lambda model: TABLE.update(scale=3.0)),
    "deep in a global": (lambda: Model(lambda self, x: x * TABLE["more"][1]["deep"]), lambda model: TABLE["more"][1].update(deep=4)),
    "a global tensor": (lambda: Model(lambda self, x: x + CONSTANT), lambda model: CONSTANT.add_(1)),
    "a function": (lambda: Model(lambda self, x: helper(x)), lambda model: setattr(HERE, "helper", other_helper)),
    "behind a decorator": (lambda: Model(lambda self, x: decorated_helper(x)), lambda model: setattr(HERE, "helper", other_helper)),
    "behind a cache": (lambda: Model(lambda self, x: x * cached_number(3)), lambda model: setattr(HERE, "SCALE", 3.0)),
    "code of a function": (lambda: Model(lambda self, x: helper(x)), lambda model: setattr(helper, "__code__", other_helper.__code__)),
    "a default": (lambda: Model(lambda self, x: with_default(x)), lambda model: setattr(with_default, "__defaults__", (3.0,))),
    "a default of a lambda": (lambda: Model(lambda self, x, by=2.0: x * by), lambda model: setattr(model.computed, "__defaults__", (3.0,))),
    "a field of a named tuple": (
        lambda: Model(lambda self, x: x * self.pair.second, pair=Pair(1.0, 2.0)),
        lambda model: setattr(model, "pair", Pair(1.0, 3.0)),
    ),
    "a closure": (lambda: Model(of_closure(2.0)), lambda model: set_cell(model.computed, 3.0)),
    "an argument of a partial": (
        lambda: Model(lambda self, x: self.by(x), by=functools.partial(times, factor=2.0)),
        lambda model: setattr(model, "by", functools.partial(times, factor=3.0)),
    ),
    "a number": (lambda: Model(lambda self, x: x * self.number, number=2.0), lambda model: setattr(model, "number", 3.0)),
    "the type of a number": (lambda: Model(lambda self, x: x * self.number, number=2), lambda model: setattr(model, "number", 2.0)),
    "a config": (lambda: Model(lambda self, x: x * self.config.scale), lambda model: setattr(model.config, "scale", 3.0)),
    "lists in a config": (
        lambda: Model(lambda self, x: x * self.config.layers[0]["scale"][1]),
        lambda model: model.config.layers[0]["scale"].append(3.0),
    ),
    "a tensor that is no buffer": (lambda: Model(lambda self, x: x + self.table, table=torch.ones(4)), lambda model: model.table.add_(1)),
    "a hook": (hooked, more_hooks),
    "one hook more": (hooked, lambda model: model.linear.register_forward_pre_hook(lambda module, args: (args[0] + 1,))),
    "an attribute of a base class": (Returns, lambda model: setattr(Base, "factor", 3.0)),
    "a method of a class": (Returns, lambda model: setattr(Returns, "scaled", scaled_otherwise)),
    "a method of one object": (Returns, lambda model: setattr(model, "scaled", MethodType(scaled_otherwise, model))),
    "a forward of one object": (Returns, lambda model: setattr(model.linear, "forward", lambda x: x * 3)),
    "a method by its name": (
        lambda: Returns.__class__ and Model(lambda self, x: getattr(self, "scal" + "ed")(x), scaled=helper),
        lambda model: setattr(model, "scaled", other_helper),
    ),
    "a function of torch": (lambda: Model(lambda self, x: F.gelu(x)), lambda model: setattr(F, "gelu", F.relu)),
    "a method of torch's Linear": (Returns, lambda model: setattr(nn.Linear, "forward", lambda self, x: x @ self.weight)),
    "the mode of a submodule": (lambda: Model(of_closure(2.0)), lambda model: model.drop.eval()),
    "what is trained": (Returns, lambda model: model.linear.bias.requires_grad_(False)),
    "a tie": (two_layers, tie),
    "the precision of products": (Returns, lambda model: torch.set_float32_matmul_precision("medium")),
    "attention's backends": (Returns, lambda model: torch.backends.cuda.enable_math_sdp(False)),
    "the default dtype": (Returns, lambda model: torch.set_default_dtype(torch.float64)),
    "deterministic algorithms": (Returns, lambda model: torch.use_deterministic_algorithms(True)),
    "the environment": (
        lambda: Model(lambda self, x: x * float(os.environ.get("AUTOPAR_TEST_SCALE", "2"))),
        lambda model: os.environ.update(AUTOPAR_TEST_SCALE="3"),
    ),
}


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Any:
    """All that a case may change is as it was afterwards."""
    for holder, name in ((HERE, "SCALE"), (HERE, "helper"), (Base, "factor"), (Returns, "scaled"), (F, "gelu"), (nn.Linear, "forward")):
        monkeypatch.setattr(holder, name, vars(holder)[name])
    monkeypatch.setattr(HERE, "TABLE", json.loads(json.dumps(TABLE)))
    monkeypatch.setattr(HERE, "CONSTANT", CONSTANT.clone())
    monkeypatch.setenv("AUTOPAR_TEST_SCALE", "2")
    function, codes, defaults, precision = helper, helper.__code__, with_default.__defaults__, torch.get_float32_matmul_precision()
    cached_number.cache_clear()
    yield
    function.__code__, with_default.__defaults__ = codes, defaults
    torch.set_float32_matmul_precision(precision)
    torch.backends.cuda.enable_math_sdp(True)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)


# Models of which no description says all, and a word of the reason.
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "the clock": (lambda: Model(lambda self, x: x * asked(time.time)), "time"),
    "a random number": (lambda: Model(lambda self, x: x * asked(random.random)), "random"),
    "the state of a file": (lambda: Model(lambda self, x: x * asked(lambda: Path(__file__).exists())), "reads a file"),
    "an identity": (lambda: Model(lambda self, x: x * asked(lambda: id(SCALE) % 7)), "id"),
    "the whole environment": (lambda: Model(lambda self, x: x * asked(lambda: len(dict(os.environ)))), "environment"),
    "a file": (lambda: Model(lambda self, x: x * asked(lambda: len(Path(__file__).read_text()))), "reads a file"),
    "a module that is handed on": (lambda: Model(lambda self, x: of_module(HERE, x)), "handed on"),
    "a module in an attribute": (lambda: Model(lambda self, x: x * self.module.SCALE, module=HERE), "handed on"),
    "a module looked into by name": (lambda: Model(lambda self, x: x * getattr(HERE, "SCA" + "LE")), "at hand"),
    "globals": (lambda: Model(lambda self, x: x * asked(lambda: globals()["SCALE"])), "globals"),
    "a global that is assigned": (lambda: Model(counted), "changes"),
    "a list that grows": (lambda: Model(lambda self, x: x * (NOTED.append(1) or 1)), "changes"),
    "an object that raises": (lambda: Model(lambda self, x: x * 2, odd=Odd()), "RuntimeError"),
    "a lock": (lambda: Model(lambda self, x: x * 2, lock=threading.Lock()), "lock"),
    "an op of the user's": (lambda: Model(lambda self, x: torch.ops.autopar_test_cache.twice(x)), "autopar_test_cache"),
    "a backward of the user's": (lambda: Model(lambda self, x: Twice.apply(x)), "no op"),
}


@torch.compiler.assume_constant_result
def asked(question: Callable[[], float]) -> float:
    """What Dynamo would refuse to look into."""
    return question()


class Odd:
    def __getattribute__(self, name: str) -> Any:
        if name == "__dict__":
            raise RuntimeError("nobody may look")
        return super().__getattribute__(name)


def of_module(module: Any, x: Tensor) -> Tensor:
    return x * module.SCALE


def counted(self: Any, x: Tensor) -> Tensor:
    global SCALE
    SCALE = SCALE + 0.0
    return x * SCALE


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


@torch.library.custom_op("autopar_test_cache::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


twice.register_fake(lambda x: torch.empty_like(x))


@pytest.mark.parametrize("name", REFUSED)
def test_what_nobody_can_describe_is_captured_every_time(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make, word = REFUSED[name]
    model = make()
    kept(tmp_path, call_of(model))
    assert not is_read(tmp_path, call_of(model)) and not list(tmp_path.iterdir())
    assert "the capture is not kept" in caplog.text and word in caplog.text


def test_a_line_of_a_module_two_modules_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, folder = tmp_path / "source", tmp_path / "compiles"
    source.mkdir()
    monkeypatch.syspath_prepend(source)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    names = ("autopar_far", "autopar_near")
    (source / "autopar_near.py").write_text("import autopar_far\ndef near(x):\n    return autopar_far.far(x)\n")

    def model(line: str) -> nn.Module:
        (source / "autopar_far.py").write_text(f"def far(x):\n    return {line}\n")
        for name in names:
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        near = importlib.import_module("autopar_near").near
        return Model(lambda self, x: near(x))

    kept(folder, call_of(model("x * 2")))
    assert is_read(folder, call_of(model("x * 2")))
    assert not is_read(folder, call_of(model("x * 3")))
    assert not is_read(folder, call_of(model("x * 2  # a comment, which errors quote")))
    for name in names:
        sys.modules.pop(name, None)


def test_other_calls_of_a_model_are_captured_anew(tmp_path: Path) -> None:
    model = Returns()
    kept(tmp_path, call_of(model))
    assert not is_read(tmp_path, call_of(model, torch.randn(6, 4)))
    assert not is_read(tmp_path, call_of(model, torch.randn(8, 4).double()))
    assert not is_read(tmp_path, call_of(model, x=torch.randn(8, 4)))
    assert not is_read(tmp_path, replace(call_of(model), outputs=None))
    assert not is_read(tmp_path, replace(call_of(model), batch_dims={}))
    with torch.no_grad():
        assert not is_read(tmp_path, call_of(model))
    with torch.autocast("cpu"):
        assert not is_read(tmp_path, call_of(model))
    assert is_read(tmp_path, call_of(model))


def test_what_is_read_is_what_was_captured(tmp_path: Path) -> None:
    """Names, lines, constants and outputs, and the joint trace of it; a class of the output is found again."""
    model = Model(lambda self, x: Answer(x + CONSTANT, [x.sum(), None], {"more": 2})).eval()
    first, second = kept(tmp_path, call_of(model)), kept(tmp_path, call_of(model))
    assert print_program(first) == print_program(second) and first.signature == second.signature
    assert all(torch.equal(first.constants[name], second.constants[name]) for name in {**first.constants, **second.constants})
    traces = [CompileCache(Folder(tmp_path)).traced(each, (True,), functools.partial(trace_joint, each, True)) for each in (first, second)]
    assert print_program(traces[0]) == print_program(traces[1]) == print_program(trace_joint(second, True))
    assert traces[0].signature == traces[1].signature
    assert len(list(tmp_path.iterdir())) == 2


@dataclass
class Answer:
    values: Tensor
    more: list[Any]
    names: dict[str, Any]


@pytest.mark.parametrize("name", CHANGES)
def test_what_changed_is_captured_anew(name: str, tmp_path: Path) -> None:
    make, change = CHANGES[name]
    model = make()
    kept(tmp_path, call_of(model))
    assert is_read(tmp_path, call_of(model)), "of the model as it was its capture is read"
    change(model)
    assert not is_read(tmp_path, call_of(model))
