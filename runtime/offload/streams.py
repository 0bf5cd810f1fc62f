"""Copies between a GPU and the host: a stream for each direction, pinned memory, and events.

    computes   … h ────────┐ RUN f4 …    WAIT h.host: wait_event     FREE h    … COPY back ┐      WAIT h.back: wait_event   RUN g3
    away                   └ copy h → pinned ▏event
    back                                                                                   └ copy pinned → h.back ▏event

A copy starts behind all that computes so far, and what computes behind the WAIT starts behind it. So memory that is let go of behind the
WAIT may be given to what computes next, at once. It is not told of the stream that copied it (`Tensor.record_stream`): the allocator would
hold it until the host sees the copy's end, and a host that runs ahead takes new memory meanwhile, more than the schedule has. What an error
drops before the WAIT is held here until its copy is over; pinned memory has its events in its block, and is used again behind them.
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.runtime.offload.memories import Block, HostMemory


class Streams:
    """`cuda` is torch's module, or one that plays it."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._streams: dict[str, Any] = {}
        # Copies that nobody has waited for: each event with the device's memory that is read or filled.
        self._under_way: list[tuple[Any, torch.Tensor]] = []

    def away(self, stretch: torch.Tensor, block: Block) -> Any:
        """Start copying to the pinned `block`; the event of its end."""
        return self._copied("away", HostMemory.bytes_of(block), stretch, block, stretch)

    def back(self, block: Block, stretch: torch.Tensor) -> Any:
        """Start copying from the pinned `block`, which is filled; the event of its end."""
        return self._copied("back", stretch, HostMemory.bytes_of(block), block, stretch)

    def _copied(self, direction: str, into: torch.Tensor, source: torch.Tensor, block: Block, stretch: torch.Tensor) -> Any:
        if direction not in self._streams:
            self._streams[direction] = self._cuda.Stream(self._device)
        stream = self._streams[direction]
        stream.wait_stream(self._cuda.current_stream(self._device))
        with self._cuda.stream(stream):
            self._copy(into, source)
            event = stream.record_event()
        self._under_way = [(begun, memory) for begun, memory in self._under_way if not begun.query()]
        self._under_way.append((event, stretch))
        block.uses.append(event)
        return event

    def _copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        into.copy_(source, non_blocking=True)

    def wait(self, event: Any) -> None:
        """What is computed from now on is computed behind `event`."""
        self._cuda.current_stream(self._device).wait_event(event)
        self._under_way = [(begun, memory) for begun, memory in self._under_way if begun is not event]
