"""The module that the user trains: their model's parameters and names, run on the mesh."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.compiled import Compiled
from autopar.errors import AutoparError, MeshError, PlanError
from autopar.mesh import Mesh
from autopar.random_key import random_key
from autopar.runtime._torch import Backend, not_compiled
from autopar.runtime.call import Call, differentiate
from autopar.runtime.fragments import CompiledFragments
from autopar.runtime.inputs import (
    BatchDims,
    CallInputs,
    agree_on_call,
    batch_dims_of,
    check_inputs,
    check_replicas,
    check_values,
    global_call,
)
from autopar.runtime.outputs import build_output
from autopar.runtime.parameters import Placement, same_placement
from autopar.runtime.placement import all_placements, global_parameters, placements_of
from autopar.runtime.state import clip_grad_norm, full_state, random_state_of, sharded_state, with_random_state
from autopar.runtime.world import DistributedWorld, VirtualWorld, World, from_first

logger = logging.getLogger("autopar")

MAX_QUIET_CAPTURES = 8
# What a parallel module keeps on itself, beside the dicts that it shares with the model.
_PUBLIC_NAMES = ("mesh", "step", "seed", "plan", "compiled")
_PRIVATE_NAMES = ("_model", "_capture", "_backend", "_batch_dims", "_num_microbatches", "_world", "_captures", "_placements", "_latest")
Capture = Callable[..., Compiled]


@dataclass
class _Captured:
    compiled: Compiled
    fragments: CompiledFragments
    are_replicas_checked: bool = False


class ParallelModule(nn.Module):
    """`model` on `mesh`, behind a plain call.

        loss = parallel(**batch).loss
        loss.backward()
        optimizer.step()

    On a virtual mesh a call takes the global batch; on a real mesh (`device_mesh`) each process passes its share
    along dp, and where the model computes no loss it gets its share of the outputs: gradients are then those of the mean
    over dp of the ranks' own losses, as with DDP. Parameters, buffers and submodules are the model's own, under their own
    names; on a real mesh the first capture replaces the parameters by this process's parts, as DTensors.

    capture     `(args, kwargs, *, pins) -> Compiled`: inputs of global shape (values are not read on a real mesh), and the
                placements of parameters that an earlier capture fixed, by name (None at the first)
    backend     "eager", the name of any torch.compile backend, or such a backend itself
    batch_dims  see `autopar.runtime.inputs.batch_dims_of`
    timeout     seconds that a real rank waits for its peers; None keeps torch's default
    num_microbatches  which must divide every rank's share of the batch; None where the capture chooses it

    A call raises `InputError` for inputs that cannot run and `MeshError`, `ScheduleError` or what the compiler raises.
    """

    _model: nn.Module

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        *,
        capture: Capture,
        backend: str | Backend = "inductor",
        device_mesh: DeviceMesh | None = None,
        batch_dims: BatchDims = None,
        timeout: float | None = None,
        num_microbatches: int | None = None,
    ) -> None:
        super().__init__()
        _check_names(model)
        # The very dicts of the model: every name, tie, hook and submodule is what it was.
        self._parameters, self._buffers, self._modules = model._parameters, model._buffers, model._modules
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self.training = model.training
        self.__dict__["_model"] = model
        self.mesh = mesh
        self.step = 0
        self.seed: int | None = None
        self._capture, self._backend, self._batch_dims, self._num_microbatches = capture, backend, batch_dims, num_microbatches
        self._world: World = VirtualWorld(mesh) if device_mesh is None else DistributedWorld(device_mesh, timeout)
        self._captures: dict[Any, _Captured] = {}
        self._placements: dict[str, Placement] = {}
        self._latest: Compiled | None = None

    # ---- the call

    @not_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output structure; see the class. A compiled training loop calls it as it is: its fragments are compiled already."""
        call, compiled = self.start(args, kwargs)
        trainable = {item.name for item in compiled.local.signature.outputs_of("gradient")}
        if call.has_backward and trainable and torch.is_grad_enabled():
            tensors = differentiate(call, {name: parameter for name, parameter in self.named_parameters() if name in trainable})
        else:
            with torch.no_grad():
                tensors = call.forward()
        return build_output(compiled.local.signature, tensors)

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compiled:
        """Capture and compile for such a call and place the parameters, without running it. Inputs as in a call."""
        return self._captured(self._checked(args, kwargs)).compiled

    def start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, Compiled]:
        """A call that has not run yet, counted as a step in training mode: `call.forward()`, then `call.backward(tangents)`."""
        inputs = self.checked_to_run(args, kwargs)
        captured = self._captured(inputs)
        self._before_run(inputs, captured)
        self.step += self.training
        assert self.seed is not None
        key = random_key(self.seed, self.step)
        tensors = dict(self.named_parameters()) | dict(self.named_buffers())
        call = Call(captured.compiled, captured.fragments, self._world, tensors, inputs.leaves, key, self._world.device(self))
        return call, captured.compiled

    def checked_to_run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallInputs:
        """The inputs of a call, which must have values, as the model's parameters must."""
        inputs = self._checked(args, kwargs)
        if self._world.is_virtual:  # real ranks hear of it when parameters are placed
            check_values(inputs, [*self._model.named_parameters(), *self._model.named_buffers()])
        return inputs

    def _checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallInputs:
        inputs = CallInputs.of(args, kwargs)
        if self._world.is_virtual:
            self._check(inputs)
            return inputs
        error = None
        try:
            self._check(inputs)
        except Exception as caught:  # whatever it is, the peers must hear of it
            error = caught
        try:
            problem = str(error) if isinstance(error, AutoparError) else repr(error)
            agree_on_call(inputs, error and problem, self._key(inputs), self._world.gather)
        except AutoparError as refusal:
            raise refusal from error
        return inputs

    def _check(self, inputs: CallInputs) -> None:
        dims = batch_dims_of(inputs, self._batch_dims)
        device, number = self._world.device(self._model), self._num_microbatches
        check_inputs(inputs, dims, self.mesh, device, is_virtual=self._world.is_virtual, num_microbatches=number)

    def _before_run(self, inputs: CallInputs, captured: _Captured) -> None:
        if self.seed is None:
            self.seed = int(self._world.gather(torch.initial_seed())[0])
        if not captured.are_replicas_checked and not self._world.is_virtual:
            check_replicas(inputs, batch_dims_of(inputs, self._batch_dims), self.mesh, self._world.gather)
        captured.are_replicas_checked = True

    # ---- captures

    def _key(self, inputs: CallInputs) -> tuple[Any, ...]:
        """Equal for calls that one program serves."""
        kind = self._world.device(self._model).type
        kind = "cpu" if kind == "meta" else kind
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        modes = tuple(module.training for module in self._model.modules())
        parameters = tuple((parameter.dtype, parameter.requires_grad) for parameter in self._model.parameters())
        return (inputs.key, kind, modes, torch.is_grad_enabled(), autocast, parameters)

    def _captured(self, inputs: CallInputs) -> _Captured:
        key = self._key(inputs)
        if key not in self._captures:
            self._captures[key] = self._compile(inputs, key)
        captured = self._captures[key]
        self._latest = captured.compiled
        return captured

    def _compile(self, inputs: CallInputs, key: tuple[Any, ...]) -> _Captured:
        self._announce(inputs)
        args, kwargs = inputs.call()
        if not self._world.is_virtual:
            args, kwargs = global_call(inputs, batch_dims_of(inputs, self._batch_dims), self.mesh.size_of(self.mesh.parts("dp")))
        with global_parameters(self._model):
            compiled = self._capture(args, kwargs, pins=dict(self._placements) or None)
        self._world.prepare(compiled)
        placements = placements_of(compiled.local.signature, compiled.local.mesh.ranks)
        if not self._captures:
            self._world.place(self._model, compiled)
            placements = all_placements(self._model, compiled.local.signature, compiled.local.mesh.ranks)
        elif not self._world.is_virtual:
            self._check_placements(placements)
        holders = compiled.holders
        placements = {name: replace(each, stages=holders.get(name, ())) for name, each in placements.items()}
        self._placements = placements | self._placements
        return _Captured(compiled, CompiledFragments(compiled.schedule.fragments, self._backend))

    def from_first(self, make: Callable[[], str]) -> str:
        """What `make` gives on rank 0, on every rank; it is called there alone. Collective."""
        return from_first(self._world, make)

    def _announce(self, inputs: CallInputs) -> None:
        number = len(self._captures) + 1
        if number == 1:
            return
        shapes = ", ".join(f"{name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for _, name, tensor in inputs.tensors)
        mode = f"training={self.training}, grad={torch.is_grad_enabled()}"
        logger.info("recapturing: no program fits this call (%s; %s); this is capture %d", shapes, mode, number)
        if number > MAX_QUIET_CAPTURES:
            warnings.warn(f"{number} captures of one model: each new shape compiles anew; pad batches to a few shapes", stacklevel=5)

    def _check_placements(self, placements: Mapping[str, Placement]) -> None:
        for name, placement in placements.items():
            first = self._placements.get(name)
            if first is not None and not same_placement(first, placement):
                was, now = first.sharding.describe(first.dims), placement.sharding.describe(placement.dims)
                raise PlanError(f"parameter {name!r} lies as {was} since the first capture; this call was compiled for {now}")

    # ---- parameters and state

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's parameters under its names; on a real mesh those of this process's stage. There it is a `MeshError` before the first
        capture, which places them."""
        if not self._world.is_virtual and not self._captures:
            raise MeshError(
                "parameters() on a real mesh before the first capture: until then it is not known which part of each this process holds. "
                "Pass example_inputs to autopar.compile, or call the module once, before making the optimizer"
            )
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            if self._world.is_virtual or not parameter.is_meta:
                yield name, parameter

    def train(self, mode: bool = True) -> ParallelModule:
        self._model.train(mode)
        self.training = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's: DTensors on a real mesh. Seed and step travel in the dict's metadata, so that a plain model loads it too."""
        state = super().state_dict(*args, **kwargs)
        if not self._world.is_virtual:
            for name in [name for name, value in state.items() if isinstance(value, torch.Tensor) and value.is_meta]:
                del state[name]
        return with_random_state(state, self.seed, self.step)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The model's state with every parameter whole, on every rank. Collective."""
        return with_random_state(
            full_state(super().state_dict(keep_vars=True), self._world, dict(self._model.named_parameters())), self.seed, self.step
        )

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load full or sharded values."""
        current = super().state_dict(keep_vars=True)
        result = super().load_state_dict(
            sharded_state(state_dict, current, self._world, dict(self._model.named_parameters())), strict, assign
        )
        self.seed, self.step = random_state_of(state_dict, self.seed, self.step)
        return result

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Scale all gradients so that their joint norm is at most `max_norm`; returns the norm before, a 0-d tensor. Collective."""
        return clip_grad_norm(dict(self.named_parameters()), self._world, max_norm, norm_type, error_if_nonfinite)

    # ---- inspection

    @property
    def compiled(self) -> Compiled:
        """The program of the latest call or `prepare`."""
        if self._latest is None:
            raise MeshError("nothing is captured yet: pass example_inputs to autopar.compile, or call the module once")
        return self._latest

    @property
    def plan(self) -> Any:
        return self.compiled.plan

    def explain(self) -> str:
        """The decisions with their reasons, the cost split and the runner-up, as text."""
        import autopar.reports.inspect

        return autopar.reports.inspect.explain(self.compiled)

    def summary(self) -> dict[str, Any]:
        """What `explain` says, as a JSON-able dict."""
        import autopar.reports.inspect

        return autopar.reports.inspect.summary(self.compiled)

    def why(self, pattern: str) -> str:
        """Why parameters, modules and ops that match `pattern` are split as they are, what that costs, and what else was possible."""
        import autopar.reports.inspect

        return autopar.reports.inspect.why(self.compiled, pattern)

    def what_if(self, pins: Any) -> Any:
        """What the latest program would cost with these pins in place of those given to `compile`; a value that prints. Nothing changes."""
        import autopar.reports.inspect

        return autopar.reports.inspect.what_if(self.compiled, pins)

    def print_program(self, after: str | None = None, rank: int = 0) -> str:
        """The program after pass `after`, or what `rank` runs."""
        import autopar.reports.inspect

        return autopar.reports.inspect.print_program(self.compiled, after=after, rank=rank)

    def diff(self, before: str, after: str) -> str:
        """How the program differs between after pass `before` and after pass `after`."""
        import autopar.reports.inspect

        return autopar.reports.inspect.diff(self.compiled, before, after)

    def timeline(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step of a pipeline on these inputs and measure it: a value that prints, and writes a trace beside the predicted one.

        Nothing changes: no gradient is kept, no buffer written. Collective.
        """
        from autopar.runtime import timeline

        return timeline.timeline(self, args, kwargs)  # pyright: ignore[reportArgumentType]  (one class, seen by two paths)

    def verify(self, *args: Any, promote: bool = False, tolerance: float | None = None, **kwargs: Any) -> Any:
        """Run original and rewritten program side by side on these inputs; the report is truthy when they agree.

        `promote` does it in float64 and asks for 1e-9, else 1e-4 is asked for (6e-2 of bfloat16, 8e-3 of float16), or `tolerance`.
        """
        from autopar.runtime import verify

        return verify.verify(self, args, kwargs, promote, tolerance)  # pyright: ignore[reportArgumentType]  (one class, seen by two paths)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise MeshError("a parallel module cannot be copied; copy the model and compile the copy")


def _check_names(model: nn.Module) -> None:
    """Raise `AutoparError` when the root of `model` has a parameter, buffer or submodule under a name of ours: ours would overwrite it."""
    taken = {**model._parameters, **model._buffers, **model._modules}
    for name in (*_PUBLIC_NAMES, *_PRIVATE_NAMES):
        if name in taken:
            raise AutoparError(
                f"the model has a parameter, buffer or submodule {name!r}, a name that the parallel module itself uses; "
                "wrap the model in another module, so that the name is not at the root, or rename it"
            )
