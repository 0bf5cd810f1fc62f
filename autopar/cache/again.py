"""What surrounded a call when it was compiled, so that it can be compiled once more when somebody asks for its forms."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar._torch import pytree
from autopar.driver.compiled import Compiled, Forms
from autopar.errors import AutoparError
from autopar.graph.autocast import Autocast, autocast_off


@dataclass(frozen=True)
class Circumstances:
    """Gradients on or off, the autocast, which modules train."""

    is_grad_enabled: bool
    autocast: Autocast | None
    training: tuple[tuple[nn.Module, bool], ...]

    @staticmethod
    def of(model: nn.Module, device: str) -> Circumstances:
        flags = tuple((module, module.training) for module in model.modules())
        return Circumstances(torch.is_grad_enabled(), Autocast.around(device), flags)

    @contextmanager
    def restored(self) -> Generator[None]:
        now = [(module, module.training) for module, _ in self.training]
        was = self.autocast
        casting = nullcontext() if was is None else torch.autocast(was.device, dtype=was.dtype, cache_enabled=was.caches)
        try:
            for module, flag in self.training:
                module.training = flag
            with torch.set_grad_enabled(self.is_grad_enabled), autocast_off(), casting:
                yield
        finally:
            for module, flag in now:
                module.training = flag


def without_values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, with tensors that take no memory."""
    return pytree.tree_map(lambda each: each.to("meta") if isinstance(each, torch.Tensor) else each, (args, kwargs))


def forms_of(again: Compiled, compiled: Compiled) -> Forms:
    """The forms of what was compiled `again`. Raises `AutoparError` where that is not what runs."""
    if again.fingerprint != compiled.fingerprint:
        raise AutoparError(
            f"the program that runs was read from a cache ({compiled.fingerprint[:12]}), and what is compiled now to show it is another "
            f"({again.fingerprint[:12]}): the model, or a setting of torch, has changed since. Compile the model as it is, without cache="
        )
    return again.forms
