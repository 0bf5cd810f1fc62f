"""Tensors that forward keeps in plain attributes from call to call (a memory, a moving mean): a program has them as they were captured."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autopar._torch import TorchDispatchMode, pytree
from autopar.frontend.attributes import attributes_kept, others, tensors_of

logger = logging.getLogger("autopar")


def read_and_assigned(model: nn.Module, run: Callable[[], object]) -> tuple[str, ...]:
    """The attributes of modules whose tensors a second `run` of forward reads, and in whose place it puts others, in order.

    `run` has run once, in the fake mode that is entered: a mask that forward makes once stays as it is, and what nobody reads is no
    matter. There are none where forward fails when it is run again.
    """
    before = tensors_of(model)
    reads = _Reads({id(tensor) for tensors in before.values() for tensor in tensors})
    try:
        with attributes_kept(model), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with reads:
                run()
            changed = others(before, tensors_of(model))
    except Exception as error:  # whatever the user's code raises when it is run again
        logger.debug("which attributes forward reads from call to call is not known: %s", error)
        return ()
    return tuple(path for path, tensors in before.items() if path in changed and not reads.found.isdisjoint(map(id, tensors)))


class _Reads(TorchDispatchMode):
    """Notes which of the tensors `watched`, by id, ops read. Their device is asked for by an op, too, which reads nothing."""

    def __init__(self, watched: set[int]) -> None:
        super().__init__()
        self.watched = watched
        self.found: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.prim.device.default:
            self.found |= self.watched.intersection(map(id, pytree.tree_leaves((args, kwargs))))
        return func(*args, **(kwargs or {}))
