"""Values that rank 0 has, sent to all: one whole tensor at a time."""

from __future__ import annotations

import torch
from torch import nn

from autopar.errors import WeightsError
from autopar.ir.mesh import Mesh
from autopar.runtime.birth.slots import names_of, slots_of
from autopar.runtime.birth.values import Values
from autopar.runtime.execute.process_groups import ProcessGroups


class FromFirst(Values):
    """The tensors of `model` as they are on rank 0 of `mesh`; on other ranks they may be on meta. Raises `WeightsError` where rank 0
    has none. Each method is collective."""

    def __init__(self, model: nn.Module, groups: ProcessGroups, mesh: Mesh) -> None:
        slots = slots_of(model)
        self._tensors = {name: slots[name] for name in names_of(model)}
        self._groups, self._mesh = groups, mesh
        self.identity: dict[str, object] = {name: (tuple(each.shape), str(each.dtype)) for name, each in self._tensors.items()}
        lost = [name for name, tensor in self._tensors.items() if tensor.is_meta]
        if groups.rank == 0 and lost:
            raise WeightsError(
                f'weights="rank0", but {len(lost)} parameters and buffers are on meta on rank 0, too, the first is {lost[0]!r}: give them '
                'values there, or all ranks weights="init" or a path'
            )

    def __contains__(self, name: str) -> bool:
        return True

    def whole(self, name: str) -> torch.Tensor:
        # Let go of: the model's own goes when its place is taken.
        tensor, device = self._tensors.pop(name).detach(), self._groups.device
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device) if self._groups.rank else tensor.to(device)
        return self._groups.broadcast(whole, self._mesh, self._mesh.names, 0)

    def elsewhere(self, name: str) -> None:
        self.whole(name)
