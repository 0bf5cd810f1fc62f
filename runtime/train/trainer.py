"""The whole step of training: what happens around the updates that a schedule writes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from autopar.driver.optimizers import OptimizerRecipe, scope_of
from autopar.driver.train_step import LossScale, Scope, TrainStep
from autopar.errors import AutoparError, NonFiniteError
from autopar.ir.offload import Offload
from autopar.runtime._torch import has_step_hooks
from autopar.runtime.execute.agreement import agreed
from autopar.runtime.execute.call import Call
from autopar.runtime.execute.distributed_world import DistributedWorld
from autopar.runtime.execute.world import World
from autopar.runtime.offload.copier import copier_of
from autopar.runtime.offload.state_files import StateFiles
from autopar.runtime.train.closure_step import Evaluated, step_by_closure
from autopar.runtime.train.held_gradients import drop, finish, parts_of
from autopar.runtime.train.host_step import HostStep
from autopar.runtime.train.partial_step import PartialStep, made_of
from autopar.runtime.train.placed import WholeParameters, check_places, placed_instance
from autopar.runtime.train.refusals import (
    LOSS,
    REPLACED,
    non_finite_text,
    require_no_gradients,
    require_no_hooks,
    require_no_versions,
    require_optimizer,
    require_own,
)
from autopar.runtime.train.scaler import ScaleState, gradient_factor, non_finite
from autopar.runtime.train.state import (
    average,
    check_optimizer_state,
    check_options,
    load_optimizer_state,
    optimizer_state,
    placed_like,
    whole_entries,
)
from autopar.runtime.train.updates import Updates, accumulated

logger = logging.getLogger("autopar")

Parameters = Mapping[str, nn.Parameter]
# Runs a call again, node by node, and says where a value that is not finite first appears in it; "" where none does. Collective.
Trace = Callable[[], str]


class Trained(Protocol):
    """What a trainer needs of a parallel module."""

    _world: World
    _model: nn.Module

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def tensors(self) -> Any:
        """`parameters` by name, as this call has seen them: to walk the modules takes milliseconds."""
        ...


class Trainer:
    """The optimizer of one parallel module, made when its parameters have their places, and what `TrainStep` asks for.

    A call that updates runs `updating` of its program. Gradients lie in `parameter.grad` between the calls that accumulate them, and
    nowhere once they are used.
    """

    def __init__(self, recipe: OptimizerRecipe | None, options: TrainStep, offload: Offload | None = None) -> None:
        self.recipe, self.options, self._offload = recipe, options, offload
        self.scaling = ScaleState.of(options.loss_scale) if options.loss_scale is not None else None
        self.averages: dict[str, torch.Tensor] = {}
        # The thread of which the next call of the module makes a step, and whether a step is agreed on.
        self.asked_by: int | None = None
        self.is_stepping = False
        self._part: PartialStep | HostStep | None = None
        self._num_calls = 0
        self._first: list[tuple[str, nn.Parameter]] = []
        # Of the calls since the last step: their losses, and how to find out where one of them went wrong.
        self._losses: list[torch.Tensor] = []
        self._traces: list[Trace] = []
        self._updated: set[str] = set()  # by the step that is made, or failed
        self._is_place_told = False
        self._is_prepared = False

    def scale_by_default(self) -> None:
        """Scale the loss from now on, where nobody said how: a call was captured that needs it. Raises `AutoparError` between calls that
        accumulate, of which the first were not scaled."""
        if self.options.loss_scale is None:
            if self._num_calls % self.options.accumulate:
                raise AutoparError(
                    "this call computes in float16, for which the loss is scaled, and earlier ones of this accumulation did not: say "
                    "TrainStep(loss_scale=autopar.LossScale()) from the start, or change the autocast after the call that updates"
                )
            self.options = replace(self.options, loss_scale=LossScale())
            self.scaling = ScaleState.of(LossScale())

    def bind(self, model: nn.Module) -> None:
        """Note whose parameters these are, before they are replaced. Raises `AutoparError` for an optimizer of others."""
        if self.recipe is None or self.recipe.instance is None:
            return  # nobody asks for them, and nothing else holds them once they are replaced
        self._first = list(model.named_parameters())
        require_own(self.recipe.instance, self._first, "make it from model.parameters(), or pass its class or a function of the parameters")

    def optimizer(self, module: Trained) -> Optimizer | None:
        """Made at the first question; None where nobody gave one. Raises where parameters have no places yet, and `AutoparError` for
        an optimizer that would be wrong for how they lie."""
        if self.recipe is None:
            return None
        if self._part is None:
            self._part = self._made(self.recipe, module)
        return self._part.optimizer

    def prepare(self, module: Trained) -> None:
        """Make the optimizer. Collective at the first step: what one rank raises for its parameters, those of a stage, all do."""
        if not self._is_prepared:
            agreed(module._world, lambda: self.optimizer(module), "the making of the optimizer")
            self._is_prepared = True

    def _made(self, recipe: OptimizerRecipe, module: Trained) -> PartialStep | HostStep:
        parameters, world = dict(module.named_parameters()), module._world
        device = next((each.device for each in parameters.values()), world.device(module._model))
        if recipe.instance is None:
            assert recipe.make is not None
            optimizer = made_of(recipe.make, module._model.parameters(), parameters.values(), device)
        else:
            optimizer = placed_instance(recipe.instance, dict(self._first), parameters, world)
            self._first = []
        scope = self._scope(optimizer)
        if self._offload is not None and self._offload.state is not None:
            files = StateFiles(self._offload.folder) if self._offload.state == "file" and self._offload.folder is not None else None
            return HostStep(optimizer, scope, copier_of(world, device, self._offload.folder).host, files, self._offload)
        if not isinstance(world, DistributedWorld):
            return PartialStep(optimizer, joint=scope == "model")
        check_places(optimizer, scope, world)
        wholes = None if scope == "element" else WholeParameters(optimizer, parameters, world)
        return PartialStep(optimizer, on_parts=scope == "element", wholes=wholes, joint=scope == "model", stored=world.is_stored)

    @property
    def _has_parts(self) -> bool:
        """Whether the optimizer may be called for some parameters at a time."""
        assert self._part is not None
        return self._scope(self._part.optimizer) != "model" and not has_step_hooks(self._part.optimizer)

    def _scope(self, optimizer: Optimizer) -> Scope:
        return self.options.update_scope or scope_of(optimizer)

    def is_asked(self) -> bool:
        """Whether a call is the one that makes the step: the first of its thread, and not what is called while that runs. Asked once."""
        if self.asked_by != get_ident():
            return False
        self.asked_by = None
        return True

    @property
    def has_state(self) -> bool:
        """Whether there is an optimizer that has stepped."""
        return self._part is not None and bool(self._part.optimizer.state)

    def state_tensors(self) -> list[torch.Tensor]:
        """What the optimizer and the averages hold on the device."""
        return [*(self._part.state_tensors() if self._part is not None else ()), *self.averages.values()]

    def check(self, module: Trained) -> None:
        """Raise `AutoparError` where a step cannot be what the user's loop would be: on one rank perhaps, of which others must hear."""
        named = list(module._model.named_parameters())
        require_optimizer(self.recipe)
        require_no_hooks(module._model, named)
        if self._num_calls % self.options.accumulate == 0:
            require_no_gradients(named)
        if self._part is not None:
            require_own(self._part.optimizer, named, REPLACED)
            self._part.check([each for _, each in named])

    @property
    def told(self) -> tuple[object, ...]:
        """What must be equal on all ranks that make a call."""
        return (self.is_stepping, self._num_calls, self.scale)

    @property
    def _is_last(self) -> bool:
        """Whether the optimizer steps in this call."""
        return (self._num_calls + 1) % self.options.accumulate == 0

    def _keeps(self, call: Call) -> bool:
        """Whether gradients are kept for an update of all parameters at once, after the call."""
        return self.options.agrees_first or not self._has_parts or call.hears_late

    def steps_within(self, call: Call) -> bool:
        """Whether the UPDATEs of this call step the optimizer, and make the state that it has not."""
        return self._part is not None and self._is_last and not self._keeps(call)

    @property
    def scale(self) -> float:
        """The gradient of the loss that a step starts from."""
        return (1.0 if self.scaling is None else self.scaling.scale) / self.options.accumulate

    @torch.no_grad()
    def run(self, call: Call, module: Trained, trace: Trace) -> dict[str, torch.Tensor]:
        """The results of `call`, whose schedule has updates, by flat index; parameters are updated. `trace` is asked where a value is
        not finite that must be."""
        assert self._part is not None
        options = self.options
        parameters: Parameters = module.tensors().parameters
        keeps = self._keeps(call)
        if keeps:
            require_no_versions(options)
        self._updated.clear()
        self._part.begin()
        try:
            results = self._stepped(call, parameters, module._world, trace, keeps)
        except BaseException as error:
            self._give_up(parameters, error)
            raise
        return results

    def _stepped(self, call: Call, parameters: Parameters, world: World, trace: Trace, keeps: bool) -> dict[str, torch.Tensor]:
        apply = self._apply_to(parameters) if self._is_last else accumulated
        updates = Updates(call, parameters, None if keeps else apply)
        results = call.whole_step(updates.take, updates.renewal)
        updates.commit()
        if self.options.non_finite is not None:
            self._losses += [results[item.name].detach() for item in call.signature.inputs_of("tangent")]
            self._traces.append(trace)
        is_last, self._num_calls = self._is_last, self._num_calls + 1
        if is_last and keeps:
            self._agree_and_apply(parameters, world)
        elif is_last:
            if left := [name for name, each in parameters.items() if each.grad is not None]:
                self._apply_to(parameters)(left)  # what earlier calls used, and this one did not
            self._conclude(parameters)
        return results

    def _give_up(self, parameters: Parameters, error: BaseException) -> None:
        """Leave nothing of a call that failed, nor of those that it would have made a step with, and say what became of parameters."""
        assert self._part is not None
        try:
            self._part.finish()
        except Exception as other:  # whatever it is, the first error is raised
            error.add_note(f"an update failed, too: {type(other).__name__}: {other}")
        drop(parameters.values())
        self._losses, self._traces = [], []
        self._num_calls -= self._num_calls % self.options.accumulate
        trained = {name for name, each in parameters.items() if each.requires_grad}
        if self._updated and not self._updated.issuperset(trained):
            error.add_note(
                f"{len(self._updated)} of {len(trained)} parameters were updated before that, and the others were not: load a checkpoint"
            )

    def step_by_closure(self, evaluate: Callable[[], Evaluated], module: Trained) -> Any:
        """A step of an optimizer that asks for the loss several times; what the first call returned."""
        optimizer = self.optimizer(module)
        assert optimizer is not None
        output = step_by_closure(optimizer, self.options, evaluate)
        self._average(dict(module.named_parameters()))
        return output

    @property
    def takes_closure(self) -> bool:
        return self.recipe is not None and self.recipe.takes_closure

    @property
    def wholes(self) -> WholeParameters | None:
        """The parameters that the optimizer sees whole."""
        return None if self._part is None else self._part.wholes

    def counts(self) -> dict[str, Any]:
        """The calls so far, and the loss scale. Raises `AutoparError` between the calls of an accumulation."""
        if self._num_calls % self.options.accumulate:
            raise AutoparError(
                f"{self._num_calls % self.options.accumulate} of the {self.options.accumulate} calls that make an update are done, and "
                "their gradients are in no state: save after the call that updates"
            )
        scaling = self.scaling
        return {
            "num_calls": self._num_calls,
            "loss_scale": None if scaling is None else {"scale": scaling.scale, "num_finite": scaling.num_finite},
        }

    def state(self, module: Trained) -> dict[str, Any]:
        """What a run goes on from, besides the model's state: whole values by name, on every rank. Collective.

        Raises `AutoparError` between the calls of an accumulation, whose gradients are in no state.
        """
        self.prepare(module)
        counts, optimizer, names, world = self.counts(), self.optimizer(module), _names(module._model), module._world
        averages = whole_entries({(name, "ema"): value for name, value in self.averages.items()}, world)
        return {
            **counts,
            "ema": {name: averages[name, "ema"] for name in dict.fromkeys(names.values()) if (name, "ema") in averages},
            "optimizer": None if optimizer is None else optimizer_state(optimizer, names, world),
        }

    def load_state(self, state: Mapping[str, Any], module: Trained) -> None:
        """Go on from a `state`, of whatever mesh. Collective. Raises `AutoparError`, and changes nothing, where it is one of other options
        or parameters."""
        self.prepare(module)
        optimizer, parameters, world = self.optimizer(module), dict(module.named_parameters()), module._world
        agreed(world, lambda: check_options(state, self.options, optimizer is not None), "a check of the saved state of training")
        if optimizer is not None:
            check_optimizer_state(state["optimizer"], optimizer, _names(module._model), world)
            assert self._part is not None
            load_optimizer_state(state["optimizer"], optimizer, parameters, self._part.wholes, world, isinstance(self._part, HostStep))
        held = {name: value for name, value in state["ema"].items() if name in parameters}
        self.take(state, {name: placed_like(value, parameters[name], name, world) for name, value in held.items()})

    def take(self, counts: Mapping[str, Any], averages: dict[str, torch.Tensor]) -> None:
        """Go on from these `counts`, which were checked, and averages that lie as the parameters do."""
        self._num_calls, self.averages = counts["num_calls"], averages
        self._losses, self._traces = [], []
        if self._part is not None:  # what an accumulation has so far is of other parameters
            drop(each for group in self._part.optimizer.param_groups for each in group["params"])
        if self.scaling is not None:
            self.scaling.scale, self.scaling.num_finite = counts["loss_scale"]["scale"], counts["loss_scale"]["num_finite"]

    def _apply_to(self, parameters: Parameters, factor: torch.Tensor | None = None) -> Callable[[Sequence[str]], None]:
        """Updates parameters by their gradients, which are multiplied by `factor`, and gone afterwards."""

        def apply(names: Sequence[str]) -> None:
            assert self._part is not None
            chosen = [parameters[name] for name in names]
            finish(chosen, factor)
            self._part.step(chosen)
            self._updated.update(names)
            for each in chosen:
                each.grad = None

        return apply

    def _agree_and_apply(self, parameters: Parameters, world: World) -> None:
        options = self.options
        gradients = {name: each.grad for name, each in parameters.items() if each.grad is not None}
        scale = 1.0 if self.scaling is None else self.scaling.scale  # that of this step: what follows may find the next
        if (options.non_finite is not None or self.scaling is not None) and (bad := self._not_finite(gradients, world)):
            drop(parameters.values())
            self._skip(bad)
            return
        self._traces = []
        factor = gradient_factor(gradients, world, scale, options.clip_grad_norm)
        is_one = not self._has_parts or all(each.dtype == parameters[name].dtype for name, each in gradients.items())
        parts = [list(gradients)] if is_one else parts_of(gradients)
        gradients.clear()  # so that each is freed once it is used
        for names in parts:
            self._apply_to(parameters, factor)(names)
        self._conclude(parameters)

    def _not_finite(self, gradients: Mapping[str, torch.Tensor], world: World) -> list[str]:
        """What forbids the optimizer to step, agreed by all ranks; the next scale is found. Collective."""
        losses, self._losses = self._losses, []
        bad = non_finite(({LOSS: torch.stack(losses)} if losses else {}) | dict(gradients), world)
        if self.scaling is not None:
            self.scaling.update(not bad or bad == [LOSS])
        return bad

    def _skip(self, bad: Sequence[str]) -> None:
        """Tell of a step that is skipped, or raise `NonFiniteError`, as was asked for. Collective."""
        traces, asked = self._traces, self.options.non_finite
        self._traces = []
        # A scale is found by steps that overflow. A loss is scaled behind the forward alone: none mends it.
        if asked is None or (self.scaling is not None and LOSS not in bad):
            return
        place = "" if self._is_place_told else next((found for trace in traces if (found := trace())), "")
        if asked == "raise":
            raise NonFiniteError(f'{non_finite_text(bad, place)}\n  how to go on: TrainStep(non_finite="skip") leaves such steps out')
        self._is_place_told = True
        logger.warning("a step is skipped: %s", non_finite_text(bad, place))

    def _conclude(self, parameters: Parameters) -> None:
        """Wait for updates that are under way, and take in what parameters are now."""
        assert self._part is not None
        self._part.finish()
        self._average(parameters)

    def _average(self, parameters: Parameters) -> None:
        if self.options.ema is not None:
            average(self.averages, parameters, self.options.ema)


def _names(model: nn.Module) -> dict[int, str]:
    return {id(each): name for name, each in model.named_parameters()}
