"""A traced forward leaves its modules as they were; hooks that it installs may stay for the trace that follows."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from autopar.frontend.attributes import attributes_kept, others, tensors_of


class Writer(nn.Module):
    """Writes attributes and into containers at every call, and installs a hook at the first."""

    def __init__(self, hooks: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.hooks = hooks
        self.installed = False
        self.count, self.seen, self.table = 0, [1], {"a": 1}
        self.cached: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.hooks and not self.installed:
            self.linear.register_forward_hook(lambda module, args, output: output * 2)
            self.installed = True
        self.count += 1
        self.seen.append(2)
        self.table["b"] = 2
        self.cached = x
        return self.linear(x)


def state(model: Writer) -> tuple[Any, ...]:
    return model.count, list(model.seen), dict(model.table), model.cached, model.installed, len(model.linear._forward_hooks)


def test_everything_is_given_back() -> None:
    model = Writer(hooks=True)
    before, seen = state(model), model.seen
    with attributes_kept(model):
        model(torch.ones(2, 4))
        assert state(model) != before
    assert state(model) == before and model.seen is seen


def test_hooks_and_their_flags_may_stay() -> None:
    model = Writer(hooks=True)
    with attributes_kept(model):
        with attributes_kept(model, but_hooks=True):
            first = model(torch.ones(2, 4))
        assert state(model) == (0, [1], {"a": 1}, None, True, 1)
        assert torch.equal(model(torch.ones(2, 4)), first)
    assert state(model) == (0, [1], {"a": 1}, None, False, 0)


def test_flags_without_hooks_are_given_back() -> None:
    model = Writer()
    with attributes_kept(model, but_hooks=True):
        model.installed = True
    assert not model.installed


def test_what_was_written_is_named() -> None:
    model = nn.Sequential(Writer(hooks=True), nn.Linear(4, 4))
    with attributes_kept(model, but_hooks=True) as written:
        model(torch.ones(2, 4))
    assert written == {"0.count", "0.seen", "0.table", "0.cached"}
    with attributes_kept(model) as written:
        model[1](torch.ones(2, 4))
    assert not written


def test_tensors_beside_parameters_and_buffers_are_found_and_compared_as_objects() -> None:
    model = nn.Sequential(Writer(), nn.BatchNorm1d(4))
    one, other = torch.ones(4), torch.ones(4)
    model[0].cached, model[0].seen, model[0].table = one, [one, 1], {"b": other}
    before = tensors_of(model)
    assert {path: list(map(id, tensors)) for path, tensors in before.items()} == {
        "0.cached": [id(one)],
        "0.seen": [id(one)],
        "0.table": [id(other)],
    }
    model[0].cached, model[0].table["b"] = other, one
    assert others(before, tensors_of(model)) == {"0.cached", "0.table"}
    model[0].seen.clear()
    assert others(before, tensors_of(model)) == {"0.cached", "0.seen", "0.table"}


class Plain:
    """No module."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.deeper: Any = None
        self.memory = torch.ones(4)
        self.calls = 0


class Holder(nn.Module):
    """Writes into plain objects that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.plain, self.others = nn.Linear(4, 4), Plain(), (Plain(),)
        self.others[0].deeper = Plain()

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        self.plain.state = h
        self.others[0].deeper.deeper = h
        self.others[0].deeper.seen.append((1, h))
        self.plain.seen = [{"h": h}]
        self.plain.memory = h.detach()
        self.plain.calls += 1
        return h


def test_plain_objects_lose_the_tensors_of_a_trace_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = Holder()
    kept, memory = model.plain.seen, model.plain.memory
    with attributes_kept(model) as written, FakeTensorMode(allow_non_fake_inputs=True):
        model(torch.randn(2, 4))
    assert not hasattr(model.plain, "state") and model.plain.seen is kept and model.plain.memory is memory
    deeper = model.others[0].deeper
    assert deeper.deeper is None and deeper.seen == [] and model.plain.calls == 1
    assert written == {"plain.state", "plain.seen", "plain.memory", "others.0.deeper.deeper", "others.0.deeper.seen"}
    assert "plain.memory" in caplog.text and "state" not in caplog.text and "as they were" in caplog.text
    with attributes_kept(model) as written:
        model(torch.randn(2, 4))
    assert hasattr(model.plain, "state") and not written  # of a call that is no trace all stays


class Answering:
    """Answers for what it does not have, as a proxy does."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"nobody looks for {name}")


class State(NamedTuple):
    hidden: Any


class Remembering(nn.Module):
    """Has memories in containers of a plain object, and in one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.plain, self.proxy, self.table = nn.Linear(4, 4), Plain(), Answering(), {"key": torch.ones(4)}
        self.plain.seen = [torch.ones(4)]
        self.plain.deeper = {"key": torch.ones(4), "value": torch.ones(4), "queue": deque([torch.ones(4)], maxlen=1)}

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        self.plain.seen[0] = self.plain.deeper["key"] = self.table["key"] = h
        self.plain.deeper["queue"].append(h)
        self.plain.state = State(h)
        return h


def test_memories_in_containers_are_named_and_keep_their_order(caplog: pytest.LogCaptureFixture) -> None:
    model = Remembering()
    seen, table = list(model.plain.seen), dict(model.plain.deeper)
    with attributes_kept(model) as written, FakeTensorMode(allow_non_fake_inputs=True):
        model(torch.randn(2, 4))
    assert model.plain.seen[0] is seen[0] and list(model.plain.deeper) == ["key", "value", "queue"] and not hasattr(model.plain, "state")
    assert all(model.plain.deeper[name] is value for name, value in table.items()) and not table["queue"][0].requires_grad
    assert written == {"plain.seen", "plain.state", "plain.deeper.key", "plain.deeper.queue", "table"}
    assert all(name in caplog.text for name in ("plain.seen", "plain.deeper.key", "plain.deeper.queue")) and "table" not in caplog.text
