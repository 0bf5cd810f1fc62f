"""State of a parallel module under the model's names: sharded or whole, with seed and step; and the norm of its gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autopar.runtime.module.captures import CapturingModule
from autopar.runtime.module.state import clip_grad_norm, full_state, loads_whole_values, random_state_of, sharded_state, with_random_state


class ModuleState(CapturingModule):
    """What optimizers, checkpoints and `autopar.runtime.verify` need of a parallel module."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's, by its own `state_dict` and hooks: DTensors on a real mesh. Seed and step travel in the dict's metadata, so that
        a plain model loads it too."""
        state = self._model.state_dict(*args, **kwargs)
        if not self._world.is_virtual:
            for name in [name for name, value in state.items() if isinstance(value, torch.Tensor) and value.is_meta]:
                del state[name]
        return with_random_state(state, self.seed, self.step)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The model's state with every parameter whole, on every rank. Collective: raises `InputError` on all where not all come to it."""
        self._world.meet("full_state_dict()", "which all ranks call, not rank 0 alone")
        state = self._model.state_dict(keep_vars=True)
        return with_random_state(full_state(state, self._world, dict(self._model.named_parameters())), self.seed, self.step)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load full or sharded values, by the model's own `load_state_dict` and hooks."""
        with loads_whole_values(self._model, self._world):
            given = sharded_state(state_dict, self._model, self._world)
            result = self._model.load_state_dict(given, strict, **({"assign": True} if assign else {}))
        self.seed, self.step = random_state_of(state_dict, self.seed, self.step)
        self._placed_anew = {name: each for name, each in self._placed_anew.items() if name not in state_dict}  # those have other values
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the model's. Before the parameters are placed the model's own have what gradients there are."""
        if self._world.is_virtual or self._captures:
            super().zero_grad(set_to_none)
        else:
            self._model.zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Scale all gradients so that their joint norm is at most `max_norm`; returns the norm before, a 0-d tensor. Collective.

        Use it in place of `torch.nn.utils.clip_grad_norm_(parallel.parameters(), ...)`: with pp on processes, torch's own would clip each
        stage by the norm of that stage's gradients alone, and cannot tell that there are others.
        """
        return clip_grad_norm(dict(self.named_parameters()), self._world, max_norm, norm_type, error_if_nonfinite)
