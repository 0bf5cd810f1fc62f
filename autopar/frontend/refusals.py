"""Models that a capture would get wrong without an error: refused, or warned of where the difference need not matter."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from collections.abc import Generator, Iterable, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from autopar.errors import CaptureError, ModelError
from autopar.frontend.module_hooks import BACKWARD_HOOKS
from autopar.ir.keys import SOURCE
from autopar.ir.program import Program
from autopar.ir.source import is_library

logger = logging.getLogger("autopar")
# `G['__import_package_dot_module'].NAME`, as Dynamo names a global of a module.
_GLOBAL = re.compile(r"G\['__import_(\w+)'\](?:\.(\w+))?")


def refuse_no_model(model: object) -> None:
    """A compile takes the module itself: no function over it, and nothing that wraps or has already compiled it."""
    within = _model_within(model)
    if within:
        raise ModelError(f"the model is of type {type(model).__name__}, which wraps a model; pass the model itself: {within}")
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"of type {type(model).__name__}"
        raise ModelError(
            f"the model is {what}, but must be an instance of torch.nn.Module: parameters are split and trained by their names in it. "
            "Put a function into the forward of a module that has the layers it calls as attributes"
        )


def refuse_placed(model: nn.Module) -> None:
    """A compile takes a model that nobody has split: parameters that are DTensors already lie somewhere."""
    placed = next((name for name, each in model.named_parameters() if isinstance(each, DTensor)), None)
    if placed is not None:
        raise ModelError(
            f"parameter {placed!r} of the model is a DTensor: the model, or a part of it, was compiled before, or split by another trainer "
            "(fully_shard, parallelize_module). Pass a model of plain tensors, built anew, with the same values on every rank; those of a "
            "parallel module are parallel.full_state_dict(). Two losses of the same networks are one module, whose forward is told which"
        )


def _model_within(model: object) -> str:
    """Where what wraps or has compiled a model keeps it; empty for a plain module."""
    if isinstance(model, (nn.DataParallel, DistributedDataParallel)):
        return "model.module"
    if isinstance(model, nn.Module) and hasattr(model, "_orig_mod"):
        return "the one that torch.compile was given (autopar compiles what each rank runs, by backend=)"
    if isinstance(model, torch.jit.ScriptModule):
        return "the one that torch.jit was given"
    is_parallel = any(kind.__name__ == "ParallelModule" for kind in type(model).__mro__)
    return "the one that autopar.compile was given" if is_parallel else ""


def refuse_lost(program: Program, assigned: tuple[str, ...]) -> None:
    """Refuse a forward that puts a new tensor in a buffer's place and reads that buffer: a program can only write into the old one.

    `assigned` names such buffers. Those that nothing reads are a warning. Raises `CaptureError`.
    """
    for node in program.graph.nodes:
        if str(node.target).startswith("aten.set_."):
            raise CaptureError(
                f"{SOURCE[node]}: forward gives a tensor other data (x.data = ..., or x.set_(...)), which would be lost: "
                "compute with a new tensor, or write into a buffer, self.mean.copy_(...) under torch.no_grad()"
            )
    read = [item.name for item, node in program.named_inputs() if item.kind == "buffer" and item.name in assigned and node.users]
    if read:
        names, first = ", ".join(map(repr, read)), read[0].rpartition(".")[2]
        raise CaptureError(
            f"forward assigns a new tensor to the buffer {names}, which it also reads: the next step would read the old one; write into "
            f"it, self.{first}.copy_(...) under torch.no_grad(), instead of self.{first} = ..."
        )
    for name in assigned:
        logger.warning("forward assigns a new tensor to the buffer %r, which stays as it is; nothing in forward reads it", name)


@contextlib.contextmanager
def inference_mode_refused() -> Generator[None]:
    """torch.export leaves `torch.inference_mode` out of what it traces: what is computed there would get gradients."""
    original = torch.inference_mode.__enter__

    def enter(self: torch.inference_mode) -> None:
        if self.mode:
            raise CaptureError("forward enters torch.inference_mode(), which cannot be captured in training; use torch.no_grad() there")
        original(self)

    torch.inference_mode.__enter__ = enter
    try:
        yield
    finally:
        torch.inference_mode.__enter__ = original


@contextlib.contextmanager
def backward_hooks_apart(model: nn.Module) -> Generator[None]:
    """While this is entered `model` has no backward hooks. Those of the root module are run around the whole call instead.

    Those of submodules ask for gradients that no rank holds whole. With gradients on they are a `CaptureError`; without, no hook runs.
    """
    held = [(path, module, kind) for path, module in model.named_modules() for kind in BACKWARD_HOOKS if vars(module)[kind]]
    inner = next(((path, module) for path, module, _ in held if path or module._is_full_backward_hook is False), None)
    if inner is not None and torch.is_grad_enabled():
        path, module = inner
        raise CaptureError(
            f"{path or 'the model'} ({type(module).__name__}) has a backward hook, which asks for gradients inside the captured graph; "
            "remove it (handle.remove()). What runs: in forward, register_hook on the value itself; hooks of parameters (register_hook, "
            "register_post_accumulate_grad_hook); and register_full_backward_hook of the whole model or of the parallel module"
        )
    hooks = [(module, kind, vars(module)[kind]) for _, module, kind in held]
    for module, kind, kept in hooks:
        vars(module)[kind] = type(kept)()
    try:
        yield
    finally:
        for module, kind, kept in hooks:
            vars(module)[kind] = kept


def warn_of_frozen(before: Mapping[str, float], after: Mapping[str, float], but_flags: bool) -> None:
    """Warn of numbers and flags that forward changes on its modules (a counter of calls): the program keeps their captured values.

    With `but_flags` changed flags are no reason: forward has installed hooks, and its flags say that it has.
    """
    names = [name for name, value in after.items() if name in before and before[name] != value]
    changed = [f"{name} ({before[name]} → {after[name]})" for name in names if not (but_flags and isinstance(after[name], bool))]
    if changed:
        logger.warning(
            "forward changes numbers or flags on its modules, which the captured program has as they were: %s; where they matter, make "
            "numbers buffers, and call the original model once for flags before it is compiled",
            ", ".join(changed),
        )


def warn_of_globals(heard: Iterable[str]) -> None:
    """Globals that forward changes (a list of losses), by what `torch.export` says: the program does not change them."""
    found = [_GLOBAL.findall(text) for text in heard if "side effects happened" in text]
    own = [(module.replace("_dot_", "."), name) for places in found for module, name in places]
    names = [f"{name or 'a variable'} of {module}" for module, name in own if not _is_of_library(module)]
    if names:
        logger.warning(
            "forward changes globals, which a call of the captured program leaves as they are (and in which its capture may have left "
            "tensors without values): %s; return what is to be kept",
            ", ".join(dict.fromkeys(names)),
        )


def _is_of_library(module: str) -> bool:
    """Libraries note what they like in their globals: who records outputs, what was warned of."""
    return is_library(getattr(sys.modules.get(module), "__file__", None) or "")
