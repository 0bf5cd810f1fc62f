"""Models that a capture would get wrong without an error: refused, or warned of where the difference need not matter."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from collections.abc import Generator, Iterable, Mapping
from dataclasses import replace
from types import ModuleType

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from autopar.errors import CaptureError, ModelError
from autopar.frontend.attributes import tensors_of
from autopar.frontend.data_writes import gives_other_data
from autopar.frontend.module_hooks import BACKWARD_HOOKS
from autopar.graph.differentiable import differentiable
from autopar.graph.overwrites import writes
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


def refuse_sparse(program: Program, model: nn.Module) -> None:
    """A program computes with dense tensors: of others nothing is known that could be split. What nobody reads is no matter. Raises
    `CaptureError`."""
    held = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    for item, node in program.named_inputs():
        if item.name in held and node.users and (layout := held[item.name].layout) is not torch.strided:
            raise CaptureError(
                f"the {item.kind} {item.name!r} of the model is of layout {layout}, of which nothing is known that could be split: hold it "
                "dense (.to_dense()), or hold its indices and values as buffers and compute with index_add or scatter_add over them"
            )


def asking_for_gradients(model: nn.Module, constants: Mapping[str, object]) -> dict[str, str]:
    """Leaves that require grad and are no parameters, buffers and `constants` of a program by name: what the user calls each.

    None where gradients are off. What is computed of parameters ahead of forward (by `torch.nn.utils.weight_norm`) is no leaf.
    """
    paths = {id(tensor): path for path, tensors in tensors_of(model).items() for tensor in tensors}
    named = {name: (each, f"the buffer {name!r}") for name, each in model.named_buffers(remove_duplicate=False)}
    for name, each in constants.items():
        if isinstance(each, torch.Tensor):
            path = paths.get(id(each))
            named[name] = each, f"the tensor {path!r}" if path is not None else "a tensor that is held outside of the model"
    return {name: called for name, (each, called) in named.items() if torch.is_grad_enabled() and each.requires_grad and each.is_leaf}


def refuse_untrained(program: Program, asking: Mapping[str, str]) -> None:
    """Refuse a FORWARD program with results, or writes, that come of one of the tensors `asking`: of parameters alone are there gradients.

    They are constants and buffers by name, and what the user calls them. Of a model that has neither a loss nor what is trained nothing is
    refused. Raises `CaptureError`.
    """
    signature = program.signature
    if not signature.outputs_of("loss") and not any(item.requires_grad for item in signature.inputs_of("parameter")):
        return
    for place, (item, node) in enumerate(program.named_inputs()):
        if item.kind not in ("buffer", "constant") or item.name not in asking:
            continue
        inputs = tuple(replace(each, requires_grad=number == place) for number, each in enumerate(program.signature.inputs))
        reached = differentiable(replace(program, signature=replace(program.signature, inputs=inputs)))
        results = [result for output, result in program.named_outputs() if output.kind != "buffer"]
        if not reached.isdisjoint(results) or any(each.op == "call_function" and writes(each) for each in reached):
            reader = next((each for each in program.graph.nodes if each in reached and each is not node), None)
            where = f"\n  where: {SOURCE[reader].at}" if reader is not None else ""  # it may be returned as it is
            raise CaptureError(
                f"{asking[item.name]} requires grad and is no nn.Parameter: the program has gradients of parameters alone{where}\n"
                "  how to mend it: assign it to a module as a parameter (self.w = nn.Parameter(w)); where it is not to be trained, "
                "requires_grad_(False), or .detach() where it is read"
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


def refuse_lost(program: Program, assigned: Mapping[str, str]) -> None:
    """Refuse a forward that puts a new tensor in a buffer's place and reads that buffer, where a program cannot write it into the old one.

    `assigned` names such buffers, and says why not; empty where it is written. Those that nothing reads are a warning. Raises
    `CaptureError`.
    """
    for node in program.graph.nodes:
        if gives_other_data(node):
            raise CaptureError(
                f"{SOURCE[node]}: forward gives a tensor other data (x.data = ..., or x.set_(...)), which is captured where x is of the "
                "model, the data are new and like those of x, and nothing else reads the old or the new ones; write into x, a buffer or a "
                "parameter that does not train, x.copy_(...) under torch.no_grad(), or compute with a new tensor"
            )
    lost = {name: why for name, why in assigned.items() if why}
    read = [item.name for item, node in program.named_inputs() if item.kind == "buffer" and item.name in lost and node.users]
    if read:
        names, first = ", ".join(f"{name!r} ({lost[name]})" for name in read), read[0].rpartition(".")[2]
        raise CaptureError(
            f"forward assigns a new tensor to the buffer {names}, which it also reads: the next step would read the old one; write into "
            f"it, self.{first}.copy_(...) under torch.no_grad(), instead of self.{first} = ..., or assign one of its shape and dtype, "
            "computed under torch.no_grad()"
        )
    for name, why in lost.items():
        logger.warning("forward assigns a new tensor to the buffer %r, which stays as it is (%s); nothing in forward reads it", name, why)


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


def warn_of_reassigned(names: Iterable[str]) -> None:
    """Warn of attributes with tensors that forward reads and assigns anew (a memory): the program keeps their captured values."""
    found = list(names)
    if found:
        name = found[0].rpartition(".")[2]
        logger.warning(
            "forward reads tensors that are plain attributes and puts others in their place, which the captured program has as they were: "
            "%s; keep each in a buffer and write it in place (self.%s.copy_(...) under torch.no_grad())",
            ", ".join(found),
            name,
        )


def warn_of_globals(heard: Iterable[str]) -> None:
    """Globals that forward changes (a list of losses), by what `torch.export` says: the program does not change them."""
    found = [_GLOBAL.findall(text) for text in heard if "side effects happened" in text]
    own = [(module.replace("_dot_", "."), name) for places in found for module, name in places]
    names = [f"{name or 'a variable'} of {module}" for module, name in own if not _is_of_library(module, name)]
    if names:
        logger.warning(
            "forward changes globals, which a call of the captured program leaves as they are (and in which its capture may have left "
            "tensors without values): %s; return what is to be kept",
            ", ".join(dict.fromkeys(names)),
        )


def _is_of_library(module: str, name: str) -> bool:
    """Libraries note what they like in their globals: who records outputs, what was warned of. They may go by a name in the user's."""
    place = sys.modules.get(module)
    named = getattr(place, name, None)
    return is_library(getattr(named if isinstance(named, ModuleType) else place, "__file__", None) or "")
