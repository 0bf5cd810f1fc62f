"""Captures of equal models, made once a process: half of what compiling a tiny model takes is Dynamo's.

Only the front door's captures are kept, and only those of transformers' models that are as they were built: a model is known by
its class and configuration, by names, shapes, dtypes and ties of its tensors, and by its modes. Tests of capture call it themselves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

import autopar.compiler
from autopar.capture import capture
from autopar.mesh import Mesh
from autopar.program import Program
from autopar.runtime.inputs import CallInputs

_kept: dict[Any, Program] = {}


def keep_captures() -> None:
    """From now on `autopar.compile` captures an equal call of an equal model once."""
    autopar.compiler.capture = _capture  # type: ignore[assignment]


def _capture(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh, outputs: str | None = None, batch_dims: Any = None
) -> Program:
    if not _is_known_by_its_configuration(model):
        return capture(model, args, kwargs, mesh, outputs, batch_dims)
    batch = tuple(sorted(batch_dims.items())) if batch_dims is not None else None
    key = (_identity(model), CallInputs.of(args, kwargs).key, outputs, batch, torch.is_grad_enabled(), torch.get_default_dtype())
    if key not in _kept:
        _kept[key] = capture(model, args, kwargs, mesh, outputs, batch_dims)
    # A pass that changed what it is given would show in the next test: each gets its own copy all the same.
    return replace(_kept[key].copy(), mesh=mesh)


def _is_known_by_its_configuration(model: nn.Module) -> bool:
    is_built = type(model).__module__.startswith("transformers.models.")
    return is_built and not any(
        module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__ for module in model.modules()
    )


def _identity(model: nn.Module) -> Any:
    config: Any = model.config
    tensors: dict[int, int] = {}
    described = []
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        first = tensors.setdefault(id(tensor), len(tensors))
        described.append((name, first, tuple(tensor.shape), tensor.dtype, tensor.device.type, tensor.requires_grad))
    modes = tuple(module.training for module in model.modules())
    return type(model), config.to_json_string(), getattr(config, "_attn_implementation", None), tuple(described), modes
