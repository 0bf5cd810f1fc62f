"""The module that the user trains: their model's parameters and names, run on the mesh."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Container, Mapping
from functools import partial
from threading import get_ident
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from autopar.driver.compiled import Compiled
from autopar.driver.train_step import LossScale
from autopar.errors import AutoparError, InputError, MeshError
from autopar.runtime._torch import not_compiled
from autopar.runtime.execute.agreement import agreed
from autopar.runtime.execute.call import Call
from autopar.runtime.execute.fragments import rank_sizes
from autopar.runtime.execute.host_group import UnequalError
from autopar.runtime.execute.random_key import random_key
from autopar.runtime.execute.tape import differentiate
from autopar.runtime.module.captures import Agreement, Captured
from autopar.runtime.module.copies import check_copy, share_captures
from autopar.runtime.module.inputs import CallInputs, check_global, check_replicas
from autopar.runtime.module.inspection import Inspected
from autopar.runtime.module.outputs import build_output
from autopar.runtime.module.placement import check_conversion
from autopar.runtime.train.refusals import refuse_incomplete, updating_schedule
from autopar.runtime.train.scaler import Scaler, tell_of_scale
from autopar.runtime.train.trainer import Evaluated
from autopar.runtime.verify.budget_guard import State, guard
from autopar.runtime.verify.non_finite import first_non_finite


class ParallelModule(Inspected):
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
    captured, and where they differ the call is captured anew, which is logged. Parameters of other names, shapes or dtypes are a
    `PlanError`; on a real mesh plain ones in the place of placed ones are placed as those were, by `parameters()` and by the next call.

    `step` counts the calls that draw random numbers, `seed` is where those begin; both are in the state.

    capture     `(args, kwargs, *, pins, shares) -> Compiled`: inputs of global shape (values are not read on a real mesh), and the
                placements of parameters that an earlier capture fixed, by name (None at the first); `shares` of the batch where they
                are unequal
    backend     "eager", the name of any torch.compile backend, or such a backend itself
    batch_dims  see `autopar.runtime.module.inputs.batch_dims_of`
    timeout     seconds that a real rank waits for its peers; None keeps torch's default
    pad_to      see `PadTo`
    num_microbatches  to a multiple of which every rank's share of the batch is padded; None where the capture chooses it
    world       that of the module of which this is a copy
    for_copy    makes the parallel module of a deep copy of the model, in the same world; without it copies are refused

    A call raises `InputError` for inputs that cannot run (an `ArgumentError`, also a `TypeError`, for arguments that forward does not
    take), `ValueCheckError` where an assertion of the model does not hold, `PlanError` where the model's parameters are others,
    `MeshError`, `PeerError` for a rank that does not answer, and what `autopar.compile` raises when it captures. `loss.backward()`
    raises `BackwardError` for a second backward of one call, or through an output that has none.
    """

    # ---- the call

    @not_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output structure; see the class. A compiled training loop calls it as it is: its fragments are compiled already."""
        return self._updating_call(args, kwargs) if self._trainer.is_asked() else self._plain_call(args, kwargs)[0]

    def _plain_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Evaluated:
        """The output, its tensors by flat index, and which of them gradients come back through."""
        call, captured, inputs = self.start(args, kwargs)
        if call.has_backward and captured.trainable and torch.is_grad_enabled():
            call.meeting = self._backwards.of_next_call(captured.tangent_check)
            parameters = self.tensors().parameters
            tensors = differentiate(call, {name: parameter for name, parameter in parameters.items() if name in captured.trainable})
        else:
            with torch.no_grad():
                tensors = call.forward()
        signature, tensors = captured.compiled.signature, self.cut(tensors, inputs, captured)
        return build_output(signature, tensors), tensors, [item.name for item in signature.inputs_of("tangent")]

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer of `train_step`; None where none was given. Raises `MeshError` on a real mesh before the first capture."""
        return self._trainer.optimizer(self)

    @property
    def ema(self) -> dict[str, torch.Tensor]:
        """The averages of `TrainStep(ema=...)` by name, as the parameters lie; empty before the first update."""
        return self._trainer.averages

    @property
    def loss_scale(self) -> float | None:
        """What `TrainStep(loss_scale=...)` has the loss multiplied by in the next step; None where it scales nothing."""
        return None if self._trainer.scaling is None else self._trainer.scaling.scale

    def train_state_dict(self) -> dict[str, Any]:
        """What `train_step` goes on from, besides `state_dict()`: the optimizer's state, averages, loss scale and counts, whole values
        by the parameters' names, on every rank. Of any mesh, for any mesh. Collective.

        Raises `AutoparError` in the middle of an accumulation.
        """
        return {"seed": self.seed, "step": self.step, **self._trainer.state(self)}

    def load_train_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `train_state_dict` gave. Collective. Raises `AutoparError`, and changes nothing, where something is missing, and
        where options or parameters are others."""
        agreed(self._world, lambda: refuse_incomplete(state), "a look at the saved state of training")
        self._trainer.load_state(state, self)
        self.seed, self.step = state["seed"], state["step"]

    @not_compiled
    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Forward, backward and update of one batch; what the call returns, its loss detached.

        Each gradient is used, and freed, as soon as it is final. `train_step=TrainStep(...)` of `autopar.compile` says what else
        happens. Raises as a call does, and `AutoparError` without an optimizer, without a loss, or where a hook waits for gradients.
        """
        self._trainer.asked_by = get_ident()
        try:
            return self(*args, **kwargs)
        finally:
            self._trainer.asked_by = None

    def _updating_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._trainer.is_stepping = True
        try:
            with torch.enable_grad():
                if self._trainer.takes_closure:
                    self.prepare(args, kwargs)  # it is made of placed parameters
                    return self._trainer.step_by_closure(lambda: self._plain_call(args, kwargs), self)
                call, captured, inputs = self.start(args, kwargs, updates=True)
        finally:
            self._trainer.is_stepping = False
        self._trainer.prepare(self)
        scale = self._trainer.scale

        def trace() -> str:
            return first_non_finite(self, args, kwargs, captured, call.key, scale)

        tensors = self.cut(self._trainer.run(call, self, trace), inputs, captured)
        return build_output(captured.compiled.signature, tensors)

    def scaler(self, options: LossScale | None = None) -> Scaler:
        """Scales the loss of a plain loop, in a pipeline, too; see `Scaler`. It scales what calls of this module make from now on."""
        self._scaler = Scaler(options or LossScale(), lambda: dict(self.named_parameters()), self._world)
        return self._scaler

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compiled:
        """Capture and compile for such a call and place the parameters, without running it. Inputs as in a call."""
        return self.captured(args, kwargs)[1].compiled

    def start(self, args: tuple[Any, ...], kwargs: dict[str, Any], updates: bool = False) -> tuple[Call, Captured, CallInputs]:
        """A call that has not run yet, counted as a step where it draws: `call.forward()`, then `call.backward(tangents)`.

        One that `updates` is run by `train_step`. What no other rank hears of may have run: meanwhile ranks tell each other whether they
        make the same call.
        """
        started = self._started_as_expected(args, kwargs, updates) or self._started(args, kwargs, updates, "unequal")
        started[1].ran.add(updates)
        return started

    def _started_as_expected(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], updates: bool
    ) -> tuple[Call, Captured, CallInputs] | None:
        """None where it comes out that ranks make different calls: what ran is dropped, and so is its memory."""
        step = self.step
        try:
            started = self._started(args, kwargs, updates, "later")
            self._world.hear()
        except UnequalError:
            self.step = step
            return None
        except BaseException as error:
            self._world.give_up()
            if isinstance(error, InputError):  # on all ranks: those that are at something else count no step
                self.step = step
            raise
        return started

    def _started(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], updates: bool, agreement: Agreement
    ) -> tuple[Call, Captured, CallInputs]:
        inputs, captured = self.captured(args, kwargs, runs=True, agreement=agreement)
        self.learn_lengths(inputs, captured)
        self._before_run(inputs, captured)
        if not updates and self._scaler is None and captured.trainable and not captured.is_told_of_scale:
            captured.is_told_of_scale = tell_of_scale(captured.compiled)
        self.step += captured.draws
        assert self.seed is not None
        key = random_key(self.seed, self.step)
        world, device = self._world, self._world.device(self)
        program, scale = (None, self._scaler.get_scale() if self._scaler is not None else 1.0)
        if updates:
            program = updating_schedule(captured.compiled)
            scale = self._trainer.scale * max(each.versions.num_updates for each in program.places)  # a mean over its own microbatches
        tensors, places = self.tensors().named, captured.places
        call = Call(captured.compiled, captured.fragments, world, tensors, inputs.leaves, key, device, places, program, scale)
        if updates not in captured.ran and math.isfinite(captured.compiled.budget.capacity_bytes):
            sizes = rank_sizes(captured.compiled, self._backend, self._model, on_processes=not world.is_virtual)
            held = partial(self._held, captured.compiled.stored)
            guard(call, sizes, held, device.type, lambda: self._state(call, updates))
        elif self._world.is_expecting:
            call.begin()
        return call, captured, inputs

    def _state(self, call: Call, updates: bool) -> State:
        """Where the optimizer's state is when `call` begins to run."""
        if self._world.is_virtual:
            return "to come"
        return "held" if self._trainer.has_state else "made" if updates and self._trainer.steps_within(call) else "to come"

    def _held(self, stored: Container[str] = ()) -> list[torch.Tensor]:
        """What is on the device between calls: parameters that are not `stored` elsewhere, buffers, gradients, and the state of the
        optimizer of `train_step`."""
        named = self.tensors().named
        here = [each for name, each in named.items() if name not in stored]
        return [*here, *(each.grad for each in named.values() if each.grad is not None), *self._trainer.state_tensors()]

    def _before_run(self, inputs: CallInputs, captured: Captured) -> None:
        if self.seed is None:
            self.seed = int(self._world.gather(torch.initial_seed())[0])
        if not captured.are_replicas_checked and not self._world.is_virtual:
            if self._given is not None:
                check_global(self._given, self._world.gather)
            check_replicas(inputs, captured.batch_dims, self.mesh, self._world.gather)
        captured.are_replicas_checked, self._given = True, None

    # ---- conversions and copies

    def _takes_conversion(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        """Once parameters are placed on processes, a conversion that changes nothing is passed over and another one refused."""
        if self._world.is_virtual or not self._captures:
            return True
        check_conversion(self._model, convert, self._world.device(self._model))
        return False

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """A module with parameters of its own, and the programs that are there. Raises `MeshError` where there cannot be one."""
        if self._for_copy is None:
            raise MeshError("this parallel module was not made by autopar.compile; copy the model and compile the copy")
        if not self._world.is_virtual:
            check_copy(self)
        copied: ParallelModule = self._for_copy(copy.deepcopy(self._model, memo), self._world)
        memo[id(self)] = copied
        share_captures(self, copied, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise AutoparError(
            "a parallel module cannot be saved or pickled as a whole: it holds compiled programs. Save parallel.state_dict(), or "
            "parallel.full_state_dict() for another mesh, and load it into a model that is compiled again; copy.deepcopy works"
        )
