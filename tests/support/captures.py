"""Models compiled as most tests want them, and captures of equal models, and joint traces of equal programs, made once a run.

Two thirds of what compiling a tiny model takes is Dynamo's and AOTAutograd's. `stored` shares both among processes.

Only captures by the front door, and those of `kept_capture`, are kept. A model is known by the classes of its modules, by their
attributes, as long as these are plain values or functions, by names, shapes, dtypes and ties of its tensors, and by its modes; one of
transformers' by its configuration instead of the attributes. Tests of capture call it themselves. A program is known by all that is
written in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import autopar.captured
import autopar.doors.compile
from autopar.cost.hardware.cluster import Cluster
from autopar.frontend.capture import capture
from autopar.graph.autocast import Autocast
from autopar.graph.decompositions import DECOMPOSITIONS
from autopar.ir.mesh import Mesh, virtual_mesh
from autopar.ir.program import Program
from autopar.passes.global_.trace_joint import TraceJoint, trace_joint
from autopar.runtime.module.inputs import CallInputs
from autopar.runtime.module.parallel_module import ParallelModule
from tests.support.stored import CannotBeStored, content_of, stored

_OF_ALL = frozenset(nn.Module().__dict__) | {"_is_hf_initialized"}
_PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device)
# The last that were asked for: collections look at all that lives.
_kept: dict[Any, Program] = {}
_MOST_KEPT = 40


def compiled(model: nn.Module, mesh: Mesh | DeviceMesh | Mapping[str, int], batch: Any = None, **options: Any) -> ParallelModule:
    """`model` by the front door: in eager fragments, on the ideal cluster, where all that can be split is; `options` go first.

    `mesh` may be the axes of a virtual one. Without `batch`, the arguments or keywords of a call, the first call is captured.
    """
    placed = virtual_mesh(**mesh) if isinstance(mesh, Mapping) else mesh
    options = {"backend": "eager", "cluster": Cluster.ideal()} | options
    return autopar.doors.compile.compile(model, placed, example_inputs=batch, **options)


def keep_captures() -> None:
    """From now on `autopar.compile` captures an equal call of an equal model once, and traces an equal program once."""
    autopar.captured.capture = kept_capture  # type: ignore[assignment]
    TraceJoint.apply = kept_trace  # type: ignore[method-assign]


def kept_trace(chosen: TraceJoint, program: Program) -> Program:
    """What `TraceJoint` makes of `program`, or a copy of what it made of an equal one, whose mesh does not matter to it."""
    try:
        content = content_of(program)
    except CannotBeStored:
        return trace_joint(program, chosen.training)
    decompositions = tuple((str(op), each.__qualname__) for op, each in DECOMPOSITIONS.items())
    key = (chosen.training, torch.get_default_dtype(), decompositions, content)
    joint = _known_or_made(key, lambda: trace_joint(program, chosen.training))
    return replace(joint, mesh=program.mesh, freedom=program.freedom, order=program.order, constants=program.constants)


def _known_or_made(key: Any, make: Callable[[], Program]) -> Program:
    """A copy: a pass that changed what it is given would show in the next test."""
    program = _kept[key] = _kept.pop(key, None) or stored(key, make)
    if len(_kept) > _MOST_KEPT:
        del _kept[next(iter(_kept))]
    return program.copy()


def kept_capture(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh, outputs: str | None = None, batch_dims: Any = None
) -> Program:
    """`autopar.frontend.capture.capture`, or a copy of what it gave for an equal call."""
    identity = _identity(model)
    if identity is None or autopar.captured.capture is not kept_capture:
        return capture(model, args, kwargs, mesh, outputs, batch_dims)
    batch = tuple(sorted(batch_dims.items())) if batch_dims is not None else None
    key = (
        identity,
        CallInputs.of(args, kwargs).key,
        tuple(kwargs),
        outputs,
        batch,
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        Autocast.around(next((parameter.device.type for parameter in model.parameters()), "cpu")),
        mesh.num_microbatches > 1,
    )
    return replace(_known_or_made(key, lambda: capture(model, args, kwargs, mesh, outputs, batch_dims)), mesh=mesh)


def _identity(model: nn.Module) -> Any:
    """What the capture of `model` depends on; None where that cannot be told."""
    tensors: dict[int, int] = {}
    described = []
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        first = tensors.setdefault(id(tensor), len(tensors))
        described.append((name, first, tuple(tensor.shape), tensor.dtype, tensor.device.type, tensor.requires_grad))
    modules = tuple((name, type(module), module.training) for name, module in model.named_modules())
    if any(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__ for module in model.modules()):
        return None
    attributes = _configuration(model) if type(model).__module__.startswith("transformers.models.") else _attributes(model)
    return None if attributes is None else (modules, attributes, tuple(described))


def _configuration(model: nn.Module) -> Any:
    config: Any = model.config
    return config.to_json_string(), getattr(config, "_attn_implementation", None)


def _attributes(model: nn.Module) -> Any:
    found: list[Any] = []
    for module in model.modules():
        for name, value in module.__dict__.items():
            if name not in _OF_ALL:
                plain = _plain(value)
                if plain is None:
                    return None
                found.append((name, plain))
    return tuple(found)


def _plain(value: Any) -> Any:
    """A hashable stand-in for a plain value; None for any other."""
    if isinstance(value, _PLAIN) or isinstance(value, FunctionType) and value.__closure__ is None:
        return type(value), value
    if isinstance(value, (tuple, list)):
        items = [_plain(item) for item in value]
        return None if None in items else (type(value), *items)
    return None
