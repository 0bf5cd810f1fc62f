"""Private PyTorch API that benchmarks alone use: peers that are parts of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import aot_module
from torch._functorch.partitioners import min_cut_rematerialization_partition


def min_cut_graphs(model: torch.nn.Module, share: float) -> Callable[..., Any]:
    """`model` as two graphs, traced at its first call and run op by op, between which torch's min-cut partitioner keeps at most `share` of
    the activations that it would. What is read for the last time is let go of."""

    def partition(*args: Any, **kwargs: Any) -> Any:
        with functorch_config.patch(activation_memory_budget=share):
            return min_cut_rematerialization_partition(*args, **kwargs)

    return aot_module(model, boxed_nop, boxed_nop, partition_fn=partition)
