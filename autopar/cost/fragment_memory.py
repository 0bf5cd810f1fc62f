"""What a fragment takes while it runs op by op, in the order of its graph: values die at their last use, views share memory.

It is run on tensors without memory, and every memory is counted from the op that makes it until nothing looks at it any more. Ops of
ours run as they are written on a CPU, so that what they make for themselves is counted; elsewhere they are kernels, which take nothing
besides their results. Of torch's a table says what they take inside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.fx import GraphModule, Interpreter, Node

from autopar._torch import DATA_DEPENDENT_ERRORS, fake_errors_quiet, fake_mode
from autopar.cost.fragment_places import device_of
from autopar.cost.memories import Memories, Value
from autopar.graph.fake_calls import empty_as
from autopar.ir.keys import SOURCE, Source
from autopar.kernels.registration import IMPLEMENTATIONS


@dataclass(frozen=True)
class FragmentMemory:
    """Bytes that a fragment takes beside its inputs.

    peak_bytes    the most at a time, results included
    result_bytes  what is left: its results, but for views of inputs
    at            the call during which that is
    values        what is there then, largest first, what the call needs within itself ("inside") included
    """

    peak_bytes: int
    result_bytes: int
    at: Value
    values: tuple[Value, ...]

    @property
    def temporary_bytes(self) -> int:
        return self.peak_bytes - self.result_bytes


# By fragment: equal ones of repeated layers are one, and passes that look for what fits walk through one schedule many times.
Form = Callable[[GraphModule], GraphModule]
_KNOWN: WeakKeyDictionary[GraphModule, dict[Form, FragmentMemory]] = WeakKeyDictionary()


def _as_it_is(module: GraphModule) -> GraphModule:
    return module


def fragment_memory(module: GraphModule, form: Form = _as_it_is) -> FragmentMemory:
    """Of a fragment that is run in the form that `form` gives it."""
    known = _KNOWN.setdefault(module, {})
    if form not in known:
        known[form] = _found(form(module))
    return known[form]


def _found(module: GraphModule) -> FragmentMemory:
    given = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    device = device_of(module)
    with fake_mode(), fake_errors_quiet(), torch.no_grad():
        inputs = [empty_as(each, device=device) for each in given]
        with Memories() as memories:
            results = _Run(module, memories).run(*inputs)
            left = memories.bytes
            del results
    values = tuple(sorted(memories.at_peak, key=lambda value: -value.bytes))
    return FragmentMemory(memories.peak_bytes, left, memories.peak_call, values)


class _Run(Interpreter):
    """Runs a graph call by call, and says of each whose memory follows."""

    def __init__(self, module: GraphModule, memories: Memories) -> None:
        super().__init__(module)
        self._memories = memories
        # A form in which ops of ours are called without dispatch has their code in their place.
        self._op_of = {implementation: op for op, implementation in IMPLEMENTATIONS.items()}

    def run_node(self, n: Node) -> Any:
        op = str(getattr(n.target, "__name__", n.target))
        self._memories.call = Value(n.name, op, SOURCE.get(n) or Source(), 0)
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        op = self._op_of.get(target, target)
        implementation = IMPLEMENTATIONS.get(op)
        if implementation is not None and all(each.device.type == "cpu" for each in args if isinstance(each, torch.Tensor)):
            try:
                return implementation(*args, **kwargs)
            except DATA_DEPENDENT_ERRORS:  # it looks at values: what it gives is known all the same
                pass
        return super().call_function(op, args, kwargs)
