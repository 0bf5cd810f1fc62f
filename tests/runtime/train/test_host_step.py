"""Updates on the host: the same numbers, state in host memory, which a user's own state joins; and what is refused."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import AutoparError, OffloadError
from autopar.ir.offload import Offload
from autopar.runtime.offload.memories import HostMemory
from autopar.runtime.offload.state_files import StateFiles
from autopar.runtime.train.host_step import MAX_WAITING, HostStep
from tests.support.forks import in_a_fork

CPU = torch.device("cpu")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, amsgrad=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
}


def pair() -> tuple[nn.Module, nn.Module]:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    with torch.no_grad():  # strides of its own
        model[0].weight.set_(torch.randn(5, 7).t())
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("in_files", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_is_the_same_update(name: str, in_files: bool, tmp_path: Path) -> None:
    plain, other = pair()
    optimizers = [OPTIMIZERS[name](model.parameters()) for model in (plain, other)]
    host = HostMemory(CPU)
    part = HostStep(optimizers[1], "element", host, StateFiles(tmp_path) if in_files else None)
    for _ in range(3):
        for model in (plain, other):
            model.zero_grad()
            model(torch.ones(2, 5)).square().mean().backward()
        versions = [each._version for each in other.parameters()]
        optimizers[0].step()
        for each in list(other.parameters())[::-1]:  # one by one, more than may wait
            part.step([each])
            each.grad = None
        part.finish()
        assert all(each._version > before for each, before in zip(other.parameters(), versions, strict=True))
    for one, two in zip(plain.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
        for key, value in optimizers[0].state[one].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(optimizers[1].state[two][key]))
    assert MAX_WAITING >= 2 and host.used_bytes == 0 and not part.state_tensors()
    assert set(map(id, optimizers[1].state)) == set(map(id, other.parameters()))


@pytest.mark.parametrize("in_files", [False, True])
def test_what_the_user_writes_holds(in_files: bool, tmp_path: Path) -> None:
    plain, other = pair()
    first, second = (OPTIMIZERS["momentum"](model.parameters()) for model in (plain, other))
    part = HostStep(second, "element", HostMemory(CPU), StateFiles(tmp_path) if in_files else None)
    for number in range(3):
        for model in (plain, other):
            model.zero_grad()
            model(torch.ones(2, 5)).square().mean().backward()
            model[0].weight.data.mul_(0.5)  # leaves no trace
            optimizer = first if model is plain else second
            for each in model.parameters():
                if number == 1:
                    optimizer.state[each]["momentum_buffer"] = torch.full_like(each, 0.25)
                if number == 2:
                    optimizer.state[each]["momentum_buffer"].mul_(0.5)
        first.step()
        part.step(list(other.parameters()))
        part.finish()
    assert all(torch.equal(one, two) for one, two in zip(plain.parameters(), other.parameters(), strict=True))


def test_damage_and_forks_are_told(tmp_path: Path) -> None:
    model = nn.Linear(5, 7)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    part = HostStep(optimizer, "element", HostMemory(CPU), StateFiles(tmp_path))

    def update() -> None:
        for each in model.parameters():
            each.grad = torch.ones_like(each)
        part.step(list(model.parameters()))
        part.finish()

    def in_the_child() -> str:
        with pytest.raises(OffloadError, match="state lies in files of process .* forked off: train there"):
            update()
        return "told"

    update()
    before = model.weight.detach().clone()
    assert in_a_fork(in_the_child) == "told"
    optimizer.state[model.weight]["momentum_buffer"].numpy()[0, 0] = 7.0
    with pytest.raises(OffloadError, match=r"the momentum_buffer of a parameter of shape \[7, 5\] came back damaged"):
        update()
    assert torch.equal(model.weight, before)


def test_what_goes_wrong_is_raised_at_the_end() -> None:
    model, _ = pair()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    part = HostStep(optimizer, "element", HostMemory(CPU))
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    optimizer.register_step_pre_hook(lambda *args: 1 / 0)
    part.step(list(model.parameters()))
    with pytest.raises(ZeroDivisionError):
        part.finish()


def test_where_one_update_fails_the_others_are_over_before_it_is_told() -> None:
    model, _ = pair()
    parameters, optimizer = list(model.parameters()), OPTIMIZERS["momentum"](model.parameters())
    part, before = HostStep(optimizer, "element", HostMemory(CPU)), [each.detach().clone() for each in model.parameters()]
    calls: list[int] = []

    def first_fails(*args: Any) -> None:
        calls.append(len(calls))
        time.sleep(0.05)
        if len(calls) == 1:
            raise ZeroDivisionError

    optimizer.register_step_pre_hook(first_fails)
    for each in parameters[:3]:
        each.grad = torch.ones_like(each)
        part.step([each])
    with pytest.raises(ZeroDivisionError):
        part.finish()
    assert calls == [0, 1, 2]
    assert [torch.equal(one, two) for one, two in zip(parameters, before, strict=True)] == [True, False, False, True]
    part.finish()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_lies_on_the_host_is_updated_there(name: str) -> None:
    plain, other = pair()
    optimizers = [OPTIMIZERS[name](model.parameters()) for model in (plain, other)]
    host = HostMemory(CPU)
    part = HostStep(optimizers[1], "element", host, offload=Offload(parameters="host"))
    places = [each.data_ptr() for each in other.parameters()]
    for _ in range(3):
        for model in (plain, other):
            model.zero_grad()
            model(torch.ones(2, 5)).square().mean().backward()
        optimizers[0].step()
        part.step(list(other.parameters()))
        part.finish()
    assert all(torch.equal(one, two) for one, two in zip(plain.parameters(), other.parameters(), strict=True))
    assert [each.data_ptr() for each in other.parameters()] == places
    assert host.peak_bytes == sum(each.nbytes for each in other.parameters())  # gradients, and no copy of a parameter
    assert set(map(id, optimizers[1].state)) <= set(map(id, other.parameters()))


def test_refusals() -> None:
    model, _ = pair()
    with pytest.raises(AutoparError, match="Adafactor is not known to update each number by itself"):
        HostStep(torch.optim.Adafactor(model.parameters()), "parameter", HostMemory(CPU))
    with pytest.raises(AutoparError, match=r"leave Offload\(parameters=\) out"):
        HostStep(torch.optim.Adafactor(model.parameters()), "parameter", HostMemory(CPU), offload=Offload(parameters="host"))
    mesh = autopar.virtual_mesh(dp=2)
    with pytest.raises(AutoparError, match="pass optimizer= as well"):
        autopar.compile(model, mesh, offload="optimizer")
    with pytest.raises(AutoparError, match="leave Offload\\(optimizer=\\) out, or weight_versions"):
        step = autopar.TrainStep(weight_versions="stash")
        autopar.compile(model, mesh, offload="optimizer", optimizer=torch.optim.SGD, train_step=step)


def test_on_a_gpu_the_thread_copies_by_one_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(device) or f"stream {len(made)}")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: f"by {stream}")
    part = HostStep(torch.optim.SGD(nn.Linear(1, 1).parameters()), "element", HostMemory(CPU))
    device = torch.device("cuda", 3)
    assert [part._beside(device), part._beside(device)] == ["by stream 1"] * 2 and made == [device]
