"""The module that the user trains: their model's parameters and names, run on the mesh."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.driver.compiled import Compiled
from autopar.errors import AutoparError, MeshError, PlanError
from autopar.frontend.module_hooks import FORWARD_HOOK_FLAGS, FORWARD_HOOKS
from autopar.ir.mesh import Mesh
from autopar.runtime._torch import Backend, not_compiled
from autopar.runtime.execute.call import Call, differentiate
from autopar.runtime.execute.fragments import CompiledFragments
from autopar.runtime.execute.random_key import random_key
from autopar.runtime.execute.world import DistributedWorld, VirtualWorld, World, from_first
from autopar.runtime.module.guard import ModelGuard
from autopar.runtime.module.inputs import (
    BatchDims,
    CallInputs,
    agree_on_call,
    batch_dims_of,
    check_inputs,
    check_replicas,
    check_values,
    global_call,
)
from autopar.runtime.module.inspection import Inspected
from autopar.runtime.module.names import NamesOfModel, check_names
from autopar.runtime.module.outputs import build_output
from autopar.runtime.module.parameters import Placement, same_placement
from autopar.runtime.module.placement import all_placements, global_parameters, placements_of
from autopar.runtime.module.signature import check_arguments
from autopar.runtime.module.state import clip_grad_norm, full_state, random_state_of, sharded_state, with_random_state

logger = logging.getLogger("autopar")

MAX_QUIET_CAPTURES = 8
# What a parallel module keeps on itself, beside the dicts that it shares with the model.
_PUBLIC_NAMES = ("mesh", "step", "seed", "plan", "compiled")
_PRIVATE_NAMES = (
    "_model",
    "_guard",
    "_capture",
    "_backend",
    "_batch_dims",
    "_num_microbatches",
    "_world",
    "_captures",
    "_placements",
    "_latest",
    "_for_copy",
)
Capture = Callable[..., Compiled]
ForCopy = Callable[[nn.Module, World], "ParallelModule"]
CallKey = tuple[Any, ...]


@dataclass
class Captured:
    compiled: Compiled
    fragments: CompiledFragments
    are_replicas_checked: bool = False

    @property
    def draws(self) -> bool:
        """Whether a call draws random numbers."""
        return bool(self.compiled.local.signature.inputs_of("random_key"))


class ParallelModule(Inspected, NamesOfModel):
    """`model` on `mesh`, behind a plain call.

        loss = parallel(**batch).loss
        loss.backward()
        optimizer.step()

    On a virtual mesh a call takes the global batch; on a real mesh (`device_mesh`) each process passes its share
    along dp, and where the model computes no loss it gets its share of the outputs: gradients are then those of the mean
    over dp of the ranks' own losses, as with DDP. Parameters, buffers and submodules are the model's own, under their own
    names; on a real mesh the first capture replaces the parameters by this process's parts, as DTensors. Other names of the
    model's are read and written there, too; its methods run as they are written, and what they call is the model. Backward hooks
    of the model itself run around the call, with the parallel module as the module.

    The model may be changed between calls: its modes, hooks, attributes, `config` and submodules are compared with those that were
    captured, and where they differ the call is captured anew, which is logged. Other parameters are a `PlanError`.

    `step` counts the calls that draw random numbers, `seed` is where those begin; both are in the state.

    capture     `(args, kwargs, *, pins) -> Compiled`: inputs of global shape (values are not read on a real mesh), and the
                placements of parameters that an earlier capture fixed, by name (None at the first)
    backend     "eager", the name of any torch.compile backend, or such a backend itself
    batch_dims  see `autopar.runtime.module.inputs.batch_dims_of`
    timeout     seconds that a real rank waits for its peers; None keeps torch's default
    num_microbatches  which must divide every rank's share of the batch; None where the capture chooses it
    world       that of the module of which this is a copy
    for_copy    makes the parallel module of a deep copy of the model, in the same world; without it copies are refused

    A call raises `InputError` for inputs that cannot run (an `ArgumentError`, also a `TypeError`, for arguments that forward does not
    take), `ValueCheckError` where an assertion of the model does not hold, `PlanError` where the model's parameters are others,
    `MeshError`, `PeerError` for a rank that does not answer, and what `autopar.compile` raises when it captures. `loss.backward()`
    raises `BackwardError` for a second backward of one call, or through an output that has none.
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
        world: World | None = None,
        for_copy: ForCopy | None = None,
    ) -> None:
        super().__init__()
        check_names(model, ParallelModule, (*_PUBLIC_NAMES, *_PRIVATE_NAMES))
        # The very dicts of the model: every name, tie, hook and submodule is what it was.
        self._parameters, self._buffers, self._modules = model._parameters, model._buffers, model._modules
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self._backward_hooks, self._backward_pre_hooks = model._backward_hooks, model._backward_pre_hooks
        self.mesh = mesh
        self.step = 0
        self.seed: int | None = None
        self._capture, self._backend, self._batch_dims, self._num_microbatches = capture, backend, batch_dims, num_microbatches
        self._world: World = world or (VirtualWorld(mesh) if device_mesh is None else DistributedWorld(device_mesh, timeout))
        self._for_copy = for_copy
        self._captures: dict[CallKey, Captured] = {}
        self._placements: dict[str, Placement] = {}
        self._latest: Compiled | None = None
        self._guard = ModelGuard(model)
        self.__dict__["_model"] = model  # the last: names that come after it are the model's

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
        return self.captured(args, kwargs)[1].compiled

    def start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, Compiled]:
        """A call that has not run yet, counted as a step where it draws: `call.forward()`, then `call.backward(tangents)`."""
        inputs, captured = self.captured(args, kwargs, runs=True)
        self._before_run(inputs, captured)
        self.step += captured.draws
        assert self.seed is not None
        key = random_key(self.seed, self.step)
        tensors = dict(self.named_parameters()) | dict(self.named_buffers())
        call = Call(captured.compiled, captured.fragments, self._world, tensors, inputs.leaves, key, self._world.device(self))
        return call, captured.compiled

    def captured(self, args: tuple[Any, ...], kwargs: dict[str, Any], runs: bool = False) -> tuple[CallInputs, Captured]:
        """The inputs of such a call, and the program that runs it, captured where there is none yet.

        Where it `runs`, the inputs and the model's parameters must have values.
        """
        inputs = CallInputs.of(args, kwargs)
        key = self._check(inputs) if self._world.is_virtual else self._agreed(inputs)
        if runs and self._world.is_virtual:  # real ranks hear of it when parameters are placed
            check_values(inputs, [*self._model.named_parameters(), *self._model.named_buffers()])
        if key not in self._captures:
            self._captures[key] = self._compile(inputs)
        self._latest = self._captures[key].compiled
        return inputs, self._captures[key]

    def _agreed(self, inputs: CallInputs) -> CallKey:
        """The key, once all ranks agree that they make this call. Collective."""
        error, key = None, ()
        try:
            key = self._check(inputs)
        except Exception as caught:  # whatever it is, the peers must hear of it
            error = caught
        try:
            problem = str(error) if isinstance(error, AutoparError) else repr(error)
            agree_on_call(inputs, error and problem, key, self._world.gather)
        except AutoparError as refusal:
            raise refusal from error
        return key

    def _check(self, inputs: CallInputs) -> CallKey:
        """Raise where this process cannot make the call; a key that is equal for calls that one program serves."""
        state = self._guard.state()
        device, number = self._world.device(self._model), self._num_microbatches
        kind = "cpu" if device.type == "meta" else device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        key = (inputs.key, kind, state, torch.is_grad_enabled(), autocast, self._guard.trainable())
        if key not in self._captures:
            check_arguments(self._model, *inputs.call())
        dims = batch_dims_of(inputs, self._batch_dims)
        check_inputs(inputs, dims, self.mesh, device, is_virtual=self._world.is_virtual, num_microbatches=number)
        return key

    def _before_run(self, inputs: CallInputs, captured: Captured) -> None:
        if self.seed is None:
            self.seed = int(self._world.gather(torch.initial_seed())[0])
        if not captured.are_replicas_checked and not self._world.is_virtual:
            check_replicas(inputs, batch_dims_of(inputs, self._batch_dims), self.mesh, self._world.gather)
        captured.are_replicas_checked = True

    # ---- captures

    def _compile(self, inputs: CallInputs) -> Captured:
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
        self._guard.captured(compiled.forward.written)
        return Captured(compiled, CompiledFragments(compiled.schedule.fragments, self._backend))

    def from_first(self, make: Callable[[], str]) -> str:
        """What `make` gives on rank 0, on every rank; it is called there alone. Collective."""
        return from_first(self._world, make)

    def _announce(self, inputs: CallInputs) -> None:
        number = len(self._captures) + 1
        if number == 1:
            return
        shapes = ", ".join(f"{name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for _, name, tensor in inputs.tensors)
        mode = f"training={self.training}, grad={torch.is_grad_enabled()}"
        changes = self._guard.changes()
        changed = f"; the model changed: {changes}" if changes else ""
        logger.info("recapturing: no program fits this call (%s; %s%s); this is capture %d", shapes, mode, changed, number)
        if number > MAX_QUIET_CAPTURES:
            why = "each new shape compiles anew; pad batches to a few shapes"
            why = f"each change of the model compiles anew; the latest: {changes}" if changes else why
            warnings.warn(f"{number} captures of one model: {why}", stacklevel=5)

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
        """Scale all gradients so that their joint norm is at most `max_norm`; returns the norm before, a 0-d tensor. Collective.

        Use it in place of `torch.nn.utils.clip_grad_norm_(parallel.parameters(), ...)`: with pp on processes, torch's own would clip each
        stage by the norm of that stage's gradients alone, and cannot tell that there are others.
        """
        return clip_grad_norm(dict(self.named_parameters()), self._world, max_norm, norm_type, error_if_nonfinite)

    # ---- copies

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """A module with parameters of its own, and the programs that are there. Raises `MeshError` where there cannot be one."""
        if self._for_copy is None:
            raise MeshError("this parallel module was not made by autopar.compile; copy the model and compile the copy")
        if not self._world.is_virtual:
            self._check_copy()
        copied = self._for_copy(copy.deepcopy(self._model, memo), self._world)
        memo[id(self)] = copied
        copied.seed, copied.step, copied._latest = self.seed, self.step, self._latest
        copied._captures, copied._placements = dict(self._captures), dict(self._placements)
        copied._guard = self._guard.copied(copied._model)
        for name in (*FORWARD_HOOKS, *FORWARD_HOOK_FLAGS):
            copied.__dict__[name] = copy.deepcopy(self.__dict__[name], memo)
        return copied

    def _check_copy(self) -> None:
        """A copy must be able to run what is compiled, with the parts of parameters that this process has."""
        if not self._captures:
            raise MeshError("a copy on a real mesh before the first capture: its parameters have no places yet; call the module first")
        elsewhere = next((name for name, parameter in self._model.named_parameters() if parameter.is_meta), None)
        if elsewhere is not None:
            raise MeshError(
                f"a copy of one stage of a pipeline: {elsewhere!r} lies with another stage only, and what averages parameters would pair "
                "this process's with those of the whole model; average the values of state_dict() instead"
            )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise AutoparError(
            "a parallel module cannot be saved or pickled as a whole: it holds compiled programs. Save parallel.state_dict(), or "
            "parallel.full_state_dict() for another mesh, and load it into a model that is compiled again; copy.deepcopy works"
        )
