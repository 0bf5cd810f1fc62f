"""Go on from a checkpoint: all of it is checked, compared and found readable before anything of the module is changed."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from autopar.errors import CheckpointError
from autopar.runtime._torch import local_part
from autopar.runtime.checkpoint.background import wait_for_saving
from autopar.runtime.checkpoint.data import DATA, StatefulData, num_places, place_of, state_for
from autopar.runtime.checkpoint.folders import find
from autopar.runtime.checkpoint.held import EMA, MODEL, OPTIMIZER, ModelState, held_of, model_state, names_of, the_optimizer
from autopar.runtime.checkpoint.index import Index, Stored, form_of
from autopar.runtime.checkpoint.ranks import Ranks
from autopar.runtime.checkpoint.reading import Reading
from autopar.runtime.checkpoint.slices import Slices, whole
from autopar.runtime.checkpoint.values import decode
from autopar.runtime.execute.world import local_of
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.module.placement import like
from autopar.runtime.train.state import check_optimizer_state, check_options, give_optimizer_state, take_groups

_SHOWN = 4


def load(
    folder: str | os.PathLike[str],
    parallel: ParallelModule,
    optimizer: Optimizer | None = None,
    cast: bool = False,
    *,
    data: StatefulData | Literal[False] | None = None,
    global_data: bool = False,
    model_only: bool = False,
) -> Any:
    """Go on from the latest checkpoint in `folder`, or from `folder`, where that is one; its note. Collective.

    Each process reads of the files what it holds of the tensors, into the memory that these have; the mesh, the pipeline, the level of ZeRO
    and `precision=` may be others than those of the run that saved. Nothing in the folder is run, and nothing is changed before all of it
    is checked.

    cast        takes parameters, buffers and what lies as they do in the dtype that they have here, where that is another
    data        what goes on from the position that was saved of it, before it draws anything; False leaves that out
    global_data the position in the data is that of the global batch, whatever dp is: it goes on on another dp, too
    model_only  leaves out optimizer, averages, loss scale, seed, counts and the position in the data

    Raises `CheckpointError`, on all ranks, where a file is missing or damaged (its SHA-256, its form), where names, shapes, dtypes or ties
    differ, or where only one of both has an optimizer, or a position in the data; `AutoparError` for other options of `train_step`. Then
    nothing has changed.
    """
    wait_for_saving(parallel._world)
    ranks = Ranks.of(parallel._world)
    place = ranks.gather(_found(Path(folder)) if ranks.rank == 0 else None, "the latest checkpoint")[0]
    kinds = (MODEL,) if model_only else None
    reading = ranks.attempt("read the index", lambda: Reading(Path(folder) / place if place else find(Path(folder)), kinds))
    ranks.attempt("check the files", lambda: reading.check(ranks.rank, ranks.size))
    loading = ranks.attempt("compare the checkpoint with the module", lambda: Loading(reading, parallel, optimizer, cast, model_only))
    if not model_only:
        loading.check_groups()
        state = ranks.attempt("read the position in the data", lambda: loading.position(data, global_data))
        ranks.attempt("read what optimizers keep", loading.read_state)
        if data is not None and data is not False:
            ranks.attempt("give data= its position", lambda: data.load_state_dict(state))
    ranks.attempt("read the model", loading.apply)
    return reading.index.note


def _found(folder: Path) -> str:
    """The name of the latest checkpoint; "" where `folder` is one, or has none: then each rank says so."""
    try:
        found = find(folder)
    except CheckpointError:
        return ""
    return found.name if found != folder else ""


@dataclass(frozen=True)
class _Entry:
    """A tensor of an optimizer in the index, in place of its value."""

    name: str


class Source(Protocol):
    """A checkpoint, or files that have at least a model."""

    path: Path
    index: Index

    def require(self, name: str, stored: Stored, slices: Slices) -> None: ...
    def read(self, name: str, stored: Stored, slices: Slices, target: torch.Tensor) -> None: ...


class Loading:
    """What is to be changed, once all of it is known. Raises `CheckpointError` where it does not fit."""

    def __init__(self, reading: Source, parallel: ParallelModule, optimizer: Optimizer | None, cast: bool, model_only: bool) -> None:
        self._reading, self._parallel, self._cast = reading, parallel, cast
        self._index, self._model = reading.index, model_state(parallel)
        self._parameters: Mapping[str, nn.Parameter] = dict(parallel.named_parameters())
        self._optimizer = None if model_only else the_optimizer(parallel, optimizer)
        self._has_training = not model_only
        problems = model_problems(self._index, self._model, cast)
        if problems:
            more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            raise CheckpointError(f"{reading.path} is of another model: {'; '.join(problems[:_SHOWN])}{more}. Nothing was changed")
        self._groups: list[dict[str, Any]] = []
        self._state: dict[str, dict[Any, Any]] = {}
        self._fresh: dict[str, dict[Any, Any]] = {}
        self._averages: dict[str, torch.Tensor] = {}
        self._own = _Memory.of(self._optimizer, [*self._parameters.values(), *parallel._trainer.averages.values()])
        self._refilled: list[_Refilled] = []
        self._extra = {name: self._decoded(value, _no_entry) for name, value in self._index.extra.items()}
        for name, held in self._model.held.items():
            reading.require(name, self._index.tensors[MODEL][name], held.slices)
        if self._has_training:
            self._compare_training()
            self._decode_optimizer()

    def _compare_training(self) -> None:
        parallel, index = self._parallel, self._index
        saved, here = index.optimizer and index.optimizer["class"], self._optimizer and type(self._optimizer).__name__
        if saved != here:
            raise CheckpointError(
                f"{self._reading.path} has the state of {_an(saved)}, and here there is {_an(here)}: pass optimizer=, or compile with it, "
                "or load the model alone by model_only=True"
            )
        training = dict(index.training)
        if (training["scaler"] is None) != (parallel._scaler is None):
            which = "is in use here and not in" if training["scaler"] is None else "is not in use here and in"
            when = "after" if training["scaler"] is None else "before"
            raise CheckpointError(f"parallel.scaler() {which} {self._reading.path}: make one {when} load")
        averages = index.tensors.get(EMA, {})
        check_options({**training, "optimizer": None, "ema": averages}, parallel._trainer.options, has_optimizer=False)
        for name, stored in averages.items():
            if (stored.dtype, stored.shape) != self._as_saved(name):
                raise CheckpointError(
                    f"the average of {name!r} is {stored.form}, and the parameter is not: {self._reading.path} is damaged"
                )

    def _as_saved(self, name: str) -> tuple[torch.dtype, tuple[int, ...]] | None:
        stored = self._index.tensors[MODEL].get(name)
        return stored and (stored.dtype, stored.shape)

    def _decode_optimizer(self) -> None:
        values = self._index.optimizer
        if values is None:
            return
        tensors, known = self._index.tensors.get(OPTIMIZER, {}), set(names_of(self._parallel._model).values())

        def entry(name: str) -> _Entry:
            if name not in tensors:
                raise CheckpointError(f"the optimizer's {name!r} is not in the index")
            return _Entry(name)

        for group in values["groups"]:
            options = {key: self._decoded(value, entry) for key, value in group["options"].items()}
            self._groups.append({**options, "params": list(group["params"])})
        self._state = {name: self._decoded(value, entry) for name, value in values["state"].items()}
        if strange := set(self._state) - known:
            raise CheckpointError(f"{self._reading.path}: the optimizer's state is of {min(strange)!r}, which is no parameter of the model")

    def _decoded(self, value: Any, entry: Callable[[str], Any]) -> Any:
        try:
            return decode(value, entry)
        except CheckpointError as error:
            raise CheckpointError(f"{self._reading.path}: {error}") from error

    def position(self, data: StatefulData | Literal[False] | None, is_global: bool) -> Any:
        """The state that `data` goes on from."""
        saved, path = self._index.data, self._reading.path
        if data is False or (data is None and saved is None):
            return None
        if data is None:
            raise CheckpointError(f"{path} has a position in the data: pass data=, the loader, which then goes on there, or data=False")
        if saved is None:
            raise CheckpointError(f"{path} has no position in the data: leave out data=, or pass it to autopar.save")
        if not isinstance(data, StatefulData):
            raise CheckpointError(f"data= is a {type(data).__name__}, which has no state_dict() and load_state_dict()")
        tensors = self._index.tensors.get(DATA, {})
        own = state_for(saved, place_of(self._parallel), num_places(self._parallel), is_global, path)

        def fetch(name: str) -> torch.Tensor:
            if name not in tensors:
                raise CheckpointError(f"the tensor {name!r} of the position in the data is not in the index")
            return self._read_whole(name, tensors[name])

        return self._decoded(own, fetch)

    def check_groups(self) -> None:
        """Collective. Raises where the optimizer's groups are of other parameters."""
        if self._optimizer is not None:
            check_optimizer_state({"groups": self._groups}, self._optimizer, names_of(self._parallel._model), self._parallel._world)

    def read_state(self) -> None:
        """Read what optimizers keep, and averages, as far as it has no memory here yet. Where it has, that is written last of all."""
        if self._optimizer is not None:
            pairs = zip(self._optimizer.param_groups, self._groups, strict=True)
            options = {id(each): {**group, **saved} for group, saved in pairs for each in group["params"]}
            part = self._parallel._trainer.wholes
            for name, entries in self._state.items():
                parameter = self._parameters.get(name)
                if parameter is not None and id(parameter) in options:
                    is_whole = part is not None and parameter in part
                    place = _Place(name, parameter, is_whole, options[id(parameter)], dict(self._optimizer.state.get(parameter, {})))
                    self._fresh[name] = {key: self._made(value, key, place) for key, value in entries.items()}
            self._groups = [_mapped(group, lambda each: self._whole(each.name)) for group in self._groups]
        for name, stored in self._index.tensors.get(EMA, {}).items():
            if name in self._parameters:
                there = self._parallel._trainer.averages.get(name)
                self._averages[name] = self._lying_as(self._parameters[name], name, stored, name, there)

    def _made(self, value: Any, key: Any, place: _Place) -> Any:
        return _mapped(value, lambda each: self._entry(each.name, key, place))

    def _entry(self, name: str, key: Any, place: _Place) -> torch.Tensor:
        stored, parameter = self._index.tensors[OPTIMIZER][name], place.parameter
        if stored.shape == tuple(parameter.shape) and stored.shape and not place.is_whole and key != "step":
            return self._lying_as(parameter, place.name, stored, name, place.state.get(key))
        value = self._whole(name).to(_device(key, place))
        if not value.ndim or key == "step" or place.is_whole or not isinstance(parameter, DTensor):
            return value
        mesh = parameter.device_mesh  # a statistic of the whole: the optimizer sees DTensors
        return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)

    def _whole(self, name: str) -> torch.Tensor:
        return self._read_whole(name, self._index.tensors[OPTIMIZER][name])

    def _read_whole(self, name: str, stored: Stored) -> torch.Tensor:
        value = torch.empty(stored.shape, dtype=stored.dtype)
        self._reading.read(name, stored, whole(stored.shape), value)
        return value

    def _lying_as(self, parameter: nn.Parameter, of: str, stored: Stored, name: str, there: Any) -> torch.Tensor:
        """A tensor that lies as a parameter does: `there`, what is there already, if it can be taken, else a new one."""
        held = held_of(parameter, of, self._parallel._world)
        saved = self._index.tensors[MODEL][of].dtype
        dtype = parameter.dtype if self._cast and stored.dtype == saved else stored.dtype
        if isinstance(there, torch.Tensor) and isinstance(there, DTensor) == isinstance(parameter, DTensor):
            own = local_of(there).detach()
            if (own.shape, own.dtype, own.device) == (held.tensor.shape, dtype, held.tensor.device) and self._own.is_alone(own):
                self._reading.require(name, stored, held.slices)
                self._refilled.append(_Refilled(name, stored, held.slices, own))
                return there
        local = torch.empty_like(held.tensor, dtype=dtype)
        self._reading.read(name, stored, held.slices, local)
        return like(parameter, local) if isinstance(parameter, DTensor) else local

    @torch.no_grad()
    def apply(self) -> None:
        """Change the module."""
        parallel, trainer = self._parallel, self._parallel._trainer
        for each in self._refilled:
            self._reading.read(each.name, each.stored, each.slices, each.target)
        for name, held in self._model.held.items():
            self._reading.read(name, self._index.tensors[MODEL][name], held.slices, held.tensor)
        for name, value in self._extra.items():
            parallel._model.get_submodule(name.rpartition(".")[0]).set_extra_state(value)
        if not self._has_training:
            return
        if self._optimizer is not None:
            take_groups(self._optimizer, self._groups)
            give_optimizer_state(self._optimizer, self._parameters, self._fresh)
        training = self._index.training
        trainer.take(training, self._averages)
        if parallel._scaler is not None:
            parallel._scaler.load_state_dict(training["scaler"])
        parallel.seed, parallel.step = training["seed"], training["step"]


@dataclass(frozen=True)
class _Place:
    """A parameter, whether its optimizer sees it whole, the options that its group will have, and what the optimizer keeps of it now."""

    name: str
    parameter: nn.Parameter
    is_whole: bool
    options: Mapping[str, Any]
    state: Mapping[Any, Any]


def _device(key: Any, place: _Place) -> torch.device:
    """Where torch's optimizers look for an entry: steps on the CPU unless captured or fused, all else with the parameter."""
    if key == "step" and not (place.options.get("capturable") or place.options.get("fused")):
        return torch.device("cpu")
    return (local_part(place.parameter) if isinstance(place.parameter, DTensor) else place.parameter).device


@dataclass(frozen=True)
class _Refilled:
    """What `target`, which the optimizer has, is to be."""

    name: str
    stored: Stored
    slices: Slices
    target: torch.Tensor


class _Memory:
    """How many of these tensors lie in each piece of memory."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._numbers = Counter(local_of(each).untyped_storage().data_ptr() for each in tensors if not each.is_meta)

    @staticmethod
    def of(optimizer: Optimizer | None, others: Iterable[torch.Tensor]) -> _Memory:
        kept = [] if optimizer is None else [value for of in optimizer.state.values() for value in of.values()]
        return _Memory([*others, *(each for each in kept if isinstance(each, torch.Tensor))])

    def is_alone(self, tensor: torch.Tensor) -> bool:
        """What is written there is seen in no other of them."""
        return self._numbers[tensor.untyped_storage().data_ptr()] == 1


def _mapped(value: Any, make: Callable[[_Entry], torch.Tensor]) -> Any:
    match value:
        case _Entry():
            return make(value)
        case list() | tuple():
            return type(value)(_mapped(each, make) for each in value)
        case dict():
            return {key: _mapped(each, make) for key, each in value.items()}
        case _:
            return value


def _no_entry(name: str) -> Any:
    raise CheckpointError(f"the index names a tensor, {name!r}, where none can be")


def _an(optimizer: str | None) -> str:
    return f"the optimizer {optimizer}" if optimizer else "no optimizer"


def model_problems(index: Index, model: ModelState, cast: bool) -> list[str]:
    """Where names, shapes, dtypes or ties of the saved model are not those of this one."""
    saved, problems = index.tensors.get(MODEL, {}), list[str]()
    for name in dict.fromkeys((*saved, *index.ties, *index.extra, *model.forms, *model.ties, *model.extra)):
        there, here = _what(name, index.ties, index.extra), _what(name, model.ties, model.extra)
        if name in saved:
            there = saved[name].form
        if name in model.forms:
            here = form_of(*model.forms[name])
        if there != here:
            alike = name in saved and name in model.forms and saved[name].shape == model.forms[name][1]
            if not (alike and cast):
                problems.append(f"{name!r} is {there} there and {here} here{' (cast=True takes it)' if alike else ''}")
    return problems


def _what(name: str, ties: Mapping[str, str], extra: Mapping[str, Any]) -> str:
    if name in ties:
        return f"tied to {ties[name]!r}"
    return "an extra state" if name in extra else "missing"
