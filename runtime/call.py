"""One call: the forward of a compiled program on all ranks of this process, and later its backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from autopar.compiled import Compiled
from autopar.program import Input, Output
from autopar.runtime.fragments import CompiledFragments
from autopar.runtime.interpreter import RankState, execute
from autopar.runtime.transport import Transport
from autopar.runtime.world import Parts, World
from autopar.schedule import Pause


class Call:
    """Runs `compiled.schedule` up to PAUSE (`forward`) and to its end (`backward`), once each.

    tensors  parameters and buffers of the model by name
    batch    the leaves of the call by flat index
    key      what all random draws of this call descend from
    device   where coordinates and keys are made
    """

    def __init__(
        self,
        compiled: Compiled,
        fragments: CompiledFragments,
        world: World,
        tensors: Mapping[str, torch.Tensor],
        batch: Sequence[Any],
        key: int,
        device: torch.device,
    ) -> None:
        self.schedule, self.mesh, self.constants = compiled.schedule, compiled.local.mesh, compiled.local.constants
        self.signature = compiled.schedule.signature
        self._world, self._fragments, self._tensors = world, fragments, tensors
        self._batch, self._key, self._device = batch, key, device
        self._transports: tuple[Transport, ...] = world.transports(self.mesh)
        self.states: dict[int, RankState] = {rank: RankState({}) for rank in world.ranks}

    @property
    def has_backward(self) -> bool:
        return any(isinstance(instruction, Pause) for instruction in self.schedule.instructions)

    @property
    def results(self) -> tuple[Output, ...]:
        """The outputs that the caller gets: the loss, or the user's output tensors."""
        return tuple(item for item in self.signature.outputs if item.kind in ("loss", "output"))

    def forward(self) -> dict[str, torch.Tensor]:
        """Run to PAUSE; the results by flat index. Buffers that the model changes are written back."""
        self._fill([item for item in self.signature.inputs if item.kind != "tangent"])
        self._run()
        for item in self.signature.outputs_of("buffer"):
            self._tensors[item.name].copy_(self._world.whole(self._held(item), item, self.mesh))
        return {item.name: self._world.whole(self._held(item), item, self.mesh) for item in self.results}

    def backward(self, tangents: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run from PAUSE to the end; gradients by the name of their parameter. `tangents` are by flat index of the result."""
        for item in self.signature.inputs_of("tangent"):
            self._put(item, self._world.parts(tangents[item.name], item, self.mesh))
        self._run()
        gradients = self.signature.outputs_of("gradient")
        owned = _Owned(tensor for state in self.states.values() for tensor in self._inputs_of(state))
        found = {}
        for item in gradients:
            parts = {rank: owned.own(part) for rank, part in self._held(item).items()}
            found[item.name] = self._world.gradient(parts, item, self.mesh, self._tensors[item.name])
        return found

    def parts_of(self, item: Output) -> Parts:
        """What each rank of this process holds of a result or gradient, while this call is kept."""
        return self._held(item)

    def _inputs_of(self, state: RankState) -> list[torch.Tensor]:
        return [state.buffers[name] for name in self.schedule.inputs if name in state.buffers]

    def _run(self) -> None:
        kind = self._device.type
        executions = [
            execute(self.schedule, state, self._fragments, transport)
            for state, transport in zip(self.states.values(), self._transports, strict=True)
        ]
        # The program has the casts of the autocast it was captured under; a second one must not act on it.
        with torch.no_grad(), torch.autocast(kind, enabled=False):
            self._world.run(executions, self._transports)

    def _fill(self, items: Sequence[Input]) -> None:
        for item in items:
            self._put(item, self._parts(item))

    def _put(self, item: Input, parts: Parts) -> None:
        buffer = self.schedule.inputs[self.signature.inputs.index(item)]
        for rank, part in parts.items():
            self.states[rank].buffers[buffer] = part

    def _parts(self, item: Input) -> Parts:
        ranks, world = self._world.ranks, self._world
        if item.kind == "parameter":
            return world.parameter_parts(self._tensors[item.name], item, self.mesh)
        if item.kind == "coordinate":
            return {rank: self._scalar(self.mesh.index(rank, item.name.split(","))) for rank in ranks}
        if item.kind == "random_key":
            return dict.fromkeys(ranks, self._scalar(self._key))
        values: dict[str, Callable[[], torch.Tensor]] = {
            "buffer": lambda: self._tensors[item.name],
            "batch": lambda: self._batch[int(item.name)],
            "constant": lambda: self.constants[item.name].to(self._device),
        }
        return world.parts(values[item.kind](), item, self.mesh)

    def _scalar(self, value: int) -> torch.Tensor:
        return torch.tensor(value, dtype=torch.int64, device=self._device)

    def _held(self, item: Output) -> Parts:
        buffer = self.schedule.outputs[self.signature.outputs.index(item)]
        return {rank: state.buffers[buffer] for rank, state in self.states.items()}


class _Owned:
    """Sees to it that a gradient shares memory with nothing: optimizers and clipping write into it."""

    def __init__(self, others: Any) -> None:
        self._taken = {tensor.untyped_storage().data_ptr() for tensor in others}

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        shared = address in self._taken or not tensor.is_contiguous() or tensor.untyped_storage().nbytes() > tensor.nbytes
        self._taken.add(address)
        return tensor.clone(memory_format=torch.contiguous_format) if shared else tensor


class _Differentiable(torch.autograd.Function):
    """Puts a `Call` on autograd's tape: parameters in, results out."""

    @staticmethod
    def forward(ctx: Any, call: Call, names: tuple[str, ...], *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = call.forward()
        tangents = {item.name for item in call.signature.inputs_of("tangent")}
        ctx.call, ctx.names, ctx.results = call, names, tuple(results)
        # Saved for their version counters only: torch refuses a backward through parameters changed since.
        ctx.save_for_backward(*(tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor for tensor in parameters))
        ctx.mark_non_differentiable(*(tensor for name, tensor in results.items() if name not in tangents))
        return tuple(results.values())

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *tangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        _ = ctx.saved_tensors
        if ctx.call is None:
            raise RuntimeError(
                "backward ran a second time through one call of a parallel module; its activations are gone: call the module again"
            )
        call, ctx.call = ctx.call, None
        gradients = call.backward(dict(zip(ctx.results, tangents, strict=True)))
        return (None, None, *(gradients.get(name) for name in ctx.names))


def differentiate(call: Call, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`call.forward()` with its results on autograd's tape; `parameters` are those that get gradients."""
    results = _Differentiable.apply(call, tuple(parameters), *parameters.values())
    return dict(zip((item.name for item in call.results), results, strict=True))
