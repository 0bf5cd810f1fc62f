"""How the user gives an optimizer, and what is known of it before there are parameters to make it of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from autopar.driver.train_step import Scope, TrainStep
from autopar.errors import AutoparError
from autopar.ir.offload import Offload

Make = Callable[[Sequence[nn.Parameter]], Optimizer]

_OPTIM = torch.optim
_SCOPES: dict[type[Optimizer], Scope] = {
    **dict.fromkeys((_OPTIM.Adadelta, _OPTIM.Adagrad, _OPTIM.Adam, _OPTIM.Adamax, _OPTIM.AdamW, _OPTIM.ASGD), "element"),
    **dict.fromkeys((_OPTIM.NAdam, _OPTIM.RAdam, _OPTIM.RMSprop, _OPTIM.Rprop, _OPTIM.SGD), "element"),
    **{getattr(_OPTIM, name): "parameter" for name in ("Adafactor", "Muon") if hasattr(_OPTIM, name)},
    _OPTIM.LBFGS: "model",
}


def scope_of(optimizer: Optimizer) -> Scope:
    """What an update depends on: of a class that nobody knows, a subclass of torch's among them, on all there is."""
    return _SCOPES.get(type(optimizer), "model")


def takes_closure(optimizer: Optimizer) -> bool:
    """Whether a step computes the loss several times."""
    return isinstance(optimizer, torch.optim.LBFGS)


@dataclass(frozen=True)
class OptimizerRecipe:
    """What makes the optimizer: `instance`, made by the user from the model's parameters, or `make`, from those that are placed.

    `sample` is one of the same kind over a parameter of its own, to be asked; None where a function makes none of that.
    """

    instance: Optimizer | None = None
    make: Make | None = None
    sample: Optimizer | None = None

    @staticmethod
    def of(optimizer: Any) -> OptimizerRecipe | None:
        """From an instance, a class, (class, options), or `parameters -> Optimizer`, a `functools.partial` among these; none from a
        name, which says only what state a budget counts. Raises `AutoparError` for what is none of these."""
        if optimizer is None or isinstance(optimizer, str):
            return None
        if isinstance(optimizer, Optimizer):
            return OptimizerRecipe(_supported(optimizer), sample=optimizer)
        make = _maker(optimizer)
        return OptimizerRecipe(make=make, sample=_sample(make))

    @property
    def scope(self) -> Scope:
        return "model" if self.sample is None else scope_of(self.sample)

    @property
    def takes_closure(self) -> bool:
        return self.sample is not None and takes_closure(self.sample)


def updates_of(recipe: OptimizerRecipe | None, options: TrainStep) -> Literal["bucket", "end"] | None:
    """When a step with this optimizer updates parameters: None where it does not, or calls the model as often as it likes."""
    depends = recipe is not None and (recipe.takes_closure or (options.update_scope or recipe.scope) == "model")
    if options.weight_versions is not None and depends:
        raise AutoparError(
            f"weight_versions={options.weight_versions!r} updates each stage by itself, and this optimizer's update of a parameter depends "
            'on others: use one of torch.optim but LBFGS, or say TrainStep(update_scope="parameter") where that is so'
        )
    if recipe is None or recipe.takes_closure:
        return None
    return "end" if options.agrees_first or (options.update_scope or recipe.scope) == "model" else "bucket"


def gathered_by(recipe: OptimizerRecipe | None, options: TrainStep) -> Literal["none", "irregular", "split"]:
    """Which split parameters `runtime.train.placed.WholeParameters` will gather for an update."""
    if recipe is None or recipe.takes_closure or (options.update_scope or recipe.scope) == "element":
        return "none"
    return "split" if isinstance(recipe.sample, torch.optim.Adafactor) else "irregular"


def refuse_no_host_update(offload: Offload | None, recipe: OptimizerRecipe | None, options: TrainStep) -> None:
    """Raise `AutoparError` where the host is to update, and cannot."""
    if offload is None or offload.state is None:
        return
    if recipe is None and offload.optimizer is not None:
        raise AutoparError("Offload(optimizer=) is about the optimizer of train_step, and there is none: pass optimizer= as well")
    if options.weight_versions is not None:
        raise AutoparError(
            f"weight_versions={options.weight_versions!r} computes with each update at once, and one on the host comes at the end of the "
            f"step: leave Offload({offload.updated}=) out, or weight_versions"
        )


def _maker(optimizer: Any) -> Make:
    if isinstance(optimizer, tuple) and len(optimizer) == 2 and isinstance(optimizer[0], type) and isinstance(optimizer[1], dict):
        kind, options = optimizer
        return lambda parameters: _made(kind(parameters, **options), optimizer)
    if callable(optimizer):
        return lambda parameters: _made(optimizer(parameters), optimizer)
    raise AutoparError(
        f"optimizer={optimizer!r} is none: pass a torch.optim.Optimizer, its class, (class, options), functools.partial(class, lr=…), "
        "or a function of the parameters that returns one"
    )


def _made(made: Any, optimizer: Any) -> Optimizer:
    if not isinstance(made, Optimizer):
        raise AutoparError(f"optimizer={optimizer!r} made a {type(made).__name__}; it must return a torch.optim.Optimizer")
    return _supported(made)


def _supported(optimizer: Optimizer) -> Optimizer:
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise AutoparError("SparseAdam takes sparse gradients alone, and those of a parallel module are dense: use torch.optim.Adam")
    return optimizer


def _sample(make: Make) -> Optimizer | None:
    """None where `make` wants more than a list of one matrix."""
    parameter = nn.Parameter(torch.zeros(8, 4))
    try:
        made = make([parameter])
    except AutoparError:
        raise
    except Exception:  # whatever a user's function does with names or shapes; it is called again with the real parameters
        return None
    return made if any(each is parameter for group in made.param_groups for each in group["params"]) else None
