"""All ranks of a mesh inside this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from autopar.driver.compiled import Compiled
from autopar.graph.model_device import model_device
from autopar.ir.mesh import Mesh
from autopar.ir.padding import unpadded
from autopar.ir.program import Input, Output
from autopar.runtime.birth.values import Values
from autopar.runtime.execute.interpreter import Execution
from autopar.runtime.execute.recorder import MeshRecorder
from autopar.runtime.execute.transport import Transport
from autopar.runtime.execute.virtual import Rendezvous, VirtualTransport, drive
from autopar.runtime.execute.world import Own, Parts, RankParts
from autopar.runtime.module.parameters import assemble, local_shard, replicas
from autopar.runtime.offload.stored import store_global


class VirtualWorld:
    """All ranks of `mesh` inside this process."""

    is_virtual = True
    is_expecting = False
    recorder: MeshRecorder | None = None  # virtual ranks that block are named at once

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.ranks = tuple(range(mesh.size))

    def device(self, model: nn.Module) -> torch.device:
        return model_device(model)

    def prepare(self, compiled: Compiled) -> None:
        return None

    def place(self, model: nn.Module, compiled: Compiled, values: Values | None = None) -> None:
        store_global(model, compiled)

    def transports(self, mesh: Mesh) -> tuple[Transport, ...]:
        rendezvous = Rendezvous(mesh)
        return tuple(VirtualTransport(rendezvous, rank) for rank in self.ranks)

    def run(self, executions: Sequence[Execution], transports: Sequence[Transport]) -> None:
        drive(executions)
        first = transports[0]
        assert isinstance(first, VirtualTransport)
        first.rendezvous.check_empty()

    def gather(self, value: Any, what: str = "") -> list[Any]:
        return [value] * self.mesh.size

    def is_equal(self, number: int, what: str, place: str = "") -> bool:
        return True

    def expect_equal(self, number: int, what: str, place: str = "") -> None:
        return None

    def hear(self) -> None:
        return None

    def give_up(self) -> None:
        return None

    def meet(self, what: str, place: str) -> None:
        return None

    def expect_meeting(self, what: str, place: str, number: int) -> None:
        return None

    def as_they_are(self, parameters: Sequence[torch.Tensor], items: Sequence[Input]) -> list[torch.Tensor | None]:
        pairs = zip(parameters, items, strict=True)
        return [each.detach() if _is_whole(item) and each.is_contiguous() else None for each, item in pairs]

    def parameter_parts(self, parameter: torch.Tensor, item: Input, mesh: Mesh) -> Parts:
        """Copies made anew at every call, since `parameter.data.copy_` leaves no trace."""
        return self.parts(parameter, item, mesh)

    def parts(self, value: torch.Tensor, item: Input, mesh: Mesh) -> Parts:
        assert item.sharding is not None, item
        value, found = item.entering(value), dict[int, torch.Tensor]()
        for first, holders in replicas(item.sharding, mesh).items():
            found |= dict.fromkeys(holders, local_shard(value, item.dims, item.sharding, mesh, first))
        return found

    def tangent_parts(self, value: torch.Tensor, item: Input, mesh: Mesh, is_equal: bool) -> Parts:
        return self.parts(value, item, mesh)

    def whole(self, parts: Parts, item: Output, mesh: Mesh) -> torch.Tensor:
        assert item.sharding is not None, item
        return unpadded(assemble(parts, item.dims, item.sharding, mesh), item.padding)

    def gradients(self, held: Sequence[RankParts], parameters: Sequence[torch.Tensor], own: Own) -> list[torch.Tensor]:
        return [own([each.parts[0]])[0] if _is_whole(each.item) else self.whole(*each) for each in held]

    def full(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        return parameter.detach().clone()


def _is_whole(item: Input | Output) -> bool:
    """Whether each rank has all of it."""
    assert item.sharding is not None, item
    return item.padding is None and item.sharding.is_replicated
