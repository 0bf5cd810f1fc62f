"""The optimizer of a plain loop on processes: those that go element by element compute on plain tensors, and nothing else differs."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

import autopar
from autopar.runtime._torch import local_part
from autopar.runtime.train import runs
from autopar.runtime.train.stand_ins import StandIns
from tests.equivalence.test_gloo_train_step import ELEMENTWISE, MESHES, share
from tests.support.models.trained import batch, small_gpt

STEPS = 3


# ---- what the ranks run


class Theirs(torch.optim.AdamW):
    """A class that nobody knows: it might take a statistic of all parameters."""


def built(where: str) -> tuple[nn.Module, autopar.ParallelModule, Callable[[int], dict[str, Tensor]]]:
    """A model, the same parallel, and this rank's share of the batch of a step."""
    sizes, axes = MESHES[where]
    model = small_gpt()
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
    options: dict[str, Any] = {"backend": "eager", "cluster": autopar.Cluster.ideal()}
    reference = copy.deepcopy(model)
    return (
        reference,
        autopar.compile(model, mesh, example_inputs=share(batch(0), axes, sizes), **options),
        lambda step: share(batch(step), axes, sizes),
    )


def seen_by(optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> set[type]:
    """The types of the parameters that the class's own code gets."""
    found: set[type] = set()
    kind: Any = type(optimizer)
    name = "_init_group"
    original = getattr(kind, name)

    def spied(self: Any, group: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        found.update(DTensor if isinstance(each, DTensor) else Tensor for each in group["params"])
        return original(self, group, *args, **kwargs)

    setattr(kind, name, spied)
    try:
        step()
    finally:
        setattr(kind, name, original)
    return found


def trains(where: str, name: str) -> dict[str, Any]:
    """The plain loop with a schedule of learning rates, its state saved and loaded half-way, beside one device's."""
    reference, parallel, given = built(where)
    make = ELEMENTWISE[name]
    optimizer, wanted = make(parallel.parameters()), make(reference.parameters())
    rates, wanted_rates = (torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (optimizer, wanted))
    seen: set[type] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(STEPS):
            parallel(**given(step)).backward()
            seen |= seen_by(optimizer, optimizer.step)
            optimizer.zero_grad()
            rates.step()
            reference(**batch(step)).backward()
            wanted.step()
            wanted.zero_grad()
            wanted_rates.step()
            if step == 0:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = make(parallel.parameters())
                optimizer.load_state_dict(saved)
                rates.optimizer = optimizer
    full, expected = parallel.full_state_dict(), reference.state_dict()
    parts = [
        value for each, of in optimizer.state.items() for value in of.values() if isinstance(value, Tensor) and value.shape == each.shape
    ]
    return {
        "difference": max(float((full[each] - expected[each]).abs().max()) for each in expected),
        "seen": seen,
        "state": {type(each) for each in parts},
        "keys": {id(each) for each in optimizer.state} <= {id(each) for each in parallel.parameters()},
        "left": sum(each.grad is not None for each in parallel.parameters()),
    }


def saved_gradients(module: nn.Module) -> int:
    """How many are equal to a deep copy of theirs, once they are saved: they are views of a bucket."""
    gradients = [each.grad for each in module.parameters() if isinstance(each.grad, DTensor)]
    torch.save(gradients, io.BytesIO())
    return sum(torch.equal(local_part(copy.deepcopy(each)), local_part(each)) for each in gradients)


def side_by_side(where: str, name: str) -> dict[str, Any]:
    """Six steps by pieces of 2 kB, of which each meets what a loop may do, beside one device's; and how many tensors each step had."""
    reference, parallel, given = built(where)
    make = partial(ELEMENTWISE[name], foreach=True)
    optimizer, wanted = make(parallel.parameters()), make(reference.parameters())
    pairs = ((parallel, optimizer, given), (reference, wanted, batch))
    sizes: list[list[int]] = []
    first = next(iter(dict(reference.named_parameters())))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "PIECE_BYTES", 2048)
        for step in range(6):
            for module, stepped, of in pairs:
                module(**of(step)).backward()
                if step == 1:  # accumulated, and in memory of their own
                    module(**of(step + 1)).backward()
                if step == 2 and first in dict(module.named_parameters()):
                    dict(module.named_parameters())[first].grad = None
                if step == 4:
                    for each in stepped.state.values():
                        each["step"].fill_(1)
                if step == 5:
                    stepped.load_state_dict(copy.deepcopy(stepped.state_dict()))
            if step == 0:
                saved = saved_gradients(parallel)
            wanted.step()
            sizes.append(numels_of(optimizer))
            wanted.zero_grad(set_to_none=step != 3)
            optimizer.zero_grad(set_to_none=step != 3)
    full, expected = parallel.full_state_dict(), reference.state_dict()
    placed = [each for each in parallel.parameters() if isinstance(each, DTensor)]
    moments = [each.full_tensor() for of in optimizer.state.values() for each in of.values() if isinstance(each, DTensor)]
    return {
        "difference": max(float((full[each] - expected[each]).abs().max()) for each in expected),
        "sizes": sizes,
        "parameters": [local_part(each).numel() for each in placed],
        "finite": all(bool(each.isfinite().all()) for each in moments),
        "copied": all(torch.equal(local_part(copy.deepcopy(each)), local_part(each)) for each in placed),
        "gradients copied": saved == len(placed),
    }


def numels_of(optimizer: torch.optim.Optimizer) -> list[int]:
    """A step, and the elements of each tensor that the class's own code gets."""
    found: list[int] = []
    kind: Any = type(optimizer)
    with pytest.MonkeyPatch.context() as patch:
        original = kind._init_group

        def spied(self: Any, group: dict[str, Any], *args: Any) -> Any:
            found.extend(each.numel() for each in group["params"])
            return original(self, group, *args)

        patch.setattr(kind, "_init_group", spied)
        optimizer.step()
    return found


def changed(step: int, optimizer: torch.optim.Optimizer, frozen: list[nn.Parameter]) -> None:
    """One parameter moves from the end of the first group to the begin of the second; those that are frozen come in a group of their own,
    and train later."""
    if step == 2:
        optimizer.param_groups[1]["params"].insert(0, optimizer.param_groups[0]["params"].pop())
    if step == 4:
        optimizer.add_param_group({"params": frozen, "lr": 0.01})
    if step == 5:
        for each in frozen:
            each.requires_grad_(True)


def groups_that_change(is_plain: bool) -> float:
    """Two groups of options, which `changed` changes. How far parameters are from one device's."""
    torch.manual_seed(0)
    reference = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), Square()).double()
    reference[3].requires_grad_(False)
    model, x = copy.deepcopy(reference), torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    share_ = x.chunk(4)[dist.get_rank()]

    def make(parameters: Any) -> torch.optim.Optimizer:
        trained = [each for each in parameters if each.requires_grad]
        return torch.optim.AdamW([{"params": trained[:2], "lr": 0.1}, {"params": trained[2:], "lr": 0.001}], foreach=is_plain)

    parallel = autopar.compile(model, mesh, example_inputs=(share_,), backend="eager", optimizer=None if is_plain else make)
    if not is_plain:
        parallel.train_step(share_)
    optimizer = make(parallel.parameters()) if is_plain else parallel.optimizer
    wanted = make(reference.parameters())
    assert optimizer is not None
    for step in range(8):
        if is_plain:
            parallel(share_).backward()
            optimizer.step()
            optimizer.zero_grad()
        elif step:
            parallel.train_step(share_)
        reference(x).backward()
        wanted.step()
        wanted.zero_grad()
        for stepped, module in ((optimizer, parallel), (wanted, reference)):
            changed(step, stepped, [each for name, each in module.named_parameters() if name.startswith("3.")])
    full, expected = parallel.full_state_dict(), reference.state_dict()
    return max(float((full[each] - expected[each]).abs().max()) for each in expected)


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def own_ways() -> dict[str, Any]:
    """What the class's own code sees where the user steps in; and what is left of a step that failed."""
    _, parallel, given = built("dp2 tp2")
    optimizer = torch.optim.AdamW(parallel.parameters())
    found: dict[str, Any] = {}

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = parallel(**given(0))
        value.backward()
        return value

    def saw(step: Callable[[], object] = optimizer.step) -> set[type]:
        return seen_by(optimizer, step)

    loss()
    found["plain"] = saw()
    before = [group["params"][:] for group in optimizer.param_groups]
    kind: Any = type(optimizer)
    original = kind._init_group
    kind._init_group = lambda *_: 1 / 0
    try:
        optimizer.step()
    except ZeroDivisionError:
        found["failed"] = "in the step"
    finally:
        kind._init_group = original
    after = [group["params"] for group in optimizer.param_groups]
    found["groups"] = all(one is other for mine, theirs in zip(before, after, strict=True) for one, other in zip(mine, theirs, strict=True))
    found["parameters of the state"] = {type(each).__name__ for each in optimizer.state}
    found["after a failure"] = saw()
    found["closure"] = saw(lambda: optimizer.step(loss))
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    found["own hook"] = saw()
    handle.remove()
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    found["hook of all"] = saw()
    handle.remove()
    found["without hooks"] = saw()
    split = next(each for each in parallel.parameters() if any(place.is_shard() for place in each.placements))
    assert isinstance(split, DTensor)
    split.grad = split.grad.redistribute(placements=[*(torch.distributed.tensor.Replicate() for _ in split.placements)])  # type: ignore[union-attr]
    found["another placement"] = saw()
    theirs = Theirs(parallel.parameters())
    found["another class"] = seen_by(theirs, theirs.step)
    return found


def entered_again(name: str) -> list[bool]:
    """Step by step whether all parameters entered as they did at the last one: four steps, the state loaded, two, one without a gradient of
    the first parameter, two."""
    _, parallel, given = built("dp2 tp2")
    optimizer = (ELEMENTWISE | {"sgd": torch.optim.SGD})[name](parallel.parameters())
    found, original = list[bool](), StandIns.again

    def spied(self: StandIns, *args: Any) -> Any:
        entered = original(self, *args)
        found.append(entered is not None)
        return entered

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StandIns, "again", spied)
        for step in range(9):
            if step == 4:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            parallel(**given(0)).backward()
            if step == 6:
                next(parallel.parameters()).grad = None
            optimizer.step()
            optimizer.zero_grad()
    return found


class Signs(torch.optim.Optimizer):
    """A user's class, which goes element by element: its code alone says so."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            self._init_group(group)

    def _init_group(self, group: dict[str, Any]) -> None:
        for each in group["params"]:
            if each.grad is not None:
                each.add_(each.grad.sign(), alpha=-group["lr"])


def refusals(where: str, options: dict[str, Any]) -> dict[str, str]:
    """By class what its step is refused with, or what its code sees."""
    sizes, axes = MESHES[where]
    given, found = share(batch(0), axes, sizes), dict[str, str]()
    options = {"example_inputs": given, "backend": "eager", "cluster": autopar.Cluster.ideal(), **options}
    parallel = autopar.compile(small_gpt(), init_device_mesh("cpu", sizes, mesh_dim_names=axes), **options)

    def loss() -> Tensor:
        parallel.zero_grad()
        value = parallel(**given)
        value.backward()
        return value

    for kind in (torch.optim.LBFGS, torch.optim.Adafactor, Signs):
        loss()
        optimizer: Any = kind(parallel.parameters())
        step = partial(optimizer.step, loss) if kind is torch.optim.LBFGS else optimizer.step
        try:
            seen = seen_by(optimizer, step) if kind is Signs else step()
            found[kind.__name__] = " ".join(each.__name__ for each in seen) if kind is Signs else "steps"
        except autopar.AutoparError as error:
            found[kind.__name__] = str(error)
    return found


# ---- the tests

OWN_WAYS = {"closure", "own hook", "hook of all", "another placement", "another class"}


@pytest.mark.parametrize(("where", "name"), [("dp4", "adamw"), ("dp2 tp2", "momentum"), ("pp2 dp2", "adam"), ("dp2 tp2", "asgd")])
def test_plain_tensors_in_the_step_dtensors_outside(gloo_ranks: Any, where: str, name: str) -> None:
    for found in gloo_ranks.run(trains, where, name):
        assert found["difference"] <= 1e-9, found
        assert found["seen"] == {Tensor} and found["state"] == {DTensor}, found
        assert found["keys"] and found["left"] == 0


@pytest.mark.parametrize(("where", "name"), [("dp4", "adamw"), ("dp2 tp2", "adam"), ("pp2 dp2", "radam"), ("dp4", "nadam")])
def test_side_by_side_as_one_by_one(gloo_ranks: Any, where: str, name: str) -> None:
    for found in gloo_ranks.run(side_by_side, where, name):
        assert found["difference"] <= 1e-9 and found["finite"] and found["copied"] and found["gradients copied"], found
        for step, sizes in enumerate(found["sizes"]):
            assert sum(sizes) >= sum(found["parameters"]) - (step == 2) * found["parameters"][0], "all are stepped"
            assert sizes != found["parameters"], step
            assert max(sizes) <= (256 if step else 8 * 256), "a run is cut once it has state"


@pytest.mark.parametrize("is_plain", [True, False], ids=["plain loop", "train_step"])
def test_groups_may_change_between_steps(gloo_ranks: Any, is_plain: bool) -> None:
    for difference in gloo_ranks.run(groups_that_change, is_plain):
        assert difference <= 1e-9


def test_who_steps_in_sees_what_torch_shows(gloo_ranks: Any) -> None:
    for found in gloo_ranks.run(own_ways):
        assert found["plain"] == found["after a failure"] == found["without hooks"] == {Tensor}, found
        assert {key: seen for key, seen in found.items() if seen == {DTensor}}.keys() == OWN_WAYS, found
        assert found["failed"] and found["groups"] and found["parameters of the state"] == {"DTensor"}, found


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_parameters_enter_all_together_where_nothing_has_changed(gloo_ranks: Any, name: str) -> None:
    """State is made in the first step and handed on at its end; one that has none enters so from the second on."""
    made = [False, False, True, True, False, True, False, False, True]
    wanted = made if name == "adamw" else [False, *[True] * 5, False, False, True]
    assert gloo_ranks.run(entered_again, name) == [wanted] * 4


def test_statistics_over_the_parameters_of_one_stage_are_refused(gloo_ranks: Any) -> None:
    """They were taken there, in silence: another training. What the user says of their own class is believed."""
    for found in gloo_ranks.run(refusals, "pp2 dp2", {}):
        assert "LBFGS joins all parameters into one vector" in found["LBFGS"] and "those of one stage alone" in found["LBFGS"]
        assert "Signs is not known to treat each parameter by itself" in found["Signs"]
        assert 'train_step=TrainStep(update_scope="parameter")' in found["Signs"] and found["Adafactor"] == "steps"
    for scope, seen in (("parameter", "DTensor"), ("element", "Tensor")):
        for found in gloo_ranks.run(refusals, "pp2 dp2", {"train_step": autopar.TrainStep(update_scope=scope)}):
            assert found["Signs"] == seen and "LBFGS joins all parameters" in found["LBFGS"], found


def test_what_torch_cannot_step_in_parts_is_refused(gloo_ranks: Any) -> None:
    for options, seen in (({}, "DTensor"), ({"train_step": autopar.TrainStep(update_scope="element")}, "Tensor")):
        for found in gloo_ranks.run(refusals, "dp4", {"zero": 1, **options}):
            assert "Adafactor takes statistics of whole parameters" in found["Adafactor"] and "update_scope" not in found["Adafactor"]
            assert "call parallel.train_step, which gathers them" in found["Adafactor"]
            assert found["LBFGS"] == "steps" and found["Signs"] == seen, found
