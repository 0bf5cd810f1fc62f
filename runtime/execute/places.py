"""Where the ranks of this process hold the inputs and results of a compiled call: found once, read at every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch

from autopar.driver.compiled import Compiled
from autopar.errors import InputError
from autopar.graph.microbatches import summed
from autopar.ir.mesh import MICROBATCHES, Mesh
from autopar.ir.program import Input, Output
from autopar.ir.schedule import Schedule


class ResultPlace(NamedTuple):
    """`buffers` are (place on `mesh`, rank, name), the first of a place counts. `mesh` is that of one stage, with microbatches where
    ranks hold a part of each; `item` is the result as it lies on it."""

    item: Output
    mesh: Mesh
    buffers: tuple[tuple[int, int, str], ...]


class InputPlace(NamedTuple):
    """One buffer that holds an input: its `place` is by rank, and by microbatch where there are several."""

    place: int
    rank: int
    name: str


@dataclass
class Places:
    """By input and result of `compiled` where `ranks` hold it."""

    compiled: Compiled
    ranks: Sequence[int]
    _found: dict[tuple[str, str], ResultPlace] = field(default_factory=dict[tuple[str, str], ResultPlace])
    _inputs: dict[tuple[str, str], tuple[InputPlace, ...]] = field(default_factory=dict[tuple[str, str], tuple[InputPlace, ...]])
    _constants: dict[tuple[str, torch.device], torch.Tensor] = field(default_factory=dict[tuple[str, torch.device], torch.Tensor])

    @cached_property
    def schedules(self) -> Mapping[int, Schedule]:
        """By rank what it runs."""
        return {rank: self.compiled.schedule_of(rank) for rank in self.ranks}

    @cached_property
    def parameters(self) -> tuple[tuple[Input, tuple[InputPlace, ...]], ...]:
        """The parameters that these ranks are given, with their buffers."""
        return tuple((item, self.of_input(item)) for item in self.compiled.signature.inputs_of("parameter"))

    @cached_property
    def gradients(self) -> tuple[tuple[str, ResultPlace], ...]:
        """By name of a parameter where these ranks hold its gradient, or parts of it; only those that they hold any of."""
        places = ((item.name, self.of(item)) for item in self.compiled.signature.outputs_of("gradient"))
        return tuple((name, place) for name, place in places if place.buffers)

    @cached_property
    def through(self) -> Mapping[str, tuple[str, ...]] | None:
        """By name of a parameter the results through which its gradient comes back; None where that is all of them for each."""
        signature = self.compiled.signature
        gradients, number = signature.outputs_of("gradient"), len(signature.inputs_of("tangent"))
        is_all = all(len(item.through) in (0, number) for item in gradients)
        return None if is_all else {item.name: item.through for item in gradients}

    def constant(self, name: str, device: torch.device) -> torch.Tensor:
        """A constant of the program on `device`, where it stays: copying it there at every step would keep the host waiting.

        One on meta, of a model that was planned there, can be empty. Raises `InputError` where it is not.
        """
        key = name, device
        if key not in self._constants:
            constant = self.compiled.constants[name]
            if constant.is_meta and constant.numel():
                raise InputError(
                    f"forward makes a tensor of shape {list(constant.shape)} ({name!r}) where the model is, which was on meta when it was "
                    "compiled: its numbers are not known. Compile the model again now that it has values; with weights=, which fills "
                    "parameters and buffers alone, register what a module holds as a plain attribute (register_buffer)"
                )
            self._constants[key] = torch.empty_like(constant, device=device) if constant.is_meta else constant.to(device)
        return self._constants[key]

    def of_input(self, item: Input) -> tuple[InputPlace, ...]:
        key = item.kind, item.name
        if key not in self._inputs:
            each = self.compiled.mesh.num_microbatches
            self._inputs[key] = tuple(
                InputPlace(rank * each + schedule.microbatch_of(name), rank, name)
                for rank, schedule in self.schedules.items()
                for name in buffers_of(item, schedule)
            )
        return self._inputs[key]

    def of(self, item: Output) -> ResultPlace:
        key = item.kind, item.name
        if key not in self._found:
            self._found[key] = self._find(item)
        return self._found[key]

    def _find(self, item: Output) -> ResultPlace:
        mesh = self.compiled.mesh
        number = next(len(names) for schedule in self.compiled.schedules if (names := buffers_of(item, schedule)))
        one_stage = mesh.without("pp") if number > 1 else mesh.without("pp", MICROBATCHES)
        found: list[tuple[int, int, str]] = []
        for rank in self.ranks:
            place = mesh.ranks.project(rank, one_stage.ranks) * number
            found += [(place + index, rank, name) for index, name in enumerate(buffers_of(item, self.schedules[rank]))]
        return ResultPlace(replace(item, sharding=item.sharding and summed(item.sharding)), one_stage, tuple(found))


def buffers_of(item: Input | Output, schedule: Schedule) -> tuple[str, ...]:
    """The buffers that hold `item`; none where the rank has no use for it."""
    return (schedule.fed if isinstance(item, Input) else schedule.left).get((item.kind, item.name), ())
