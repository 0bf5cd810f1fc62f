"""What `train_step` refuses, and how it says what went wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from autopar.driver.compiled import Compiled
from autopar.driver.optimizers import OptimizerRecipe
from autopar.driver.train_step import TrainStep
from autopar.errors import AutoparError
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.runtime._torch import has_gradient_hooks
from autopar.runtime.execute.world import local_of

LOSS = "the loss"
REPLACED = (
    "another one was put in its place since the first step, by load_state_dict(assign=True) or by hand. Load without assign, which writes "
    "into the parameters that are there; or build the model anew, load parallel.full_state_dict() into it, change it, and compile that"
)
Named = Sequence[tuple[str, nn.Parameter]]


def require_optimizer(recipe: OptimizerRecipe | None) -> None:
    if recipe is None:
        raise AutoparError(
            "train_step without an optimizer: pass optimizer= to autopar.compile, an optimizer, its class, (class, options), or a "
            'function of the parameters; a name such as "adamw" says only what a memory budget counts. '
            "A deep copy of a parallel module has none: compile the copied model"
        )


def require_no_hooks(model: nn.Module, parameters: Named) -> None:
    """Raise for a hook that waits for gradients, which a step uses and frees."""
    hooked = [name for name, each in parameters if has_gradient_hooks(each)]
    if hooked or has_gradient_hooks(model):
        what = f"the gradient of {hooked[0]!r}" if hooked else "the backward of the model"
        raise AutoparError(
            f"there is a hook on {what}, which train_step would not call: gradients are used, and freed, inside the step. Remove it, "
            "or train by the plain loop: loss.backward(), optimizer.step()"
        )


def require_own(optimizer: Optimizer, parameters: Named, how: str) -> None:
    """Raise for an optimizer that would step what is no parameter of the model; `how` says what serves."""
    mine = {id(each) for _, each in parameters}
    for number, group in enumerate(optimizer.param_groups):
        strange = next((each for each in group["params"] if id(each) not in mine), None)
        if strange is not None:
            raise AutoparError(
                f"group {number} of the optimizer has a parameter of shape {list(strange.shape)} that is none of the model's: {how}"
            )


def require_no_gradients(parameters: Named) -> None:
    """Raise for gradients of a backward outside, which a step would add to its own without a word; zeros are none, and what is frozen gets
    no others."""
    asked = ((name, each.grad) for name, each in parameters if each.requires_grad and each.grad is not None)
    left = [name for name, gradient in asked if gradient.is_sparse or bool(local_of(gradient).any())]
    if left:
        raise AutoparError(
            f"{left[0]!r}, one of {len(left)}, has a gradient already, of a backward outside train_step, which would be added to that of "
            "this step: call parallel.zero_grad() before, or train by the plain loop to add gradients of your own"
        )


def require_no_versions(options: TrainStep) -> None:
    """Raise where weights have versions, and a step takes all gradients at once."""
    if options.weight_versions is not None:
        raise AutoparError(
            f"weight_versions={options.weight_versions!r} updates each stage by itself, and hooks of the optimizer's step, or an "
            "update that depends on other parameters, take all gradients at once: leave one of them out"
        )


def updating_schedule(compiled: Compiled) -> ScheduleProgram:
    """What a step runs. Raises `AutoparError` for a call that no step can be made of."""
    the_loss(tuple((item.name, item.shape) for item in compiled.signature.inputs_of("tangent")))
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


def non_finite_text(bad: Sequence[str], place: str) -> str:
    gradients = [name for name in bad if name != LOSS]
    more = f" and {len(gradients) - 3} more" if len(gradients) > 3 else ""
    what = ["the loss is infinite or NaN"] if LOSS in bad else []
    what += [f"gradients are infinite or NaN: {', '.join(map(repr, gradients[:3]))}{more}"] if gradients else []
    return f"{' and '.join(what)}; no parameter was updated on any rank{place and f'. {place}'}"


def refuse_incomplete(state: Mapping[str, Any]) -> None:
    """Raise `AutoparError` for what `train_state_dict` did not give."""
    for name in ("seed", "step", "optimizer", "ema", "loss_scale", "num_calls"):
        if name not in state:
            raise AutoparError(f"the saved state of training lacks {name!r}: pass what train_state_dict() gave, whole")
