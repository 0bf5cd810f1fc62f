"""Where two virtual ranks meet: one transfer, which happens when both have launched their end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autopar.errors import ScheduleError
from autopar.ir.instructions import Channel, Receive, Send
from autopar.ir.schedule import TensorType


@dataclass(eq=False)
class PointToPoint:
    """Transfer `number`, from 0, of one channel: it happens when both ends have launched it.

    The receiver gets the very tensors that the sender brought; nobody writes into them.
    """

    channel: Channel
    number: int
    sent: Send | None = None
    received: Receive | None = None
    tensors: tuple[torch.Tensor, ...] = ()
    layouts: tuple[TensorType, ...] = ()

    def send(self, instruction: Send, tensors: Sequence[torch.Tensor]) -> None:
        self.sent, self.tensors = instruction, tuple(tensors)
        self._compare()

    def receive(self, instruction: Receive, layouts: Sequence[TensorType]) -> None:
        self.received, self.layouts = instruction, tuple(layouts)
        self._compare()

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that have not launched their end."""
        ends = zip(self.channel, (self.sent, self.received), strict=True)
        return tuple(rank for rank, launched in ends if launched is None)

    def arrived(self, rank: int) -> tuple[torch.Tensor, ...]:
        """What `rank` gets: nothing for the sender."""
        assert not self.missing, self
        return self.tensors if rank == self.channel[1] else ()

    def wanted_by(self, rank: int) -> str:
        """`RECV 0F2>1 from rank 0: rank 0 never launched SEND 0F2>1 (…)`: what `rank` launched, and what the other did not."""
        source, target = self.channel
        which = f"(transfer {self.number + 1} from rank {source} to rank {target})"
        launched = self.sent if rank == source else self.received
        assert launched is not None, self
        if rank == source:
            return f"SEND {launched.transfer} to rank {target}: rank {target} never launched RECV {launched.transfer} {which}"
        return f"RECV {launched.transfer} from rank {source}: rank {source} never launched SEND {launched.transfer} {which}"

    def _compare(self) -> None:
        """Raise `ScheduleError` unless the two ends ask for the same thing."""
        if self.sent is None or self.received is None:
            return
        wrong = self._differences(self.sent, self.received)
        if wrong:
            source, target = self.channel
            raise ScheduleError(
                f"transfer {self.number + 1} from rank {source} to rank {target} differs at its ends: {'; '.join(wrong)}\n"
                f"  rank {source}: {self.sent}\n  rank {target}: {self.received}"
            )

    def _differences(self, sent: Send, received: Receive) -> list[str]:
        source, target = self.channel
        pairs: list[tuple[str, object, object]] = [
            ("name", sent.transfer, received.transfer),
            ("number of buffers", len(sent.buffers), len(received.buffers)),
        ]
        ends = zip(sent.buffers, received.buffers, self.tensors, self.layouts, strict=False)
        for name, other, tensor, (shape, dtype) in ends:
            which = name if name == other else f"{name} → {other}"
            pairs.append((f"shape of {which}", tuple(tensor.shape), tuple(shape)))
            pairs.append((f"dtype of {which}", tensor.dtype, dtype))
        return [f"{what} {mine} on rank {source} and {its} on rank {target}" for what, mine, its in pairs if mine != its]
