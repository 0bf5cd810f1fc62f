"""Which results of a fragment lie in whose memory: views of its inputs, and of one another."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch.fx import GraphModule
from torch.multiprocessing.reductions import StorageWeakRef

from autopar._torch import fake_mode
from autopar.graph.fake_calls import empty_as
from autopar.ir.schedule import Fragment

# By result of a fragment: the first of its inputs and results that lies in the same memory, and the bytes of that.
Places = tuple[tuple[int, int], ...]


def lies_with(fragment: Fragment) -> tuple[int, ...]:
    """By result of a fragment the first of its inputs and results, in this order, that lies in the same memory.

    Of a fragment whose inputs have no known shapes nothing is said to be a view.
    """
    if any("val" not in node.meta for node in fragment.module.graph.find_nodes(op="placeholder")):
        return ()
    return tuple(source for source, _ in places_of(fragment))


# By fragment: passes that look for what fits walk through one schedule many times.
_PLACES: WeakKeyDictionary[GraphModule, Places] = WeakKeyDictionary()


def places_of(fragment: Fragment) -> Places:
    """Whose memory each result lies in; its own where that is its own number behind those of the inputs."""
    if fragment.module not in _PLACES:
        _PLACES[fragment.module] = _found(fragment)
    return _PLACES[fragment.module]


def _found(fragment: Fragment) -> Places:
    """By running the fragment on tensors without memory."""
    given = [node.meta["val"] for node in fragment.module.graph.find_nodes(op="placeholder")]
    device = device_of(fragment.module)
    with fake_mode(), torch.no_grad():
        inputs = [empty_as(each, device=device) for each in given]
        results = fragment.module(*inputs)
    first: dict[StorageWeakRef, int] = {}
    found: list[tuple[int, int]] = []
    for number, tensor in enumerate([*inputs, *results]):
        source = first.setdefault(StorageWeakRef(tensor.untyped_storage()), number)
        if number >= len(inputs):
            found.append((source, tensor.untyped_storage().nbytes()))
    return tuple(found)


def device_of(module: GraphModule) -> torch.device:
    """Where a fragment computes: on the device that it creates tensors on; the CPU where it creates none, and any will do."""
    return next((node.kwargs["device"] for node in module.graph.nodes if "device" in node.kwargs), torch.device("cpu"))
