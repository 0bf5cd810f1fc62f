"""Changes of sharding as nodes of a GLOBAL graph, collectives as nodes of a LOCAL one.

Calling a collective yields the shape of its result and nothing else: in a running program collectives are
instructions of the schedule, never calls inside compiled code. A launch's result may be touched
only after its `wait`.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from autopar._torch import is_fake
from autopar.ir.sharding import Sharding

Axes = tuple[str, ...]


def _shape_only(x: torch.Tensor) -> None:
    assert is_fake(x) or x.is_meta, "collectives of a LOCAL graph run as schedule instructions, not as calls"


def all_reduce(x: torch.Tensor, axes: Axes, kind: str) -> torch.Tensor:
    """x → the sum or maximum over the ranks along `axes`, same shape."""
    _shape_only(x)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def all_gather(x: torch.Tensor, axes: Axes, size: int) -> torch.Tensor:
    """x → [size, *x.shape]: the parts of the `size` ranks along `axes`, in index order."""
    _shape_only(x)
    return torch.empty((size, *x.shape), dtype=x.dtype, device=x.device)


def reduce_scatter(x: torch.Tensor, axes: Axes, kind: str) -> torch.Tensor:
    """[n, *shape] → shape: the sum over the ranks along `axes` of the entry of this rank's index."""
    _shape_only(x)
    return torch.empty(x.shape[1:], dtype=x.dtype, device=x.device)


def all_to_all(x: torch.Tensor, axes: Axes) -> torch.Tensor:
    """[n, *shape] → [n, *shape]: entry i of the result is what rank i of the group had at this rank's index."""
    _shape_only(x)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def wait(launched: torch.Tensor) -> torch.Tensor:
    """Complete a launched collective."""
    return launched


LAUNCHES = (all_reduce, all_gather, reduce_scatter, all_to_all)


def is_launch(node: Node) -> bool:
    return node.op == "call_function" and node.target in LAUNCHES


def reshard(x: torch.Tensor, target: Sharding) -> torch.Tensor:
    """A change of sharding in a GLOBAL graph: the same logical value, lying on the mesh as `target`."""
    return x
