"""Gathers and scatters over gloo, as transfers between pairs of ranks: its own all-gather copies all that arrives once more, and its own
reduce-scatter sends what an all-reduce does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Transfers:
    """Several that are waited for together."""

    works: tuple[dist.Work, ...]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def swap(group: dist.ProcessGroup, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> Transfers:
    """Launch: send each other member of `group`, by its place in it, its tensor of `sent`, and take its tensor of `received` from it.

    Contiguous tensors, of one size. What lies at this rank's own place is left alone.
    """
    own, size = dist.get_rank(group), dist.get_world_size(group)
    # Each begins with its neighbour: no rank is everybody's first.
    others = [(own + step) % size for step in range(1, size)]
    works = [dist.irecv(received[place], group=group, group_src=place) for place in reversed(others)]
    works += [dist.isend(sent[place], group=group, group_dst=place) for place in others]
    return Transfers(tuple(work for work in works if work is not None))


def add(parts: Sequence[torch.Tensor], total: torch.Tensor) -> torch.Tensor:
    """The sum of `parts` in `total`, added up in their order on every rank, rounded once."""
    first, second, *others = parts
    is_half = total.dtype in (torch.float16, torch.bfloat16)
    running = first.float() if others and is_half else total
    torch.add(running if running is not total else first, second, out=running)
    for part in others:
        running += part
    return total if running is total else total.copy_(running)
