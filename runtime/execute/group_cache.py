"""Process groups and device meshes by the ranks in them: made once in the life of the default process group.

Each group has threads, connections and buffers of its own, which torch keeps until the default group is destroyed; whoever compiles often
would leave some dozen behind each time. What a program launches in a group follows the order of its instructions, and programs run one
after the other on all ranks, so they can share it, as all of torch's own modules share the default group.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from autopar.runtime.execute.host_group import HostGroup, host_backend, host_group


@dataclass
class _Known:
    """What was made under one default group, in an order that is equal on all ranks. A group of others is kept as torch's mark for it."""

    made: dict[Hashable, Any] = field(default_factory=dict[Hashable, Any])
    is_trusted: bool = True
    # By which all ranks of the world speak, once they did.
    host: HostGroup | None = None
    num_modules: int = 0


# By the default group: another one, after `destroy_process_group`, knows nothing of its predecessor's.
_KNOWN: WeakKeyDictionary[dist.ProcessGroup, _Known] = WeakKeyDictionary()


def _known() -> _Known:
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is initialised"
    return _KNOWN.setdefault(world, _Known())


def known_or_made(key: Hashable, make: Callable[[], Any]) -> Any:
    """What was made for `key`, or is made now. `agree` comes before it, on all ranks."""
    made = _known().made
    if key not in made:
        made[key] = make()
    return made[key]


def number_of_module(largest: Callable[[int], int]) -> int:
    """How many modules with process groups there are, this one with them; `largest` gives what most ranks counted. Collective."""
    known = _known()
    known.num_modules = largest(known.num_modules + 1)
    return known.num_modules


def distrust() -> None:
    """What is known may be out of step with the other ranks: an exception left a call between its collectives, or a peer is lost."""
    if dist.is_initialized():
        _known().is_trusted = False


def agree(device: torch.device) -> None:
    """Forget what is known, on all ranks, where one of them does not trust it or knows more than others. Collective over the world.

    Modules that were made keep what they have; new ones get new groups.
    """
    known, world = _known(), dist.group.WORLD
    assert world is not None, "torch.distributed is initialised"
    if known.host is None:
        by_itself = HostGroup(world, torch.device("cpu")) if host_backend(world) else None
        known.host = by_itself or host_group(world, range(dist.get_world_size()), device, None)
    host = known.host
    told = torch.tensor([not known.is_trusted, len(known.made), -len(known.made)], dtype=torch.int64, device=host.device)
    dist.all_reduce(told, dist.ReduceOp.MAX, group=host.group)
    is_doubted, most, least = told.tolist()
    if is_doubted or most != -least:
        known.made.clear()
    known.is_trusted = True
