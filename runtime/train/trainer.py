"""The whole step of training: what happens around the updates that a schedule writes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from autopar.driver.compiled import Compiled
from autopar.driver.optimizers import OptimizerRecipe, scope_of
from autopar.driver.train_step import Scope, TrainStep
from autopar.errors import AutoparError, NonFiniteError
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.runtime._torch import has_gradient_hooks, has_step_hooks
from autopar.runtime.execute.call import Call
from autopar.runtime.execute.world import DistributedWorld, World, local_of
from autopar.runtime.module.state import clip_grad_norm
from autopar.runtime.train.partial_step import PartialStep
from autopar.runtime.train.placed import WholeParameters, check_places, placed_instance
from autopar.runtime.train.scaler import ScaleState, non_finite, unscale
from autopar.runtime.train.state import check_optimizer_state, load_optimizer_state, optimizer_state, placed_like, whole_entries
from autopar.runtime.train.updates import Updates

logger = logging.getLogger("autopar")

Parameters = Mapping[str, nn.Parameter]
# Runs a call again, node by node, and says where a value that is not finite first appears in it; "" where none does. Collective.
Trace = Callable[[], str]
# What a call gives: its output, its tensors by flat index, and what is to be differentiated of them.
Evaluated = tuple[Any, Mapping[str, torch.Tensor], Sequence[str]]
LOSS = "the loss"


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

    def __init__(self, recipe: OptimizerRecipe | None, options: TrainStep) -> None:
        self.recipe, self.options = recipe, options
        self.scaling = ScaleState.of(options.loss_scale) if options.loss_scale is not None else None
        self.averages: dict[str, torch.Tensor] = {}
        self.is_stepping = False
        self._part: PartialStep | None = None
        self._num_calls = 0
        self._first: list[tuple[str, nn.Parameter]] = []
        # Of the calls since the last step: their losses, and how to find out where one of them went wrong.
        self._losses: list[torch.Tensor] = []
        self._traces: list[Trace] = []
        self._is_place_told = False

    def bind(self, model: nn.Module) -> None:
        """Note whose parameters these are, before they are replaced. Raises `AutoparError` for an optimizer of others."""
        self._first = list(model.named_parameters())
        if self.recipe is None or self.recipe.instance is None:
            return
        mine = {id(each) for _, each in self._first}
        for number, group in enumerate(self.recipe.instance.param_groups):
            strange = next((each for each in group["params"] if id(each) not in mine), None)
            if strange is not None:
                raise AutoparError(
                    f"group {number} of the optimizer has a parameter of shape {list(strange.shape)} that is none of the model's: make the "
                    "optimizer from model.parameters(), or pass its class or a function of the parameters"
                )

    def optimizer(self, module: Trained) -> Optimizer | None:
        """Made at the first question; None where nobody gave one. Raises where parameters have no places yet, and `AutoparError` for
        an optimizer that would be wrong for how they lie."""
        if self.recipe is None:
            return None
        if self._part is None:
            self._part = self._made(self.recipe, dict(module.named_parameters()), module._world)
        return self._part.optimizer

    def _made(self, recipe: OptimizerRecipe, parameters: Parameters, world: World) -> PartialStep:
        if recipe.instance is None:
            assert recipe.make is not None
            optimizer = recipe.make(list(parameters.values()))
        else:
            optimizer = placed_instance(recipe.instance, dict(self._first), parameters, world)
        scope = self._scope(optimizer)
        if not isinstance(world, DistributedWorld):
            return PartialStep(optimizer)
        check_places(optimizer, scope, world)
        wholes = None if scope == "element" else WholeParameters(optimizer, parameters, world)
        return PartialStep(optimizer, on_parts=scope == "element", wholes=wholes)

    def _scope(self, optimizer: Optimizer) -> Scope:
        return self.options.update_scope or scope_of(optimizer)

    def check(self, module: Trained) -> None:
        """Raise `AutoparError` where a step cannot be what the user's loop would be."""
        if self.recipe is None:
            raise AutoparError(
                "train_step without an optimizer: pass optimizer= to autopar.compile, an optimizer, its class, (class, options), or a "
                'function of the parameters; a name such as "adamw" says only what a memory budget counts'
            )
        hooked = [name for name, each in module._model.named_parameters() if has_gradient_hooks(each)]
        if hooked or has_gradient_hooks(module._model):
            what = f"the gradient of {hooked[0]!r}" if hooked else "the backward of the model"
            raise AutoparError(
                f"there is a hook on {what}, which train_step would not call: gradients are used, and freed, inside the step. Remove it, "
                "or train by the plain loop: loss.backward(), optimizer.step()"
            )

    @property
    def _is_last(self) -> bool:
        """Whether the optimizer steps in this call."""
        return (self._num_calls + 1) % self.options.accumulate == 0

    @property
    def scale(self) -> float:
        """The gradient of the loss that a step starts from."""
        return (1.0 if self.scaling is None else self.scaling.scale) / self.options.accumulate

    @torch.no_grad()
    def run(self, call: Call, module: Trained, trace: Trace) -> dict[str, torch.Tensor]:
        """The results of `call`, whose schedule has updates, by flat index; parameters are updated. `trace` is asked where a value is
        not finite that must be."""
        assert self._part is not None
        optimizer, options = self._part.optimizer, self.options
        parameters: Parameters = module.tensors().parameters
        if self.scaling is not None and self._num_calls % options.accumulate == 0:
            _require_no_gradients(parameters)
        keeps = options.agrees_first or self._scope(optimizer) == "model" or has_step_hooks(optimizer) or call.hears_late
        apply = self._apply_to(parameters) if self._is_last else _accumulated
        updates = Updates(call, parameters, None if keeps else apply)
        results = call.whole_step(updates.take)
        updates.commit()
        if options.non_finite is not None:
            self._losses += [results[item.name].detach() for item in call.signature.inputs_of("tangent")]
            self._traces.append(trace)
        is_last, self._num_calls = self._is_last, self._num_calls + 1
        if is_last and keeps:
            self._agree_and_apply(parameters, module._world)
        elif is_last:
            if left := [name for name, each in parameters.items() if each.grad is not None]:
                self._apply_to(parameters)(left)  # what earlier calls used, and this one did not
            self._average(parameters)
        return results

    def step_by_closure(self, evaluate: Callable[[], Evaluated], module: Trained) -> Any:
        """A step of an optimizer that asks for the loss several times; what the first call returned."""
        optimizer, asked = self.optimizer(module), self.options
        assert optimizer is not None
        if asked.accumulate != 1 or asked.agrees_first:
            raise AutoparError(
                f"{type(optimizer).__name__} asks for the loss several times in a step, and {asked} cannot be kept then: leave out "
                "accumulate, clip_grad_norm, loss_scale (which float16 needs) and non_finite, or train by the plain loop with a closure of "
                "your own"
            )
        outputs: list[Any] = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            output, tensors, differentiated = evaluate()
            outputs.append(output)
            loss = tensors[the_loss(tuple((name, tensors[name].shape) for name in differentiated))]
            loss.backward()
            for tensor in tensors.values():
                tensor.detach_()
            return loss

        optimizer.step(closure)  # pyright: ignore[reportCallIssue, reportArgumentType]  (torch's own give and take tensors)
        optimizer.zero_grad()
        self._average(dict(module.named_parameters()))
        return outputs[0]

    @property
    def takes_closure(self) -> bool:
        return self.recipe is not None and self.recipe.takes_closure

    def state(self, module: Trained) -> dict[str, Any]:
        """What a run goes on from, besides the model's state: whole values by name, on every rank. Collective.

        Raises `AutoparError` between the calls of an accumulation, whose gradients are in no state.
        """
        if self._num_calls % self.options.accumulate:
            raise AutoparError(
                f"{self._num_calls % self.options.accumulate} of the {self.options.accumulate} calls that make an update are done, and "
                "their gradients are in no state: save after the call that updates"
            )
        optimizer, names, world = self.optimizer(module), _names(module._model), module._world
        averages = whole_entries({(name, "ema"): value for name, value in self.averages.items()}, world)
        return {
            "num_calls": self._num_calls,
            "loss_scale": None if self.scaling is None else {"scale": self.scaling.scale, "num_finite": self.scaling.num_finite},
            "ema": {name: averages[name, "ema"] for name in dict.fromkeys(names.values()) if (name, "ema") in averages},
            "optimizer": None if optimizer is None else optimizer_state(optimizer, names, world),
        }

    def load_state(self, state: Mapping[str, Any], module: Trained) -> None:
        """Go on from a `state`, of whatever mesh. Collective. Raises `AutoparError`, and changes nothing, where it is one of other options
        or parameters."""
        optimizer, parameters, world = self.optimizer(module), dict(module.named_parameters()), module._world
        self._check_state(state, optimizer)
        if optimizer is not None:
            check_optimizer_state(state["optimizer"], optimizer, _names(module._model), world)
            assert self._part is not None
            load_optimizer_state(state["optimizer"], optimizer, parameters, self._part.wholes, world)
        self._num_calls = state["num_calls"]
        if self.scaling is not None:
            self.scaling.scale, self.scaling.num_finite = state["loss_scale"]["scale"], state["loss_scale"]["num_finite"]
        held = {name: value for name, value in state["ema"].items() if name in parameters}
        self.averages = {name: placed_like(value, parameters[name], name, world) for name, value in held.items()}

    def _check_state(self, state: Mapping[str, Any], optimizer: Optimizer | None) -> None:
        problems: list[str] = []
        for what, theirs, ours in (
            ("an optimizer", state["optimizer"] is not None, optimizer is not None),
            ("a loss scale", state["loss_scale"] is not None, self.scaling is not None),
        ):
            if theirs != ours:
                problems.append(f"{what} is in the saved state {'alone' if theirs else 'not, and here one is used'}")
        if state["ema"] and self.options.ema is None:
            problems.append("averages (ema=) are in the saved state alone")
        if state["num_calls"] % self.options.accumulate:
            problems.append(f"{state['num_calls']} calls were made, and accumulate={self.options.accumulate} does not divide them")
        if problems:
            raise AutoparError(
                "the saved state of training does not fit: " + "; ".join(problems) + ". Compile with the options of that run"
            )

    def _apply_to(self, parameters: Parameters) -> Callable[[Sequence[str]], None]:
        def apply(names: Sequence[str]) -> None:
            assert self._part is not None
            chosen = [parameters[name] for name in names]
            self._part.step(chosen)
            for each in chosen:
                each.grad = None

        return apply

    def _agree_and_apply(self, parameters: Parameters, world: World) -> None:
        options = self.options
        gradients = {name: each.grad for name, each in parameters.items() if each.grad is not None}
        if self.scaling is not None:
            unscale(gradients, self.scaling.scale)
        if (options.non_finite is not None or self.scaling is not None) and (bad := self._not_finite(gradients, world)):
            for each in parameters.values():
                each.grad = None
            self._skip(bad)
            return
        if options.clip_grad_norm is not None:
            clip_grad_norm(parameters, world, options.clip_grad_norm, 2.0, False)
        self._traces = []
        self._apply_to(parameters)(list(gradients))
        self._average(parameters)

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
            raise NonFiniteError(f'{_told(bad, place)}\n  how to go on: TrainStep(non_finite="skip") leaves such steps out')
        self._is_place_told = True
        logger.warning("a step is skipped: %s", _told(bad, place))

    def _average(self, parameters: Parameters) -> None:
        """Take in what parameters are now, all that this process holds, after a step."""
        decay = self.options.ema
        if decay is None:
            return
        with torch.no_grad():
            for name, parameter in parameters.items():
                now = parameter.detach()
                if name not in self.averages:
                    self.averages[name] = now.clone()
                elif now.is_floating_point() or now.is_complex():
                    local_of(self.averages[name]).lerp_(local_of(now), 1 - decay)
                else:
                    local_of(self.averages[name]).copy_(local_of(now))


def _names(model: nn.Module) -> dict[int, str]:
    return {id(each): name for name, each in model.named_parameters()}


def _require_no_gradients(parameters: Parameters) -> None:
    left = [name for name, each in parameters.items() if each.grad is not None]
    if left:
        raise AutoparError(
            f"{left[0]!r}, one of {len(left)}, has a gradient already, which is not multiplied by the loss scale as those of this step "
            "are: call parallel.zero_grad() before"
        )


def _accumulated(names: Sequence[str]) -> None:
    """They lie in `parameter.grad`, for later calls to add theirs."""


def updating_schedule(compiled: Compiled) -> ScheduleProgram:
    """What a step runs. Raises `AutoparError` for a call that no step can be made of."""
    the_loss(tuple((item.name, item.shape) for item in compiled.local.signature.inputs_of("tangent")))
    if compiled.updating is None:
        raise AutoparError("train_step has nothing to update: no parameter that requires a gradient is used by this call")
    return compiled.updating


def the_loss(differentiated: Sequence[tuple[str, Sequence[int]]]) -> str:
    """The flat index of the loss among the outputs that are differentiated, of which there are names and shapes. Raises `AutoparError`."""
    if len(differentiated) == 1 and not differentiated[0][1]:
        return differentiated[0][0]
    if len(differentiated) > 1:
        raise AutoparError(
            f"train_step needs a loss, one number, to start from, and gradients come back through {len(differentiated)} outputs of this "
            'call: leave out outputs="all", where the model returns a loss among others, or let it return the loss alone'
        )
    raise AutoparError(
        "train_step needs a loss, one number of the model's output: return it (alone, as `.loss`, or as the one scalar of a tuple), "
        "or train by the plain loop with a loss of your own"
    )


def _told(bad: Sequence[str], place: str) -> str:
    gradients = [name for name in bad if name != LOSS]
    more = f" and {len(gradients) - 3} more" if len(gradients) > 3 else ""
    what = ["the loss is infinite or NaN"] if LOSS in bad else []
    what += [f"gradients are infinite or NaN: {', '.join(map(repr, gradients[:3]))}{more}"] if gradients else []
    return f"{' and '.join(what)}; no parameter was updated on any rank{place and f'. {place}'}"
