"""Every optimizer of torch.optim, called for a few of its parameters at a time, does what it does for all."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import autopar
from autopar.runtime.train import runs
from autopar.runtime.train.partial_step import PartialStep, made_of
from tests.support.models.trained import Lamb, Sm3

OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    torch.optim.Adadelta,
    torch.optim.Adafactor,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.ASGD,
    torch.optim.Muon,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    lambda of: torch.optim.SGD(of, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    lambda of: torch.optim.AdamW(of, foreach=True, amsgrad=True),
    lambda of: torch.optim.AdamW(of, fused=True),
    Lamb,
    Sm3,
]


def groups(seed: int = 0) -> tuple[list[nn.Parameter], list[dict[str, Any]]]:
    generator = torch.Generator().manual_seed(seed)
    made = [nn.Parameter(torch.randn(4, 3, generator=generator)) for _ in range(5)]
    return made, [{"params": made[:3]}, {"params": made[3:], "lr": 0.05}]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_in_parts_as_in_one(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    (mine, my_groups), (theirs, their_groups) = groups(), groups()
    optimizer, reference = make(my_groups), make(their_groups)
    partial = PartialStep(optimizer)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for one, other in zip(mine, theirs, strict=True):
            other.grad = torch.randn(4, 3, generator=generator)
            one.grad = other.grad.clone()
        for part in ([mine[4], mine[0]], [mine[1]], [mine[2], mine[3]]):
            partial.step(part)
        reference.step()
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 2]
    assert set(optimizer.state) == set(mine)
    assert optimizer.state_dict()["state"].keys() == reference.state_dict()["state"].keys()


def test_groups_are_whole_again_after_an_error() -> None:
    mine, my_groups = groups()
    optimizer = torch.optim.SGD(my_groups)
    mine[0].grad = torch.ones(4, 3)
    before = copy.copy(optimizer.param_groups)
    optimizer.register_step_pre_hook(lambda *_: 1 / 0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ZeroDivisionError):
        PartialStep(optimizer).step([mine[0]])
    assert [group is other for group, other in zip(optimizer.param_groups, before, strict=True)] == [True, True]
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 2]


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "fused": lambda of: torch.optim.AdamW(of, fused=True),
    "foreach": lambda of: torch.optim.AdamW(of, foreach=True),
    "sgd": lambda of: torch.optim.SGD(of, lr=0.1, momentum=0.9),
    "adagrad": lambda of: torch.optim.Adagrad(of, initial_accumulator_value=0.5),
    "adafactor": torch.optim.Adafactor,
    "groups": lambda of: torch.optim.AdamW([{"params": of[:2]}, {"params": of[2:], "lr": 0.1}]),
    "named": lambda of: torch.optim.AdamW([(f"p{number}", each) for number, each in enumerate(of)]),
    "muon": lambda of: muon_of(torch.optim.Muon, of),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("held", [(0, 2), (), (1,)], ids=["some", "none", "the vector"])
def test_it_is_made_of_all_parameters_and_keeps_those_that_are_held(name: str, held: tuple[int, ...]) -> None:
    shapes = ((4, 3), (3,), (5, 3))
    wholes = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    lying = [each if number in held else nn.Parameter(each.to("meta"), requires_grad=False) for number, each in enumerate(wholes)]
    seen = list[nn.Parameter]()

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        seen.extend(parameters)
        return MAKERS[name](parameters)

    optimizer, whole = made_of(make, lying, [wholes[number] for number in held], torch.device("cpu")), MAKERS[name](wholes)
    assert [(tuple(each.shape), each.device.type) for each in seen] == [(shape, "cpu") for shape in shapes]
    assert [each.requires_grad for each in seen] == [number in held for number in range(3)]
    numbers = {id(each): number for number, each in enumerate(wholes)}
    for group, theirs in zip(optimizer.param_groups, whole.param_groups, strict=True):
        kept = [each for each in theirs["params"] if numbers[id(each)] in held]
        assert list(map(id, group["params"])) == list(map(id, kept)) and group["lr"] == theirs["lr"]
        assert group.get("param_names", []) == ([f"p{numbers[id(each)]}" for each in kept] if name == "named" else [])
    assert set(optimizer.state) == {each for each in whole.state if numbers[id(each)] in held}
    for each in wholes:
        each.grad = torch.ones_like(each)
    PartialStep(optimizer).step([wholes[number] for number in held])
    assert set(optimizer.state) <= {wholes[number] for number in held}


def test_what_it_refuses_is_refused_with_stand_ins_too() -> None:
    elsewhere = [nn.Parameter(torch.zeros(3, device="meta"))]
    with pytest.raises(ValueError, match="Invalid learning rate"):
        made_of(partial(torch.optim.AdamW, lr=-1.0), elsewhere, [], torch.device("cpu"))
    with pytest.raises(ValueError, match="empty parameter list"):
        made_of(partial(muon_of, torch.optim.Muon), elsewhere, [], torch.device("cpu"))


CPU = torch.device("cpu")


def test_what_works_by_names_or_numbers_is_made_of_those_that_are_held() -> None:
    here, elsewhere = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3, device="meta"))
    names = {here: 0.1}
    by_name = made_of(
        lambda given: torch.optim.SGD([{"params": [each], "lr": names[each]} for each in given]), [elsewhere, here], [here], CPU
    )
    by_norm = made_of(
        lambda given: torch.optim.SGD([each for each in given if float(each.detach().sum()) > 0]), [elsewhere, here], [here], CPU
    )
    for optimizer in (by_name, by_norm):
        assert [group["params"] for group in optimizer.param_groups] == [[here]]


def last_two(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters[-2:], lr=0.1)


def made_on_ranks() -> dict[str, bool]:
    """Which parameters a step of an optimizer of the last two changes, where every layer is a stage."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)), Squares())
    x = torch.randn(8, 4)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("pp",))
    parallel = autopar.compile(model, mesh, example_inputs=(x,), backend="eager", cluster="ideal", optimizer=last_two)
    before = parallel.full_state_dict()
    parallel.train_step(x)
    after = parallel.full_state_dict()
    return {name: not torch.equal(after[name], before[name]) for name in before}


def test_on_processes_a_function_chooses_among_the_parameters_of_all_stages(gloo_ranks: Any) -> None:
    for changed in gloo_ranks.run(made_on_ranks):
        assert changed == {f"{number}.0.{name}": number == 3 for number in range(4) for name in ("weight", "bias")}


class Squares(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


def muon_of(kind: Any, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return kind([each for each in parameters if each.ndim == 2])


@pytest.mark.parametrize("joint", [False, True])
def test_what_is_gathered_is_there_one_at_a_time(joint: bool) -> None:
    """But where an update depends on all parameters together."""
    live: list[int] = []

    class Gathers:
        there = 0

        def __contains__(self, parameter: object) -> bool:
            return True

        def gather(self, parameter: torch.Tensor) -> torch.Tensor:
            self.there += 1
            live.append(self.there)
            whole = torch.zeros(4)
            whole.grad = torch.ones(4)
            return whole

        def put(self, parameter: torch.Tensor, whole: torch.Tensor) -> None:
            self.there -= 1

    with one_rank():
        mesh = init_device_mesh("cpu", (1,))
        parameters = [nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)])) for _ in range(3)]
        PartialStep(torch.optim.SGD(parameters), wholes=cast(Any, Gathers()), joint=joint).step(parameters)
    assert live == ([1, 2, 3] if joint else [1, 1, 1])


def test_parameters_that_the_optimizer_does_not_have_stay() -> None:
    """An update has those of a bucket, a stage of a pipeline has some: they may be others than the user's. What counts steps goes on."""
    counted: list[int] = []
    with one_rank():
        mesh = init_device_mesh("cpu", (1,))
        parameters = [nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)])) for _ in range(3)]
        for each in parameters:
            each.grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        optimizer = torch.optim.SGD(parameters[:1], lr=0.5)
        step = optimizer.step
        optimizer.step = lambda *args, **kwargs: counted.append(len(optimizer.param_groups)) or step(*args, **kwargs)
        partial_step = PartialStep(optimizer, on_parts=True)
        partial_step.step(parameters[1:])
        partial_step.step(parameters)
        values = [float(each.detach().sum()) for each in parameters]
    assert values == [2.0, 4.0, 4.0] and counted == [0, 1]


def test_large_parameters_are_stepped_one_by_one_before_they_have_state() -> None:
    """`foreach` works in memory as large as all that it is given, and a first step is given all."""
    with one_rank(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "PIECE_BYTES", 64)
        mesh = init_device_mesh("cpu", (1,))
        parameters = [nn.Parameter(distribute_tensor(torch.ones(size), mesh, [Shard(0)])) for size in (32, 4, 20, 4)]
        plain = [nn.Parameter(torch.ones(each.shape)) for each in parameters]
        optimizer, reference = torch.optim.AdamW(parameters, foreach=True), torch.optim.AdamW(plain, foreach=True)
        partial_step, seen = PartialStep(optimizer, on_parts=True), list[list[int]]()
        step = torch.optim.AdamW.step
        patch.setattr(
            torch.optim.AdamW,
            "step",
            lambda self: seen.append([each.numel() for group in self.param_groups for each in group["params"]]) or step(self),
        )
        for _ in range(2):
            for each, other in zip(parameters, plain, strict=True):
                each.grad, other.grad = distribute_tensor(torch.ones(each.shape), mesh, [Shard(0)]), torch.ones(each.shape)
            partial_step.step(parameters)
            step(reference)
        for each, other in zip(parameters, plain, strict=True):
            torch.testing.assert_close(cast(DTensor, each).full_tensor(), other, rtol=0, atol=0)
    assert seen[:3] == [[4, 4], [32], [20]] and sorted(seen[3:]) == [[4], [4, 4], [16], [16], [16]]


@contextmanager
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_state_of_what_is_gathered_is_there_after_an_error() -> None:
    class Gathers:
        def __contains__(self, parameter: object) -> bool:
            return True

        def gather(self, parameter: torch.Tensor) -> torch.Tensor:
            whole = torch.zeros(4)
            whole.grad = torch.ones(4)
            return whole

        def put(self, parameter: torch.Tensor, whole: torch.Tensor) -> None: ...

    with one_rank():
        parameter = nn.Parameter(distribute_tensor(torch.zeros(4), init_device_mesh("cpu", (1,)), [Shard(0)]))
        optimizer = torch.optim.Adam([parameter])
        step = PartialStep(optimizer, wholes=cast(Any, Gathers()))
        step.step([parameter])
        hook = optimizer.register_step_post_hook(lambda *_: 1 / 0)  # pyright: ignore[reportArgumentType]
        with pytest.raises(ZeroDivisionError):
            step.step([parameter])
        hook.remove()
        step.step([parameter])
    assert list(optimizer.state) == [parameter] and optimizer.state[parameter]["step"] == 3
