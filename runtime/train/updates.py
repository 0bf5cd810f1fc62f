"""What UPDATE does with gradients: parts of all ranks become the gradient of a parameter, and the optimizer is called for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from autopar.ir.instructions import Update
from autopar.ir.schedule import Schedule
from autopar.runtime.execute.call import Call
from autopar.runtime.execute.owned_memory import OwnedMemory
from autopar.runtime.execute.world import RankParts, local_of


class Updates:
    """Takes the gradients of one call, rank by rank. A parameter's is complete when every rank of this process that holds it, in
    whichever stage, has brought its part; on virtual ranks nobody writes a parameter before, which all may read.

    `apply` is called with the names of parameters once their gradients, added to what was there, are in `parameter.grad`. Without it
    gradients are kept: `commit` adds them.
    """

    def __init__(self, call: Call, parameters: Mapping[str, nn.Parameter], apply: Callable[[Sequence[str]], None] | None) -> None:
        self._call, self._parameters, self._apply = call, parameters, apply
        self._outputs = {item.name: item for item in call.signature.outputs_of("gradient")}
        self._inputs = {item.name: item for item in call.signature.inputs_of("parameter")}
        self._names = {rank: _parameters_of(schedule) for rank, schedule in call.schedules.items()}
        self._is_alone = len(call.states) == 1
        # By the name of a parameter and the number of its update; and how many a rank has brought its part of.
        self._parts: dict[tuple[str, int], dict[int, torch.Tensor]] = {}
        self._brought = Counter[tuple[int, str]]()
        self._kept: dict[str, torch.Tensor] = {}

    def take(self, rank: int, instruction: Update, gradients: Sequence[torch.Tensor]) -> None:
        if self._is_alone:  # parts of several ranks may be one tensor
            buffers = self._call.states[rank].buffers
            others = map(buffers.__getitem__, buffers.keys() - set(instruction.gradients))
            gradients = OwnedMemory(self._call.transports, others).own(gradients)
        complete: list[tuple[str, int]] = []
        for buffer, gradient in zip(instruction.parameters, gradients, strict=True):
            name = self._names[rank][buffer]
            key = name, self._brought[rank, name]
            self._brought[rank, name] += 1
            parts = self._parts.setdefault(key, {})
            parts[rank] = gradient
            if len(parts) == len(self._ranks_of(name)):
                complete.append(key)
        # Of several ranks one by one: parts are let go of as wholes are made.
        for keys in [complete] if self._is_alone else [[key] for key in complete]:
            names = [name for name, _ in keys]
            held = [self._held(name, self._parts.pop((name, number))) for name, number in keys]
            wholes = self._call.world.gradients(held, [self._parameters[name] for name in names], self._own)
            self._kept.update(zip(names, wholes, strict=True))
            del held, wholes
        if self._apply is not None and complete:
            self.commit()
            self._apply([name for name, _ in complete])

    def renewal(self, rank: int, instruction: Update) -> Renewed:
        """What an UPDATE gives that has versions, once it is taken."""
        return Renewed(self, rank, instruction)

    def missing(self, rank: int, instruction: Update) -> tuple[int, ...]:
        """The ranks of this process without whose gradients parameters do not have the update yet that `rank` had a part in last."""
        found: set[int] = set()
        for name in (self._names[rank][buffer] for buffer in instruction.parameters):
            parts = self._parts.get((name, self._brought[rank, name] - 1))
            found |= set() if parts is None else self._ranks_of(name) - parts.keys()
        return tuple(sorted(found))

    def versions(self, rank: int, instruction: Update) -> list[torch.Tensor]:
        return [self._call.version(rank, buffer, self._inputs[self._names[rank][buffer]]) for buffer in instruction.parameters]

    def commit(self) -> None:
        """Add what was kept to the gradients that parameters have."""
        for name, gradient in self._kept.items():
            parameter = self._parameters[name]
            if parameter.grad is None:
                if gradient.dtype != parameter.dtype:
                    parameter.grad_dtype = gradient.dtype  # until the update casts it
                parameter.grad = gradient
            else:
                local_of(parameter.grad).add_(local_of(gradient))
        self._kept.clear()

    def _ranks_of(self, name: str) -> set[int]:
        return {rank for _, rank, _ in self._call.places.of(self._outputs[name]).buffers}

    def _held(self, name: str, brought: Mapping[int, torch.Tensor]) -> RankParts:
        found = self._call.places.of(self._outputs[name])
        parts: dict[int, torch.Tensor] = {}
        for place, rank, _ in found.buffers:
            parts.setdefault(place, brought[rank])
        return RankParts(parts, found.item, found.mesh)

    def _own(self, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Those of one rank are their own since they were taken."""
        return parts if self._is_alone else [part.clone() for part in parts]


@dataclass(frozen=True)
class Renewed:
    """The next version of the parameters of an UPDATE on a rank; virtual ranks wait for each other."""

    updates: Updates
    rank: int
    instruction: Update

    @property
    def missing(self) -> tuple[int, ...]:
        return self.updates.missing(self.rank, self.instruction)

    def versions(self) -> list[torch.Tensor]:
        return self.updates.versions(self.rank, self.instruction)

    def wanted_by(self, rank: int) -> str:
        """What `rank` executes, and who did not."""
        text = str(self.instruction)
        return f"{text[:300]}: ranks {', '.join(map(str, self.missing))} did not bring their gradients"


def accumulated(names: Sequence[str]) -> None:
    """What an UPDATE does between the calls that accumulate gradients: they lie in `parameter.grad`, for later calls to add theirs."""


def _parameters_of(schedule: Schedule) -> dict[str, str]:
    """The names of parameters by their buffers."""
    items = zip(schedule.signature.inputs, schedule.inputs, strict=True)
    return {buffer: item.name for item, buffer in items if item.kind == "parameter"}
