"""Names of the model reach the model: what a parallel module has no name for itself is read, written and deleted there."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.runtime._torch import AsksToConvert, registered_names

logger = logging.getLogger("autopar")

# What torch's wrappers of models have, and loops that were written for them ask for.
_OF_WRAPPERS = {
    "module": "a parallel module has the names of its model itself: parallel.head, parallel.state_dict()",
    "no_sync": "leave it out: gradients of several backwards add up, as they do without it; those of the microbatches of one call "
    "(num_microbatches=n) are reduced once",
}


class NamesOfModel(AsksToConvert):
    """A module with the names of another, the attribute `_model`, beside its own.

    Its own come first: those of the class, of `nn.Module` and what it was given before `_model`. Methods of the model are bound
    to the model, and what they call is the model: they run as written, in this process, not on the mesh. Where parameters lie on processes
    torch may not be able to, and `AutoparError` says what can.
    """

    def __getattr__(self, name: str) -> Any:
        own = getattr(type(self), name, None)
        if isinstance(own, property):  # reading it raised an AttributeError, which is what there is to say: no name of the model's
            return own.__get__(self, type(self))
        if "_model" in self.__dict__ and not (name.startswith("__") and name.endswith("__")):
            model = self.__dict__["_model"]
            if name in _OF_WRAPPERS and not hasattr(model, name):
                raise AttributeError(f"{type(self).__name__} has no {name!r}, and neither has its model; {_OF_WRAPPERS[name]}")
            value = getattr(model, name)
            return _explained(value, model) if isinstance(value, MethodType) and value.__self__ is model else value
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_own(name) and not self._is_of_both(name, value):
            object.__setattr__(self, name, value)  # torch's would look among the model's parameters and buffers, which may have it, too
        else:
            setattr(self.__dict__["_model"], name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_own(name):
            object.__delattr__(self, name)
        else:
            delattr(self.__dict__["_model"], name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.__dict__.get("_model", self.__class__))})

    def get_submodule(self, target: str) -> nn.Module:
        return self.__dict__["_model"].get_submodule(target) if target else self

    def get_parameter(self, target: str) -> nn.Parameter:
        return self.__dict__["_model"].get_parameter(target)

    def get_buffer(self, target: str) -> torch.Tensor:
        return self.__dict__["_model"].get_buffer(target)

    def _is_of_both(self, name: str, value: object) -> bool:
        """Whether the model has a parameter, buffer or layer of such a name and is given one, as by `load_state_dict(assign=True)`."""
        is_of_model = isinstance(value, (torch.Tensor, nn.Module)) and "_model" in self.__dict__
        return is_of_model and name in registered_names(self.__dict__["_model"])

    def _is_own(self, name: str) -> bool:
        return "_model" not in self.__dict__ or name in self.__dict__ or hasattr(type(self), name)

    @property
    def training(self) -> bool:
        """The model's, which may be changed through either."""
        return self.__dict__["_model"].training

    @training.setter
    def training(self, mode: bool) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]  (a plain attribute of nn.Module)
        if "_model" in self.__dict__:
            self.__dict__["_model"].training = mode

    @property
    def _is_full_backward_hook(self) -> bool | None:
        """Of the backward hooks, which are one dict with the model's."""
        return self.__dict__["_model"]._is_full_backward_hook

    @_is_full_backward_hook.setter
    def _is_full_backward_hook(self, is_full: bool | None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if "_model" in self.__dict__:
            self.__dict__["_model"]._is_full_backward_hook = is_full


def _explained(method: MethodType, model: nn.Module) -> Callable[..., Any]:
    """A method of the model that says why it cannot compute with what lies on processes, and what can.

    Torch has no class of error for plain tensors among DTensors, or beside the parameters of another stage, which are on meta: its texts
    name either, or say that there is no storage (`save_pretrained`).
    """
    lying = ((name, each) for name, each in model.named_parameters() if isinstance(each, DTensor) or each.is_meta)
    placed, parameter = next(lying, ("", None))
    if parameter is None:
        return method
    how = "a DTensor" if isinstance(parameter, DTensor) else "on meta"

    @functools.wraps(method)
    def explained(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except RuntimeError as error:
            if not any(each in str(error) for each in ("DTensor", "meta", "python storage")):
                raise
            weights = "parallel.full_state_dict(), which all ranks call"
            others = f"load weights = {weights}, into a model built anew, and call {method.__name__} of that"
            mend = f"pass it state_dict={weights}" if method.__name__ == "save_pretrained" else others
            raise AutoparError(
                f"{method.__name__} calls the model itself, whose parameters lie on ranks ({placed!r} is {how}); calls of the parallel "
                f"module alone run on the mesh. How to mend it: {mend}"
            ) from error

    return explained


def log_names_of_both(own: nn.Module, model: nn.Module) -> None:
    """What both have stays the model's in the model, and is reached there alone: that is logged."""
    ours = {name for name in (*vars(own), *dir(type(own))) if not name.startswith("_")} - set(dir(nn.Module()))
    theirs = ours & {*vars(model), *registered_names(model), *dir(type(model))}
    if theirs:
        logger.warning(
            "the model has names that the parallel module has, too: %s; parallel.%s is autopar's, use the model itself for its own",
            ", ".join(sorted(theirs)),
            min(theirs),
        )
