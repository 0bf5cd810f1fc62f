"""The option `weights=`: where a model's values come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from autopar.errors import MeshError, WeightsError
from autopar.ir.mesh import Mesh
from autopar.runtime._torch import hand_on_hooks
from autopar.runtime.birth.files import Files
from autopar.runtime.birth.from_first import FromFirst
from autopar.runtime.birth.initialise import Initialised
from autopar.runtime.birth.initialisers import Initialise
from autopar.runtime.birth.slots import names_of, put, slots_of
from autopar.runtime.birth.values import Values
from autopar.runtime.execute.process_groups import ProcessGroups
from autopar.runtime.module.parameters import Placement

INIT, RANK0 = "init", "rank0"
UserWeights: TypeAlias = "Weights | str | Path | Initialise | None"


@dataclass(frozen=True)
class Weights:
    """Where values come from; `autopar.compile(weights=...)` takes `source` alone, too.

    source  "init": the model's own initialisers give tensors on meta their values; what a model's __init__ does by hand to values that it
            has set is not repeated. A function of a module: likewise, and it is called for every module after the module's own. A path:
            safetensors, see `autopar.runtime.birth.files`. "rank0": the values that the model has on rank 0
    cast    convert what a file has in another dtype
    """

    source: str | Path | Initialise
    cast: bool = False

    @staticmethod
    def of(given: UserWeights) -> Weights | None:
        if given is None or isinstance(given, Weights):
            return given
        if not (isinstance(given, (str, Path)) or callable(given)):
            raise WeightsError(f'weights={given!r} is neither "init", "rank0", a path of safetensors files nor a function of a module')
        return Weights(given)

    def give(self, model: nn.Module) -> None:
        """Every tensor of `model` for which there are values gets them, whole; ties stay ties. One that has values is written into.

        Raises `WeightsError`, and changes nothing, where these weights are not the model's.
        """
        if self.source == RANK0:
            return  # this process is rank 0
        _give(model, self._values(model, torch.initial_seed()), None)

    def agreed(self, model: nn.Module, groups: ProcessGroups, mesh: Mesh) -> Values:
        """The values on real ranks, once these agree about them. Collective; raises on all ranks alike."""
        seed = int(groups.gather(torch.initial_seed())[0])
        return _agreed(lambda: FromFirst(model, groups, mesh) if self.source == RANK0 else self._values(model, seed), groups.gather)

    def _values(self, model: nn.Module, seed: int) -> Values:
        if isinstance(self.source, (str, Path)) and self.source != INIT:
            return _FilesFirst(model, Files(model, self.source, self.cast), seed)
        return Initialised(model, seed, None if isinstance(self.source, (str, Path)) else self.source)


class _FilesFirst(Values):
    """What files have, and what the model's initialisers make of the rest: of what is not saved."""

    def __init__(self, model: nn.Module, files: Files, seed: int) -> None:
        self._files = files
        slots = {name: tensor for name, tensor in slots_of(model).items() if name not in files}
        rest = any(slots[name].is_meta for name in names_of(model) if name in slots)
        self._rest: Values | None = Initialised(model, seed, given=files) if rest else None
        self._slots = slots
        self.identity = {**files.identity, **(self._rest.identity if self._rest is not None else {})}

    def __contains__(self, name: str) -> bool:
        return name in self._files or (self._rest is not None and name in self._rest)

    def whole(self, name: str) -> torch.Tensor:
        if name in self._files:
            return self._files.whole(name)
        return self._slots[name].detach() if self._rest is None else self._rest.whole(name)

    def part(self, name: str, placement: Placement, rank: int) -> torch.Tensor:
        return self._files.part(name, placement, rank) if name in self._files else super().part(name, placement, rank)


def place_buffers(model: nn.Module, values: Values | None, device: torch.device) -> None:
    """The buffers of `model` get their values, each whole, and all are on `device` then: a model may have been built on the CPU."""
    if values is not None:
        _give(model, values, device, buffers_alone=True)
    slots = slots_of(model)
    for first, names in names_of(model).items():
        tensor = slots[first]
        if not isinstance(tensor, nn.Parameter) and not tensor.is_meta and tensor.device != device:
            tensor = tensor.to(device)
            for name in names:
                put(model, name, tensor)


def _give(model: nn.Module, values: Values, device: torch.device | None, buffers_alone: bool = False) -> None:
    slots = slots_of(model)
    for first, names in names_of(model).items():
        tensor = slots[first]
        if first not in values or (buffers_alone and isinstance(tensor, nn.Parameter)):
            continue
        new = values.whole(first)
        if not tensor.is_meta:
            tensor.data.copy_(new)
            continue
        new = new if device is None else new.to(device)
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(new, requires_grad=tensor.requires_grad)
            hand_on_hooks(tensor, new)
        for name in names:
            put(model, name, new)


def _agreed(make: Callable[[], Values], gather: Callable[..., Sequence[Any]]) -> Values:
    """What `make` gives on this rank, once all ranks have made theirs and they are the same. Collective; raises on all ranks alike."""
    values, error = None, None
    try:
        values = make()
    except WeightsError as caught:  # the peers must hear of it
        error = caught
    everyone = gather((None if values is None else values.identity, error and str(error)), "a comparison of the ranks' weights")
    for rank, (_, text) in enumerate(everyone):
        if text is not None:
            raise error or WeightsError(f"on rank {rank}: {text}")
    assert values is not None
    first = everyone[0][0]
    for rank, (theirs, _) in enumerate(everyone):
        differing = [name for name in {**first, **theirs} if theirs.get(name) != first.get(name)]
        if differing:
            told = " and ".join(f"{each.get(differing[0], 'nothing')} on rank {place}" for place, each in ((0, first), (rank, theirs)))
            raise MeshError(
                f"ranks have other weights: {differing[0]!r} is {told} ({len(differing)} parameters and buffers differ); build one model "
                "on all ranks, on meta or with one seed, and let all read the same files"
            )
    return values
