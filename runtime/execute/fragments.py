"""Fragments compiled by a torch.compile backend: once per structure and kind of inputs, when first run."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from autopar.cost.model import is_view
from autopar.cost.rank_sizes import RankSizes
from autopar.driver.compiled import Compiled
from autopar.driver.progress import progress
from autopar.ir.program import Input
from autopar.ir.schedule import Fragment
from autopar.kernels.registration import DECOMPOSITIONS
from autopar.runtime._torch import Backend, backend_named
from autopar.runtime.execute.eager_function import EagerFunction, simplified
from autopar.runtime.execute.failing_lines import note_of_fragment

logger = logging.getLogger("autopar")

_NOWHERE: Mapping[int, torch.Tensor] = {}
InputKey = tuple[tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device], ...]


class CompiledFragments:
    """Runs the fragments of one schedule.

    `backend` is "eager" (the graph as it is), any name that `torch.compile` knows, or a callable
    `(graph_module, example_inputs) -> callable`. Compilation happens at the first run, on the real
    tensors with the strides that their producers yield, never in a thread of ours; inputs of other
    shapes, strides or dtypes compile again, which is logged. With "inductor", a fragment of one op runs as it is.
    """

    def __init__(self, fragments: Mapping[str, Fragment], backend: str | Backend) -> None:
        self._fragments = fragments
        self._backend: Backend | None = None if backend == "eager" else backend_named(backend) if isinstance(backend, str) else backend
        self._compiled: dict[str, dict[InputKey, Callable[..., Any]]] = {name: {} for name in fragments}
        self._functions: dict[str, EagerFunction] = {}
        self._first_start = 0.0
        self._fuses = backend == "inductor"
        # A single op has nothing to be fused with: half of all fragments, and some seconds of C++ each.
        self._as_is = {name for name, fragment in fragments.items() if self._fuses and _num_computing(fragment) < 2}

    def run(self, name: str, inputs: Sequence[torch.Tensor], into: Mapping[int, torch.Tensor] = _NOWHERE) -> tuple[torch.Tensor, ...]:
        """The results of fragment `name`, those by whose number there is memory written `into` that. Raises the backend's own error with a
        note naming the fragment."""
        if self._is_eager(name):
            return self._eager(name).run(inputs, into)
        key = tuple((tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in inputs)
        function = self._compiled[name].get(key)
        if function is None:
            function = self._compile(name, key, inputs)
        try:
            result = function(*inputs)
        except Exception as error:
            error.add_note(note_of_fragment(name, self._fragments[name].module, error))
            raise
        return (result,) if isinstance(result, torch.Tensor) else tuple(result)

    def placeable(self, name: str) -> Sequence[int]:
        """The results of fragment `name` that may be written into memory that is given."""
        return self._eager(name).placeable if self._is_eager(name) else ()

    def _is_eager(self, name: str) -> bool:
        return self._backend is None or name in self._as_is

    def _eager(self, name: str) -> EagerFunction:
        if name not in self._functions:
            self._functions[name] = EagerFunction(self._fragments[name].module)
        return self._functions[name]

    @property
    def num_compiled(self) -> int:
        """How many times the backend was called."""
        return sum(len(variants) for variants in self._compiled.values())

    def _decompositions(self, inputs: Sequence[torch.Tensor]) -> Mapping[Any, Callable[..., Any]]:
        """What stands for ops of ours in what the backend is given: on a GPU they are kernels, which Inductor's own would not replace."""
        return DECOMPOSITIONS if self._fuses and all(each.is_cpu for each in inputs) else {}

    def _compile(self, name: str, key: InputKey, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
        assert self._backend is not None
        variants = self._compiled[name]
        start = time.perf_counter()
        self._first_start = self._first_start or start
        text = f"compiling fragment {self.num_compiled + 1} of {len(self._fragments) - len(self._as_is)}, at its first run"
        try:
            with torch.no_grad(), progress(text, self._first_start):
                function = self._backend(
                    _fresh(self._fragments[name].module, self._decompositions(inputs)), [_alone(each) for each in inputs]
                )
        except Exception as error:
            error.add_note(f"while compiling fragment {name}")
            raise
        seconds = time.perf_counter() - start
        if variants:
            change = _difference(next(reversed(variants)), key)
            logger.warning("fragment %s compiled again (%.2f s): %s", name, seconds, change)
        else:
            logger.debug("fragment %s compiled (%.2f s)", name, seconds)
        variants[key] = function
        return function


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor in memory of its own: torch cannot make a fake of one that is a view of real numbers (rotary embeddings)."""
    if not tensor.is_complex():
        return tensor
    sizes, strides = [size if stride else 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)], tensor.stride()
    own = torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device)
    return own.copy_(tensor.as_strided(sizes, strides)).expand(tensor.shape)


def rank_sizes(compiled: Compiled, backend: str | Backend, model: nn.Module, on_processes: bool = True) -> RankSizes:
    """What schedules do not say of memory, of fragments as `backend` runs them; of virtual ranks, too, as if they were processes. The
    buffers of `model` are there besides, those that the program does not read as well."""
    form = simplified if backend == "eager" else _as_it_is
    mesh = compiled.mesh
    stage_ranks = mesh.size // mesh.size_of(mesh.parts("pp"))
    given = sum(_given_bytes(item, mesh.num_shares) for item in compiled.signature.inputs_of("batch"))
    buffers = sum(each.numel() * each.element_size() for each in model.buffers())
    return RankSizes(compiled.budget, form, compiled.schedule.device, on_processes, stage_ranks, given, buffers)


def _given_bytes(item: Input, num_shares: int) -> float:
    """What a process is passed of a batch input: all, or its share of the samples."""
    share = max(item.shares) / sum(item.shares) if item.shares else 1.0 if item.batch_dim is None else 1 / num_shares
    return share * math.prod(item.shape) * item.dtype.itemsize


def _as_it_is(module: GraphModule) -> GraphModule:
    return module


def _num_computing(fragment: Fragment) -> int:
    """Ops that do more than describe memory anew."""
    return sum(1 for node in fragment.module.graph.nodes if node.op == "call_function" and not is_view(node))


def _fresh(module: GraphModule, decompositions: Mapping[Any, Callable[..., Any]]) -> GraphModule:
    """A copy that a backend may rewrite, without the metadata of our passes; `decompositions` are called in place of their ops, so that
    what it traces is what they are made of."""
    graph, mapping = Graph(), dict[torch.fx.Node, torch.fx.Node]()
    graph.output(graph.graph_copy(module.graph, mapping))
    for node in graph.nodes:
        node.meta = {}
        node.target = decompositions.get(node.target, node.target)
    return GraphModule(module, graph)


def _difference(old: InputKey, new: InputKey) -> str:
    for index, (before, after) in enumerate(zip(old, new, strict=True)):
        if before != after:
            return f"input {index} was {_describe(before)}, is {_describe(after)}"
    raise AssertionError("equal keys")


def _describe(entry: tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]) -> str:
    shape, stride, dtype, device = entry
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} with strides {list(stride)} on {device}"
