from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import ArgumentError, InputError
from autopar.runtime.module.signature import check_arguments


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, target: Tensor, *, weight: float = 1.0) -> Tensor:
        return (self.fc(x) - target).square().mean() * weight


X = torch.ones(4, 4)
WRONG: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    ((), {}, r"does not fit Model.forward\(x, target, weight\): missing 'x', 'target'$"),
    ((X,), {}, "missing 'target'$"),
    ((), {"x": X, "targets": X}, r"missing 'target'; unknown 'targets' \(is 'target' meant\?\)$"),
    ((X, X), {"scale": 2.0}, "unknown 'scale'$"),
    ((X,), {"x": X, "target": X}, "'x' given by position and by name$"),
    ((X, X, 1.0), {}, "3 positional arguments are given, it takes at most 2$"),
]


@pytest.mark.parametrize(("args", "kwargs", "expected"), WRONG)
def test_wrong_arguments_are_named(args: Any, kwargs: Any, expected: str) -> None:
    with pytest.raises(TypeError):
        Model()(*args, **kwargs)
    with pytest.raises(ArgumentError, match=expected):
        check_arguments(Model(), args, kwargs)


def test_a_wrong_call_is_refused_before_anything_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = autopar.compile(Model(), autopar.virtual_mesh(dp=2, tp=2), backend="eager")
    monkeypatch.setattr(parallel, "_capture", lambda *_, **__: pytest.fail("compiled"))
    for kind in (TypeError, InputError):
        with pytest.raises(kind, match="missing 'target'"):
            parallel(X)
    with pytest.raises(ArgumentError, match="unknown 'scale'"):
        autopar.compile(Model(), autopar.virtual_mesh(dp=2), example_inputs={"x": X, "target": X, "scale": 1}, backend="eager")


def test_what_may_take_the_arguments_is_not_refused() -> None:
    check_arguments(Model(), (X,), {"target": X, "weight": 2.0})
    decorated, hooked = Model(), Model()
    forward = decorated.forward

    @functools.wraps(forward)
    def with_target(*args: Any, **kwargs: Any) -> Tensor:
        return forward(*args, target=X, **kwargs)

    decorated.forward = with_target
    check_arguments(decorated, (X,), {})
    hooked.register_forward_pre_hook(lambda module, args: (*args, X))
    check_arguments(hooked, (X,), {})
    parallel = autopar.compile(hooked, autopar.virtual_mesh(dp=2, tp=2), backend="eager")
    torch.testing.assert_close(parallel(X), hooked(X))
