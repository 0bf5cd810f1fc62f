"""A model on a mesh and what was captured of it: one program for each kind of call, and where the parameters lie."""

from __future__ import annotations

import gc
import logging
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar._torch import outside_fake_modes
from autopar.driver.compiled import TENSOR, Compiled
from autopar.driver.options import BatchDims, BatchOfFirst
from autopar.driver.pad_to import PadTo
from autopar.driver.train_step import TrainStep
from autopar.errors import AutoparError, InputError, MeshError
from autopar.frontend.capture import described_output
from autopar.graph.autocast import Autocast
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placement
from autopar.ir.shares import UnequalShares
from autopar.runtime._torch import Backend, share_contents
from autopar.runtime.birth.weights import Weights
from autopar.runtime.execute.agreement import from_first, telling
from autopar.runtime.execute.call import made_in_inference_mode, outside_inference_mode
from autopar.runtime.execute.distributed_world import DistributedWorld
from autopar.runtime.execute.fragments import CompiledFragments
from autopar.runtime.execute.places import Places
from autopar.runtime.execute.virtual_world import VirtualWorld
from autopar.runtime.execute.world import World
from autopar.runtime.module.backwards import Backwards
from autopar.runtime.module.call_agreement import Agreement, agree_on_call, shares_to_pad
from autopar.runtime.module.guard import ModelGuard
from autopar.runtime.module.host_allocator import FreedMemory
from autopar.runtime.module.input_values import check_values
from autopar.runtime.module.inputs import (
    CallInputs,
    batch_dims_of,
    check_inputs,
    checksum,
    global_call,
)
from autopar.runtime.module.lengths import CutOutputs, Described, at_length, padded
from autopar.runtime.module.lying_inputs import check_lying
from autopar.runtime.module.names import NamesOfModel, log_names_of_both
from autopar.runtime.module.placement import all_placements, check_placements, global_parameters, placements_of, written_whole
from autopar.runtime.module.signature import check_arguments
from autopar.runtime.module.tangents import TangentCheck, tell_of_unequal_shares
from autopar.runtime.module.trained import take_over
from autopar.runtime.train.plain_loop import step_by_parts
from autopar.runtime.train.scaler import Scaler
from autopar.runtime.train.trainer import Trainer

T = TypeVar("T")
logger = logging.getLogger("autopar")

MAX_QUIET_CAPTURES = 8

Capture = Callable[..., Compiled]
# The parallel module of a copy of the model, in the same world.
ForCopy = Callable[[nn.Module, World], Any]
CallKey = tuple[Any, ...]


class ModelTensors(NamedTuple):
    """The model's parameters that this process holds, and its buffers, by name. `seen` is what the guard saw when they were looked up."""

    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, torch.Tensor]
    seen: object

    @property
    def named(self) -> Mapping[str, torch.Tensor]:
        return {**self.parameters, **self.buffers}


@dataclass
class Captured:
    compiled: Compiled
    fragments: CompiledFragments
    places: Places
    batch_dims: Mapping[int, int]
    are_replicas_checked: bool = False
    tangent_check: TangentCheck = field(default_factory=TangentCheck)
    is_told_of_scale: bool = False
    # Which of its schedules, plain and updating, ran: the first run of each is watched where there is a budget.
    ran: set[bool] = field(default_factory=set[bool])
    # Where calls are padded.
    cut_outputs: CutOutputs = field(default_factory=CutOutputs)

    @cached_property
    def trainable(self) -> frozenset[str]:
        """The parameters that get gradients."""
        return frozenset(item.name for item in self.compiled.signature.outputs_of("gradient"))

    @property
    def has_outputs(self) -> bool:
        """Whether tensors besides the loss come out."""
        return bool(self.compiled.signature.outputs_of("output"))

    @property
    def may_tell_length(self) -> bool:
        """Whether what comes out may depend on the length of the batch: tensors besides the loss, or numbers."""
        return self.has_outputs or any(leaf is not TENSOR and leaf is not None for leaf in self.compiled.signature.leaves)

    @property
    def draws(self) -> bool:
        """Whether a call draws random numbers."""
        return bool(self.compiled.signature.inputs_of("random_key"))


class CapturingModule(NamesOfModel):
    """The model's parameters, buffers and submodules under their own names, and the programs captured so far.

    Arguments as of `autopar.runtime.module.parallel_module.ParallelModule`, which adds the call.
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
        batch_dims: BatchDims | None = None,
        timeout: float | None = None,
        num_microbatches: int | None = None,
        world: World | None = None,
        for_copy: ForCopy | None = None,
        trainer: Trainer | None = None,
        weights: Weights | None = None,
        takes_global: bool = False,
        pad_to: PadTo | None = None,
        asked: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        share_contents(self, model)
        self.mesh = mesh
        self.step = 0
        self.seed: int | None = None
        self._capture, self._backend, self._num_microbatches = capture, backend, num_microbatches
        self._batch_dims = BatchOfFirst.of(model) if batch_dims is None else batch_dims
        self._world: World = world or (VirtualWorld(mesh) if device_mesh is None else DistributedWorld(device_mesh, timeout))
        self._backwards = Backwards(self._world)
        self._captures: dict[CallKey, Captured] = {}
        self._placements: dict[str, Placement] = {}
        self._latest: Compiled | None = None
        self._guard, self._for_copy = ModelGuard(model, is_placed=not self._world.is_virtual), for_copy
        self._tensors: ModelTensors | None = None
        self._trainer = trainer or Trainer(None, TrainStep())
        self._scaler: Scaler | None = None
        self._freed = FreedMemory()
        self._weights, self._takes_global, self._pad_to, self._asked = weights, takes_global, pad_to, asked or {}
        # The latest call's inputs, of the global batch.
        self._given: CallInputs | None = None
        # Of parameters that were placed since ranks last agreed on a call, the checksums of their whole values.
        self._placed_anew: dict[str, str] = {}
        self._trainer.bind(model)
        if weights is not None and device_mesh is None and world is None:
            weights.give(model)
        log_names_of_both(self, model)
        self.__dict__["_model"] = model  # the last: names that come after it are the model's

    def captured(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], runs: bool = False, agreement: Agreement = "now"
    ) -> tuple[CallInputs, Captured]:
        """The inputs of such a call, and the program that runs it, captured where there is none yet.

        Where it `runs`, the inputs and the model's parameters must have values. With an `agreement` that comes later, `World.hear` raises
        `UnequalError` where ranks make different calls.
        """
        inputs = self.call_inputs(args, kwargs)
        key, shares = (self._check(inputs), None) if self._world.is_virtual else self._agreed(inputs, agreement)
        if shares is not None:
            key = (shares, inputs.kinds, inputs.other_sizes(shares.dims), *key[1:])
        if runs and self._world.is_virtual:  # real ranks hear of it when parameters are placed
            check_values(inputs, self.tensors().named.items())
        if key not in self._captures:
            with outside_inference_mode(unless=made_in_inference_mode(self._model)):
                self._captures[key] = self._compile(inputs, shares)
        self._latest = self._captures[key].compiled
        if runs:
            check_lying(inputs, self._latest.signature, self._world)
            self._freed.begin_call()
        return inputs, self._captures[key]

    def call_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallInputs:
        """What this process computes with of a call's inputs: its share, where they are of the global batch, and padded, where lengths
        are. Collective then."""
        if not self._captures:
            self._agree_on_options()
        inputs = self._share(CallInputs.of(args, kwargs))
        return inputs if self._pad_to is None else padded(inputs, self._pad_to, self._batch_dims, self.mesh, self._world)

    def _agree_on_options(self) -> None:
        """What was asked of the compile is the same on all ranks. Collective. Raises `InputError` on all of them."""
        everyone = self._world.gather(self._asked, "a comparison of the ranks' calls")
        for rank, theirs in enumerate(everyone):
            unlike = [name for name, value in everyone[0].items() if theirs[name] != value]
            if unlike:
                first, other = (", ".join(f"{name}={asked[name]}" for name in unlike) for asked in (everyone[0], theirs))
                raise InputError(f"rank 0 has {first}, and rank {rank} has {other}: give autopar.compile the same on all ranks")

    def _share(self, inputs: CallInputs) -> CallInputs:
        if not self._takes_global or not isinstance(self._world, DistributedWorld):
            return inputs
        try:
            dims = batch_dims_of(inputs, self._batch_dims)
        except InputError:
            return inputs  # refused where all ranks hear of it
        self._given = inputs
        return inputs.share(dims, self.mesh.index(self._world.rank, self.mesh.parts("dp")), self.mesh.num_shares)

    def learn_lengths(self, inputs: CallInputs, captured: Captured) -> None:
        """How outputs are cut, before anything runs that they come of. Raises `InputError` where they cannot be, on all ranks."""
        lengths = inputs.lengths
        if lengths is None or not captured.may_tell_length:
            return

        def describe(length: int) -> Described:
            return described_output(self._model, *at_length(lengths, length, *inputs.call(of_a_sample)))

        def of_a_sample(index: int, tensor: torch.Tensor) -> torch.Tensor:
            """Of a rank without samples: few models run on none."""
            dim = captured.batch_dims.get(index)
            if dim is None or tensor.shape[dim]:
                return tensor
            return tensor.new_zeros([1 if each == dim else size for each, size in enumerate(tensor.shape)])

        with global_parameters(self._model, self._world.device(self._model)), outside_fake_modes():
            captured.cut_outputs.learn(lengths, describe)

    def cut(self, tensors: Mapping[str, torch.Tensor], inputs: CallInputs, captured: Captured) -> Mapping[str, torch.Tensor]:
        """Results by flat index, of the batch's own length where it was padded."""
        return tensors if inputs.lengths is None else captured.cut_outputs.cut(tensors, inputs.lengths.own)

    def tensors(self) -> ModelTensors:
        """As the guard saw them at this call; walking the modules takes milliseconds."""
        seen = self._guard.seen()
        if self._tensors is None or self._tensors.seen is not seen:
            self._tensors = ModelTensors(dict(self.named_parameters()), dict(self.named_buffers()), seen)
        return self._tensors

    def _agreed(self, inputs: CallInputs, agreement: Agreement = "now") -> tuple[CallKey, UnequalShares | None]:
        """The key, once all ranks agree that they make this call, and their shares of the batch where these are unequal, or are to be
        padded. Collective."""
        error, key = None, ()
        try:
            key = self._check(inputs)
        except Exception as caught:  # whatever it is, the peers must hear of it
            error = caught
        try:
            problem = str(error) if isinstance(error, AutoparError) else repr(error)
            backwards = self._backwards
            counts = (self.seed, self.step, (backwards.number, backwards.num_calls), sorted(self._placed_anew.items()))
            told = (inputs.kinds, *key[1:], *self._trainer.told, *counts) if key else ()
            place, when = f"a call ({backwards.place})", self._when_agreed(key, agreement)
            shares = agree_on_call(inputs, error and problem, told, self.mesh, self._batch_dims, self._world, place, when)
        except AutoparError as refusal:
            if not self._set_by_stages(refusal):
                raise refusal from error
        else:
            self._placed_anew = {}
            return key, self._shares_to_pad(inputs) if shares is None else shares
        return self._agreed(inputs)

    def _when_agreed(self, key: CallKey, wanted: Agreement) -> Agreement:
        """A call may begin before all agree where nothing is captured or compared for it any more."""
        is_known = key in self._captures and bool(self._captures[key].ran)
        return "now" if wanted == "later" and (not is_known or self._placed_anew or self._pad_to is not None) else wanted

    def _set_by_stages(self, refusal: AutoparError) -> bool:
        """Whether ranks, all of which were refused, only trained other parameters, each of its own stage; they agree now. Collective."""
        if not isinstance(refusal, InputError) or refusal.is_told:  # of which some ranks heard elsewhere
            return False
        if self.mesh.size_of(self.mesh.parts("pp")) > 1 and take_over(self._model, self._world.gather):
            return True
        self._backwards.begin_anew()  # that one was missed is said once
        return False

    def _shares_to_pad(self, inputs: CallInputs) -> UnequalShares | None:
        return shares_to_pad(inputs, batch_dims_of(inputs, self._batch_dims), self.mesh.num_shares, self._num_microbatches)

    def _check(self, inputs: CallInputs) -> CallKey:
        """Raise where this process cannot make the call; a key that is equal for calls that one program serves."""
        state = self._guard.state(self._place_anew)
        device = self._world.device(self._model)
        kind = "cpu" if device.type == "meta" else device.type
        key = (inputs.key, kind, state, torch.is_grad_enabled(), Autocast.around(device.type), self._guard.trainable())
        if key not in self._captures:
            check_arguments(self._model, *inputs.call())
        dims = batch_dims_of(inputs, self._batch_dims)
        check_inputs(inputs, dims, device, is_virtual=self._world.is_virtual)
        if self._trainer.is_stepping:
            self._trainer.check(self)
        return key

    def _compile(self, inputs: CallInputs, shares: UnequalShares | None) -> Captured:
        self._announce(inputs)
        args, kwargs = inputs.call()
        dims = batch_dims_of(inputs, self._batch_dims) if shares is None else shares.dims
        if not self._world.is_virtual:
            sizes = {index: tensor.shape[dims[index]] * self.mesh.num_shares for index, _, tensor in inputs.tensors if index in dims}
            sizes = sizes if shares is None else {index: sum(each) for index, each in shares.sizes.items()}
            args, kwargs = global_call(inputs, dims, sizes)
        values, device = None, self._world.device(self._model)
        if self._weights is not None and not self._captures and isinstance(self._world, DistributedWorld):
            values = self._weights.agreed(self._model, self._world.groups, self._world.mesh)  # before minutes of capture
        stands_in = global_parameters(self._model, device, without_values=values is not None)
        with telling(self._world, "a comparison of the ranks' programs"), stands_in:
            compiled = self._capture(args, kwargs, pins=dict(self._placements) or None, shares=shares)
        self._world.prepare(compiled)
        placements = placements_of(compiled.signature, compiled.mesh.ranks)
        if not self._captures:
            if not self._world.is_virtual:
                gc.collect()  # torch's capture leaves cycles that hold the model's parameters, which are let go of next
                self._guard.let_go()
            before = {name: weakref.ref(parameter) for name, parameter in self._model.named_parameters()}
            self._world.place(self._model, compiled, values)
            if isinstance(self._world, DistributedWorld):
                step_by_parts(self._model.named_parameters(), self._world, self._trainer, before)
            placements = all_placements(self._model, compiled.signature, compiled.mesh.ranks)
        elif not self._world.is_virtual:
            check_placements(self._placements, placements, compiled.signature, compiled.holders)
        holders = compiled.holders
        # What no call has read so far lies whole on all stages, and is from now on that of those that read it.
        read_now = {name: holders[name] for name, each in self._placements.items() if not each.stages and holders.get(name)}
        if isinstance(self._world, DistributedWorld):
            self._world.holders |= read_now
        placements = {name: replace(each, stages=holders.get(name, ())) for name, each in placements.items()}
        placements |= {name: each for name, each in self._placements.items() if name not in read_now}
        self._placements = placements | written_whole(placements, compiled.signature)
        self._guard.captured(compiled.facts.written)
        if device.type == "cpu":
            self._freed.keep()
        tell_of_unequal_shares(compiled.signature, self._world)
        if compiled.updating is not None and compiled.facts.needs_scale:
            self._trainer.scale_by_default()
        return Captured(compiled, CompiledFragments(compiled.schedule.fragments, self._backend), Places(compiled, self._world.ranks), dims)

    def from_first(self, make: Callable[[], T]) -> T:
        """What `make` gives on rank 0, on every rank; it is called there alone. Collective."""
        return from_first(self._world, make)

    def gathered(self, value: Any, what: str) -> list[Any]:
        """Every rank's `value`; errors say `what` it is. Collective."""
        return self._world.gather(value, what)

    def _place_anew(self, names: Sequence[str]) -> None:
        """Place what was put in the place of placed parameters. Ranks do so when they will: values are compared at the next call."""
        world = self._world
        assert isinstance(world, DistributedWorld)
        before = {name: self._model.get_parameter(name) for name in names}
        self._placed_anew |= {name: checksum(each) for name, each in before.items()}
        with outside_inference_mode(unless=any(each.is_inference() for each in before.values())):
            world.place_anew(self._model, names)
        placed = [(name, self._model.get_parameter(name)) for name in names]
        step_by_parts(placed, world, self._trainer, {name: weakref.ref(each) for name, each in before.items()})

    def _announce(self, inputs: CallInputs) -> None:
        number = len(self._captures) + 1
        if number == 1:
            return
        shapes = ", ".join(f"{name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for _, name, tensor in inputs.tensors)
        changed = f"; the model changed: {changes}" if (changes := self._guard.changes()) else ""
        told = f"{shapes}; training={self.training}, grad={torch.is_grad_enabled()}{changed}"
        logger.info("recapturing: no program fits this call (%s); this is capture %d", told, number)
        if number > MAX_QUIET_CAPTURES:
            fewer = "pad_to=autopar.PadTo(...) pads batches to a few lengths" if self._pad_to is None else "give pad_to= fewer lengths"
            why = f"each new shape compiles anew; {fewer}"
            why = f"each change of the model compiles anew; the latest: {changes}" if changes else why
            warnings.warn(f"{number} captures of one model: {why}", stacklevel=5)

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's parameters under its names; on a real mesh those of this process's stage. There it is a `MeshError` before the first
        capture, which places them."""
        if not self._world.is_virtual and not self._captures:
            raise MeshError(
                "parameters() on a real mesh before the first capture: until then it is not known which part of each this process holds. "
                "Pass example_inputs to autopar.compile, or call the module once, before making the optimizer"
            )
        if new := self._guard.to_place():
            self._place_anew(new)  # an optimizer may be made of them
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            if self._world.is_virtual or not parameter.is_meta:
                yield name, parameter

    def train(self, mode: bool = True) -> Self:
        self._model.train(mode)
        return self
