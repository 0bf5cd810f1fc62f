"""A model that is changed between calls: what the next call computes is what the changed model computes."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from autopar.errors import InputError, PlanError
from autopar.runtime.module.guard import ModelGuard
from autopar.runtime.module.parallel_module import ParallelModule
from tests.support.captures import compiled

MESH = {"dp": 2, "tp": 2}

WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act, self.proj = nn.Linear(WIDTH, 8, bias=False), nn.ReLU(), nn.Linear(8, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.shift = torch.full((WIDTH,), 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.proj(self.act(self.fc(x)))) + self.shift


class Model(nn.Module):
    """Much that a user may change between two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])
        self.scale, self.is_residual, self.powers = 1.0, True, [2.0]
        self.weigh: Callable[[torch.Tensor], torch.Tensor] = partial(F.leaky_relu, negative_slope=0.1)
        self.config = SimpleNamespace(loss={"factor": 1.0}, offset=0.0)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = x
        for block in self.blocks:
            out = block(out) + out if self.is_residual else block(out)
        out = self.weigh(out) * self.scale + self.config.offset
        return sum((self.config.loss["factor"] * (out - y).abs() ** power).mean() for power in self.powers)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, WIDTH, generator=generator).double(), torch.randn(8, WIDTH, generator=generator).double()


def check_step(parallel: ParallelModule, model: nn.Module) -> float:
    """A call computes loss, gradients and buffers of the model as it is now; the loss."""
    reference = copy.deepcopy(model)
    for module in (parallel, reference):
        module.zero_grad()
    loss, expected = parallel(*batch()), reference(*batch())
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-9, msg=name)
    for (name, ours), theirs in zip(model.named_buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9, msg=name)
    return loss.item()


def guard_of(model: nn.Module) -> ModelGuard:
    """A guard of a model that is captured as it is."""
    guard = ModelGuard(model)
    assert guard.state() == 0
    guard.captured(())
    return guard


def doubled(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


CHANGES: dict[str, Callable[[Any], Any]] = {
    "number": lambda model: setattr(model, "scale", 3.0),
    "sign of zero": lambda model: setattr(model.config, "offset", -0.0),
    "type of a number": lambda model: setattr(model, "scale", 1),
    "flag": lambda model: setattr(model, "is_residual", False),
    "list": lambda model: model.powers.append(3.0),
    "entry of a list": lambda model: model.powers.__setitem__(0, 3.0),
    "momentum": lambda model: setattr(model.blocks[0].norm, "momentum", 0.7),
    "config": lambda model: setattr(model.config, "offset", 2.0),
    "nested config": lambda model: model.config.loss.update(factor=5.0),
    "key": lambda model: (model.config.loss.clear(), model.config.loss.update(factors=1.0)),
    "function": lambda model: setattr(model, "weigh", torch.sigmoid),
    "argument of a function": lambda model: model.weigh.keywords.update(negative_slope=0.3),
    "submodule": lambda model: setattr(model.blocks[0], "act", nn.GELU()),
    "class of a submodule": lambda model: setattr(model.blocks[0].act, "__class__", nn.Tanh),
    "hook": lambda model: model.blocks[0].register_forward_hook(doubled),
    "hook before": lambda model: model.blocks[0].act.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "hook after backward": lambda model: model.blocks[0].register_full_backward_hook(lambda *_: None),
    "method": lambda model: setattr(model.blocks[0], "forward", torch.tanh),
    "mode": lambda model: model.eval(),
    "mode of a submodule": lambda model: model.blocks[0].norm.eval(),
    "tensor that is no buffer": lambda model: setattr(model.blocks[0], "shift", torch.ones(WIDTH)),
    "tensor that is no buffer, in place": lambda model: model.blocks[0].shift.fill_(7.0),
    "buffer": lambda model: setattr(model.blocks[0].norm, "running_mean", None),
    "new submodule": lambda model: model.blocks.append(nn.Tanh()),
    "same submodule twice": lambda model: model.blocks.append(model.blocks[0]),
    "new attribute": lambda model: setattr(model, "temperature", 1.0),
    "attribute gone": lambda model: delattr(model, "is_residual"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_another_state(change: str) -> None:
    model = Model()
    guard = guard_of(model)
    assert guard.state() == guard.state() == 0
    CHANGES[change](model)
    assert guard.state() == guard.state() == 1
    assert " → " in guard.changes()
    guard.captured(())
    assert guard.state() == 1 and not guard.changes()


def test_a_change_taken_back_is_the_state_of_before() -> None:
    model = Model()
    guard = guard_of(model)
    for number, (change, undo) in enumerate(
        (
            (lambda: model.eval(), lambda: model.train()),
            (lambda: setattr(model, "scale", 0.3), lambda: setattr(model, "scale", float("1"))),
            (lambda: setattr(model.blocks[0], "act", nn.GELU()), lambda: setattr(model.blocks[0], "act", nn.ReLU())),
            (
                lambda: model.config.loss.update(factor=2.0),
                lambda: setattr(model, "config", SimpleNamespace(loss={"factor": 1.0}, offset=0.0)),
            ),
        )
    ):
        change()
        assert guard.state() == number + 1
        guard.captured(())
        undo()
        assert guard.state() == 0
    for _ in range(2):  # torch numbers hooks as they come
        handle = model.register_forward_hook(doubled)
        assert guard.state() == 5
        guard.captured(())
        handle.remove()
        assert guard.state() == 0


def test_values_of_parameters_and_buffers_are_no_change() -> None:
    model = Model()
    guard = guard_of(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, WIDTH), torch.randn(4, WIDTH)).backward()
    optimizer.step()
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()}, assign=True)
    model.blocks[0].fc.weight.data = torch.zeros(8, WIDTH)
    assert guard.state() == 0
    was = guard.trainable()
    model.blocks[0].fc.weight.requires_grad_(False)
    assert guard.state() == 0 and guard.trainable() != was


def test_tensors_are_looked_up_again_where_one_is_another() -> None:
    torch.manual_seed(0)
    model = Model().double()
    parallel = compiled(model, MESH)
    check_step(parallel, model)
    check_step(parallel, model)
    looked_up = parallel.tensors()
    assert parallel.tensors() is looked_up
    model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()}, assign=True)
    check_step(parallel, model)
    assert parallel.tensors() is not looked_up
    assert all(ours is theirs for ours, theirs in zip(parallel.tensors().parameters.values(), model.parameters(), strict=True))
    with torch.no_grad():
        model.blocks[0].fc.weight.data = model.blocks[0].fc.weight * 2
    check_step(parallel, model)


def test_what_is_around_a_model_is_no_setting_of_it() -> None:
    class Trainer:
        def __init__(self, model: nn.Module) -> None:
            self.model, self.step = model, 0

    model = Model()
    model.trainer, model.samples = Trainer(model), [[SimpleNamespace(number=[i, j])] * 100 for i in range(100) for j in range(100)]
    guard = guard_of(model)
    start = time.perf_counter()
    for _ in range(3):
        model.trainer.step += 1
        assert guard.state() == 0
    assert time.perf_counter() - start < 1
    model.trainer = Trainer(model)
    assert guard.state() == 1


def test_what_forward_writes_is_no_change() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.calls, self.mask, self.masks = nn.Linear(WIDTH, WIDTH), 0, None, {}

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.mask is None:
                self.mask = self.masks[len(x)] = torch.ones(len(x), 1, dtype=x.dtype)
            return (self.fc(x) * self.mask - y).square().mean()

    model = Counting().double()
    parallel = compiled(model, MESH)
    for _ in range(3):
        check_step(parallel, model)
        model(*batch())
    assert model.calls == 3 and len(parallel._captures) == 1


def test_a_flag_that_forward_sets_is_said_and_a_run_of_the_model_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.is_started = nn.Linear(WIDTH, WIDTH), False

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            factor = 1.0 if self.is_started else 5.0
            self.is_started = True
            return factor * (self.fc(x) - y).square().mean()

    model = Lazy().double()
    parallel = compiled(model, MESH)
    first = check_step(parallel, model)
    assert "forward changes numbers or flags on its modules" in caplog.text and "is_started (False → True)" in caplog.text
    model(*batch())
    assert check_step(parallel, model) == pytest.approx(first / 5) and len(parallel._captures) == 2


def test_a_call_computes_what_the_changed_model_computes(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = Model().double()
    parallel = compiled(model, MESH)
    losses = [check_step(parallel, model)]
    with caplog.at_level(logging.INFO, logger="autopar"):
        for change in ("number", "momentum", "nested config", "submodule", "hook", "tensor that is no buffer, in place"):
            CHANGES[change](model)
            losses.append(check_step(parallel, model))
            assert parallel.summary()["flops_split"] > 0.5
    assert len({round(loss, 9) for loss in losses}) == len(losses) - 1  # the momentum shows in the buffers
    for told in ("scale 1.0 → 3.0", "blocks.0.norm.momentum 0.1 → 0.7", "config.loss['factor'] 1.0 → 5.0", "blocks.0.act ReLU → GELU"):
        assert (
            f"recapturing: no program fits this call (args[0] [8, 6] float64, args[1] [8, 6] float64; training=True, grad=True; the "
            f"model changed: {told}" in caplog.text
        )


def test_training_and_evaluation_in_turn_are_two_captures() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.5), nn.Linear(8, WIDTH)).double()
    parallel = compiled(model, MESH)
    for mode in (True, False, True, False, True, False):
        (model if mode else parallel).train(mode)
        parallel(batch()[0])
        assert parallel.training is model.training is mode
    assert len(parallel._captures) == 2


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda model: model.float(),
            r"'blocks.0.fc.weight' was \[8, 6\] float64 and is \[8, 6\] float32.* the changed model again",
        ),
        (lambda model: setattr(model.blocks[0], "extra", nn.Linear(2, 2)), "'blocks.0.extra.weight' is a new parameter"),
        (lambda model: setattr(model.blocks[0], "proj", nn.Identity()), "parameter 'blocks.0.proj.weight' is gone"),
        (lambda model: setattr(model.blocks[0], "fc", nn.Linear(6, 9, bias=False)), r"was \[8, 6\] float64 and is \[9, 6\] float32"),
        (lambda model: setattr(model.blocks[0].proj.weight, "data", torch.zeros(6, 9)), r"was \[6, 8\] float64 and is \[6, 9\] float32"),
    ],
)
def test_changed_parameters_are_refused(change: Callable[[Any], Any], expected: str) -> None:
    model = Model().double()
    guard = guard_of(model)
    change(model)
    with pytest.raises(PlanError, match=expected):
        guard.state()


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("names", [["blocks.0.fc.weight"], ["blocks.0.fc.weight", "blocks.0.proj.weight"]])
def test_weights_given_for_one_call_are_refused(names: list[str], is_captured: bool) -> None:
    """As constants of the program they would be read once, and get no gradient."""
    model = Model().double()
    parallel = compiled(model, MESH)
    given = {name: model.get_parameter(name).detach().mul(2).requires_grad_() for name in names}
    if is_captured:
        check_step(parallel, model)
    with pytest.raises(PlanError, match="plain tensor stands in the place of parameter 'blocks.0.fc.weight'.*functional_call.*copy_"):
        torch.func.functional_call(parallel, given, batch())
    check_step(parallel, model)


@pytest.mark.parametrize("switch", ["the original in training", "dropout alone in training"])
def test_every_call_that_draws_draws_anew(switch: str) -> None:
    """Whatever mode the parallel module is in: dropout in evaluation is how uncertainty is estimated."""
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.Dropout(0.5)).double().eval()
    parallel = compiled(model, MESH)
    assert torch.equal(parallel(batch()[0]), parallel(batch()[0])) and parallel.step == 0
    (model if switch == "the original in training" else model[1]).train()
    dropped = [parallel(batch()[0]) == 0 for _ in range(3)]
    assert not torch.equal(dropped[0], dropped[1]) and not torch.equal(dropped[1], dropped[2])
    assert parallel.step == 3 and parallel.state_dict()._metadata[""]["autopar"]["step"] == 3


def changes_on_ranks() -> tuple[list[str], list[float], int]:
    """What is said when ranks change their models differently; how far losses are from the plain model's after equal changes."""
    torch.manual_seed(0)
    model = Model().double()
    model.blocks[0].norm = nn.Identity()
    reference, rank = copy.deepcopy(model), dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mine = tuple(tensor.chunk(2)[rank // 2] for tensor in batch())
    parallel = compiled(model, mesh, mine)
    said, errors = list[str](), list[float]()

    def refused() -> None:
        with pytest.raises(InputError) as caught:
            parallel(*mine)
        said.append(str(caught.value))

    def check() -> None:
        with torch.no_grad():
            losses = torch.zeros(4, dtype=torch.float64)
            losses[rank] = parallel(*mine).item()
            dist.all_reduce(losses)
            errors.append(abs(losses.mean().item() - reference(*batch()).item()))

    check()
    model.scale = 1.0 + rank // 2
    refused()
    model.scale = reference.scale = 3.0
    check()
    if rank == 3:
        model.add_module("more", nn.Linear(2, 2))
    refused()
    if rank == 3:
        del model.more
    check()
    return said, errors, len(parallel._captures)


def test_ranks_change_together_or_not_at_all(gloo_ranks: Any) -> None:
    for (settings, parameters), errors, captures in gloo_ranks.run(changes_on_ranks):
        assert "ranks 0 and 2 make different calls" in settings and "the model's modes, hooks, attributes and submodules" in settings
        assert "rank 3: the parameters of the model changed since it was captured: 'more.weight' is a new parameter" in parameters
        assert max(errors) < 1e-9 and captures == 3


@dataclass(slots=True)
class Slots:
    scale: float = 1.0
    powers: list[float] = field(default_factory=lambda: [2.0])


def test_settings_in_slots_are_seen() -> None:
    torch.manual_seed(0)
    model = Model().double()
    settings = Slots()
    model.weigh = partial(scaled, settings=settings)
    parallel = compiled(model, MESH)
    first = check_step(parallel, model)
    settings.scale = 3.0
    assert check_step(parallel, model) != first
    settings.powers[0] = 1.0
    check_step(parallel, model)
    assert len(parallel._captures) == 3


def scaled(x: torch.Tensor, settings: Slots) -> torch.Tensor:
    return x.abs() ** settings.powers[0] * settings.scale
