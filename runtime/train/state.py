"""The state of training beside the model's: what the optimizer keeps, averages, loss scale and counts, whole and by name, for any mesh."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from autopar.driver.train_step import TrainStep
from autopar.errors import AutoparError
from autopar.runtime._torch import local_part, storage_key
from autopar.runtime.execute.agreement import agreed
from autopar.runtime.execute.distributed_world import DistributedWorld
from autopar.runtime.execute.world import World, local_of
from autopar.runtime.module.placement import like

# By the name of a parameter and what is kept of it.
Entries = Mapping[tuple[str, str], Any]


class _Form(NamedTuple):
    """What other ranks must know of a tensor to be sent it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_part: bool
    on_device: bool


def whole_entries(entries: Entries, world: World) -> dict[tuple[str, str], Any]:
    """Copies of all entries of all ranks, each whole, on every rank; `entries` are those of this process. Collective."""
    if not isinstance(world, DistributedWorld):
        return {key: _copied(value) for key, value in entries.items()}
    everyone = world.gather(({key: _told(value) for key, value in entries.items()}, world.stage), "what optimizers keep")
    found: dict[tuple[str, str], Any] = {}
    for key in dict.fromkeys(key for told, _ in everyone for key in told):
        told, stage = next((told[key], stage) for told, stage in everyone if key in told)
        found[key] = _whole(entries.get(key), told, stage, key[0], world) if isinstance(told, _Form) else told
    return found


def _told(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return _Form(tuple(value.shape), value.dtype, isinstance(value, DTensor), value.device.type != "cpu")


def _whole(value: Any, form: _Form, stage: int, name: str, world: DistributedWorld) -> torch.Tensor:
    """The whole of a tensor that the ranks of `stage` hold, on every rank. Collective."""
    device = world.groups.device
    if world.stage != stage:
        whole = torch.empty(form.shape, dtype=form.dtype, device=device)
    elif isinstance(value, DTensor):
        lies_so = world.placements[name].shape == tuple(value.shape)
        whole = world.whole_at_stage(value, name) if lies_so else value.full_tensor()
        whole = whole.clone() if storage_key(whole) == storage_key(local_part(value)) else whole
    else:
        whole = value.detach().clone().to(device)
    whole = world.from_stage(whole, stage)
    return whole if form.on_device else whole.cpu()


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def placed_like(value: torch.Tensor, parameter: torch.Tensor, name: str, world: World) -> torch.Tensor:
    """A whole value of the shape of `parameter`, as that lies; memory of its own."""
    if not isinstance(world, DistributedWorld) or not isinstance(parameter, DTensor):
        return value.detach().clone().to(parameter.device)
    return like(parameter, world.part(value.to(local_part(parameter).device), name))


def optimizer_state(optimizer: Optimizer, names: Mapping[int, str], world: World) -> dict[str, Any]:
    """`state` by parameter and `groups` with the names of their parameters. `names` are by the ids of all parameters. Collective."""
    kept = {(names[id(each)], str(key)): value for each, of in optimizer.state.items() for key, value in of.items()}
    keys = {(names[id(each)], str(key)): key for each, of in optimizer.state.items() for key in of}
    everyone = world.gather((keys, _groups(optimizer, names)), "the groups of optimizers")
    for of_rank, _ in everyone:
        keys = of_rank | keys
    state: dict[str, dict[Any, Any]] = {}
    for (name, key), value in whole_entries(kept, world).items():
        state.setdefault(name, {})[keys[name, key]] = value
    order = {name: None for name in names.values()}
    return {
        "class": type(optimizer).__name__,
        "state": {name: state[name] for name in order if name in state},
        "groups": joined_groups([each for _, each in everyone], list(order)),
    }


def check_options(state: Mapping[str, Any], options: TrainStep, has_optimizer: bool) -> None:
    """Raise `AutoparError` for a saved state of training of other options."""
    problems: list[str] = []
    for what, theirs, ours in (
        ("an optimizer", state["optimizer"] is not None, has_optimizer),
        ("a loss scale", state["loss_scale"] is not None, options.loss_scale is not None),
    ):
        if theirs != ours:
            problems.append(f"{what} is in the saved state {'alone' if theirs else 'not, and here one is used'}")
    if state["ema"] and options.ema is None:
        problems.append("averages (ema=) are in the saved state alone")
    if state["num_calls"] % options.accumulate:
        problems.append(f"{state['num_calls']} calls were made, and accumulate={options.accumulate} does not divide them")
    if problems:
        raise AutoparError("the saved state of training does not fit: " + "; ".join(problems) + ". Compile with the options of that run")


def _groups(optimizer: Optimizer, names: Mapping[int, str]) -> list[dict[str, Any]]:
    return [
        {key: [names[id(each)] for each in value] if key == "params" else _copied(value) for key, value in group.items()}
        for group in optimizer.param_groups
    ]


def joined_groups(groups: list[list[dict[str, Any]]], order: list[str]) -> list[dict[str, Any]]:
    """The groups of all stages: each has those of its parameters that one of them holds, in the order of the model."""
    numbers = {len(each) for each in groups}
    if len(numbers) > 1:
        raise AutoparError(f"stages made optimizers of {sorted(numbers)} groups; make as many on each, perhaps without parameters")
    found: list[dict[str, Any]] = []
    for of_ranks in zip(*groups, strict=True):
        names = {name for group in of_ranks for name in group["params"]}
        found.append({**of_ranks[0], "params": [name for name in order if name in names]})
    return found


def check_optimizer_state(state: Mapping[str, Any], optimizer: Optimizer, names: Mapping[int, str], world: World) -> None:
    """Raise `AutoparError` where a saved state is not one of an optimizer of these parameters. Collective."""
    mine = joined_groups(world.gather(_groups(optimizer, names), "the groups of optimizers"), list(dict.fromkeys(names.values())))

    def check() -> None:
        _check_class(state.get("class"), optimizer)
        _check_groups(mine, state["groups"])

    agreed(world, check, "a check of the saved state of the optimizer")


# They keep the same.
_ALIKE = frozenset(("Adam", "AdamW"))


def _check_class(saved: str | None, optimizer: Optimizer) -> None:
    names = {each.__name__ for each in type(optimizer).__mro__}
    if saved is not None and saved not in names and not (saved in _ALIKE and not names.isdisjoint(_ALIKE)):
        raise AutoparError(
            f"the saved state is one of {saved}, and the optimizer here is {type(optimizer).__name__}: compile with that of the saved run, "
            'or take state["optimizer"]["class"] out where both keep the same'
        )


def _check_groups(mine: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    if len(mine) != len(saved):
        raise AutoparError(f"the saved optimizer has {len(saved)} groups of parameters, this one {len(mine)}")
    for number, (ours, theirs) in enumerate(zip(mine, saved, strict=True)):
        different = set(ours["params"]) ^ set(theirs["params"])
        if different:
            whose = "the saved optimizer's" if min(different) in theirs["params"] else "this optimizer's"
            raise AutoparError(f"group {number} is of other parameters: {min(different)!r} is in {whose} alone ({len(different)} differ)")


def load_optimizer_state(
    state: Mapping[str, Any],
    optimizer: Optimizer,
    parameters: Mapping[str, nn.Parameter],
    wholes: Any,
    world: World,
    stays: bool = False,
) -> None:
    """Give `optimizer` what was saved, where the parameters are unless it `stays` where it is; `wholes` has those that it sees whole."""
    take_groups(optimizer, state["groups"])
    chosen = {id(each) for group in optimizer.param_groups for each in group["params"]}
    placed: dict[str, dict[Any, Any]] = {}
    for name, entries in state["state"].items():
        parameter = parameters.get(name)
        if parameter is not None and id(parameter) in chosen:
            is_whole = wholes is not None and parameter in wholes
            device = None if stays else local_of(parameter).device
            placed[name] = {key: _placed(_on(value, key, device), key, parameter, name, is_whole, world) for key, value in entries.items()}
    give_optimizer_state(optimizer, parameters, placed)


def take_groups(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """Give the groups of `optimizer` the options of others, of as many and of the same parameters."""
    for group, theirs in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: _copied(value) for key, value in theirs.items() if key != "params"})


def give_optimizer_state(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], state: Mapping[str, dict[Any, Any]]) -> None:
    """Let `optimizer` have this state by the names of parameters, and no other."""
    optimizer.state.clear()
    for name, entries in state.items():
        optimizer.state[parameters[name]] = entries


def _on(value: Any, key: Any, device: torch.device | None) -> Any:
    """On a device, where it may have been read onto another; steps, which are asked for on the host as a rule, as they are."""
    return value.to(device) if isinstance(value, torch.Tensor) and device is not None and key != "step" else value


def _placed(value: Any, key: Any, parameter: nn.Parameter, name: str, is_whole: bool, world: World) -> Any:
    if not isinstance(value, torch.Tensor) or not isinstance(parameter, DTensor) or is_whole or not value.ndim or key == "step":
        return _copied(value)
    if value.shape == parameter.shape:
        return placed_like(value, parameter, name, world)
    mesh = parameter.device_mesh  # a statistic of the whole: the optimizer sees DTensors
    return DTensor.from_local(_copied(value), mesh, [Replicate()] * mesh.ndim, run_check=False)


@torch.no_grad()
def average(averages: dict[str, torch.Tensor], parameters: Mapping[str, nn.Parameter], decay: float) -> None:
    """Take into exponential moving `averages` what parameters are now; the first time as they are."""
    for name, parameter in parameters.items():
        now = parameter.detach()
        if name not in averages:
            averages[name] = now.clone()
        elif now.is_floating_point() or now.is_complex():
            local_of(averages[name]).lerp_(local_of(now), 1 - decay)
        else:
            local_of(averages[name]).copy_(local_of(now))
