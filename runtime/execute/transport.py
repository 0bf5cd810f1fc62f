"""How the ranks of one mesh exchange tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from autopar.ir.instructions import Launch, Receive, Send
from autopar.ir.mesh import Mesh
from autopar.ir.schedule import TensorType
from autopar.runtime.execute.buckets import Reserved


class Transport(Protocol):
    """One rank's end. What each collective and transfer means is written at `autopar.ir.schedule`. Only waiting may block."""

    @property
    def mesh(self) -> Mesh: ...

    @property
    def rank(self) -> int: ...

    def launch(self, instruction: Launch, tensors: Sequence[torch.Tensor], is_spent: bool = False, reserved: Reserved | None = None) -> Any:
        """Start a collective on contiguous or strided `tensors`; returns a handle for `wait`. They stay as they are, but for those that
        are themselves in what was `reserved`, and where one `is_spent`: nobody reads it any more, nor what shares its memory."""
        ...

    def reserve(self, instruction: Launch, layouts: Sequence[TensorType | None]) -> Reserved | None:
        """Memory for the operands of a collective to come, of these shapes and dtypes; None where they may lie anywhere."""
        ...

    def send(self, instruction: Send, tensors: Sequence[torch.Tensor]) -> Any:
        """Start sending `tensors`, which stay as they are; returns a handle for `complete`."""
        ...

    def receive(self, instruction: Receive, layouts: Sequence[TensorType]) -> Any:
        """Start receiving tensors of these shapes and dtypes; returns a handle for `complete`."""
        ...

    def is_ready(self, handle: Any) -> bool:
        """Whether `wait` or `complete` may be called now. A rank that finds it may not yields to the others."""
        ...

    def wait(self, handle: Any) -> tuple[torch.Tensor, ...]:
        """The collective's results. Those of a bucket are views of one memory."""
        ...

    def bucket_parts(self) -> Mapping[int, int]:
        """Of results that share one memory, by the address where each begins, its bytes: nothing else lies there."""
        ...

    def settle(self, is_on: bool) -> None:
        """Whether waits last, from now on, until what has run a collective has let go of its tensors: while memory is measured."""
        ...

    def kept(self) -> Iterable[torch.Tensor]:
        """Memory that stays from one call to the next."""
        ...

    def complete(self, handle: Any) -> tuple[torch.Tensor, ...]:
        """What a receive brought, to be read only; nothing for a send."""
        ...
