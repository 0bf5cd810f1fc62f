"""How the ranks of one mesh exchange tensors."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from autopar.mesh import Mesh
from autopar.schedule import Launch


class Transport(Protocol):
    """One rank's end. What each collective means is written at `autopar.schedule.Launch`."""

    @property
    def mesh(self) -> Mesh: ...

    @property
    def rank(self) -> int: ...

    def launch(self, instruction: Launch, tensor: torch.Tensor) -> Any:
        """Start a collective on a contiguous or strided `tensor`, which stays as it is; returns a handle."""
        ...

    def is_ready(self, handle: Any) -> bool:
        """Whether `wait` may be called now. A rank that finds it may not yields to the others."""
        ...

    def wait(self, handle: Any) -> torch.Tensor:
        """The collective's result."""
        ...
