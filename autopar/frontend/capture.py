"""Capture: an unmodified `nn.Module` and example inputs become a FORWARD program.

`torch.export.export(strict=True)` (Dynamo, public API) keeps composite ops single, parameter names
original and source lines attached; `autopar.frontend.exported` brings what it returns to FORWARD form.
"""

from __future__ import annotations

import contextlib
import logging
import os
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass, replace
from enum import Enum
from typing import Any, Literal

import torch
from torch import nn

from autopar._torch import checkpoints_called, constraints_unchecked, fake_mode, pytree
from autopar.caches import caches_kept_clean
from autopar.compiled import TENSOR
from autopar.errors import CaptureError
from autopar.frontend.attributes import attributes_kept, num_hooks, numbers_of
from autopar.frontend.custom_functions import custom_functions_kept
from autopar.frontend.exported import forward_program
from autopar.frontend.mixed_dtypes import refuse_mixed_dtypes
from autopar.frontend.refusals import backward_hooks_apart, inference_mode_refused, refuse_autocast, refuse_lost, warn_of_frozen
from autopar.mesh import Mesh
from autopar.program import Program
from autopar.source import user_frames
from autopar.traced import as_traced

logger = logging.getLogger("autopar")
_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
LossPlace = Literal["itself", "attribute", "key"]
# The batch dim of each input that has one, by the input's flat index.
BatchDims = Mapping[int, int] | None


@dataclass(frozen=True)
class OutputSpec:
    """The user's output: its pytree `structure`, its `leaves` (TENSOR where a tensor stands) and where the loss is.

    `assigned` are the buffers for which the forward sets another tensor (`self.mean = ...`), rather than writing into them.
    """

    structure: Any
    leaves: tuple[Any, ...]
    loss: LossPlace | None
    loss_index: int
    assigned: tuple[str, ...] = ()


class _Captured(nn.Module):
    """What is exported: the model, returning its loss alone or everything."""

    def __init__(self, model: nn.Module, loss: LossPlace | None) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.model(*args, **kwargs)
        if self.loss == "attribute":
            return output.loss
        return output["loss"] if self.loss == "key" else output


def capture(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh, outputs: str | None = None, batch_dims: BatchDims = None
) -> Program:
    """Capture `model(*args, **kwargs)` as a FORWARD program.

    Inputs have the global batch's shapes; their values are not read. `outputs="all"` keeps every tensor of
    the output, None or "loss" the loss alone where there is one. `batch_dims` gives the batch dim of every input
    that has one; by default it is dim 0 of every tensor whose dim 0 is as long as the first one's.
    Raises `CaptureError`.
    """
    if outputs not in (None, "loss", "all"):
        raise CaptureError(f'outputs={outputs!r} is neither "loss" nor "all"')
    refuse_autocast(model)
    args, kwargs = _distinct_examples(model, args, kwargs)
    with attributes_kept(model), backward_hooks_apart(model):
        with attributes_kept(model, but_hooks=True) as written, caches_kept_clean():
            numbers, hooks = numbers_of(model), num_hooks(model)
            spec = _output_spec(model, args, kwargs)
            warn_of_frozen(numbers, numbers_of(model), but_flags=num_hooks(model) > hooks)
        loss = None if outputs == "all" else spec.loss
        if outputs == "loss" and loss is None:
            raise CaptureError(
                'outputs="loss" was asked for, but the model returns no scalar, no `.loss` and no ["loss"]; pass labels, or outputs="all"'
            )
        program = _exported(model, args, kwargs, mesh, spec, loss)
    refuse_lost(program, spec.assigned)
    return replace(_with_batch_dims(program, batch_dims), written=tuple(sorted(written)))


def _exported(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh, spec: OutputSpec, loss: LossPlace | None
) -> Program:
    trainable = frozenset(name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad)
    checkpointed: list[None] = []
    with custom_functions_kept(), constraints_unchecked():
        with (
            checkpoints_called(lambda: checkpointed.append(None)),
            _explained(model),
            caches_kept_clean(),
            warnings.catch_warnings(),
            torch.enable_grad(),
        ):
            warnings.simplefilter("ignore")
            exported = torch.export.export(_Captured(model, loss), args, kwargs, strict=True)
        if checkpointed:
            logger.warning(
                "%d regions under torch.utils.checkpoint are captured as plain calls: their activations are kept, not recomputed",
                len(checkpointed),
            )
        refuse_mixed_dtypes(exported)
        loss_index = spec.loss_index if spec.loss is not None else None
        program = forward_program(exported, mesh, trainable, spec.structure, spec.leaves, loss_index, loss is not None)
    return _with_first_names(program, model)


def _with_first_names(program: Program, model: nn.Module) -> Program:
    """Buffers of a module that goes by two names are called by the first, as parameters are."""
    names = {id(buffer): name for name, buffer in reversed(list(model.named_buffers(remove_duplicate=False)))}
    first = {name: names[id(buffer)] for name, buffer in model.named_buffers(remove_duplicate=False)}

    def named(items: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(replace(item, name=first[item.name]) if item.kind == "buffer" else item for item in items)

    signature = program.signature
    return replace(program, signature=replace(signature, inputs=named(signature.inputs), outputs=named(signature.outputs)))


def _with_batch_dims(program: Program, batch_dims: BatchDims) -> Program:
    if batch_dims is None:
        sized = [item for item in program.signature.inputs_of("batch") if item.shape]
        batch_dims = {int(item.name): 0 for item in sized if item.shape[0] == sized[0].shape[0]}
    inputs = tuple(
        replace(item, batch_dim=batch_dims.get(int(item.name))) if item.kind == "batch" else item for item in program.signature.inputs
    )
    return replace(program, signature=replace(program.signature, inputs=inputs))


def _distinct_examples(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Fresh tensors of the same shapes: the same tensor given twice (ids as labels) must stay two inputs."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))

    def example(leaf: Any) -> Any:
        return torch.zeros(leaf.shape, dtype=leaf.dtype, device=device) if isinstance(leaf, torch.Tensor) else leaf

    return pytree.tree_map(example, (args, kwargs))


def _output_spec(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OutputSpec:
    """Run the forward on fake tensors to learn what it returns."""
    mode = fake_mode()
    state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    refused = inference_mode_refused() if torch.is_grad_enabled() else contextlib.nullcontext()
    with mode, torch.no_grad(), _explained(model), torch.random.fork_rng(devices=[]), refused:
        fakes: dict[str, torch.Tensor] = {name: mode.from_tensor(value) for name, value in state.items()}
        fake_args, fake_kwargs = pytree.tree_map(
            lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs)
        )
        before = dict(fakes)
        output = as_traced(lambda: torch.func.functional_call(model, fakes, fake_args, fake_kwargs))
    # After the call torch has noted in `fakes` what the model set.
    buffers = {name for name, _ in model.named_buffers()}
    assigned = tuple(name for name, value in fakes.items() if name in buffers and value is not before[name])
    leaves, structure = _flatten(output)
    place, loss = _find_loss(output)
    index = next((index for index, leaf in enumerate(leaves) if leaf is loss), None)
    if place is not None and index is None:
        raise CaptureError(
            f"the output holds a loss, but {type(output).__name__} is no structure that torch can take apart; "
            "return a dict, a tuple, a dataclass or a ModelOutput, or register the class with torch.utils._pytree.register_pytree_node"
        )
    return OutputSpec(structure, tuple(leaf if _is_constant(leaf) else TENSOR for leaf in leaves), place, index or 0, assigned)


def _flatten(output: Any) -> tuple[list[Any], Any]:
    """Leaves and structure. Plain dataclasses are made known to torch: export and the runtime take them apart, too."""
    leaves, structure = pytree.tree_flatten(output)
    unknown = {type(leaf) for leaf in leaves if is_dataclass(leaf) and not isinstance(leaf, type)}
    for kind in unknown:
        torch.export.register_dataclass(kind)
    return _flatten(output) if unknown else (leaves, structure)


def _is_constant(leaf: Any) -> bool:
    """Whether a leaf is the same in every call; tensors are not, nor are objects that may hold some (a key-value cache)."""
    return leaf is None or isinstance(leaf, (bool, int, float, complex, str, bytes, Enum, type, torch.dtype, torch.device))


def _find_loss(output: Any) -> tuple[LossPlace | None, Any]:
    if _is_loss(output):
        return "itself", output
    if _is_loss(getattr(output, "loss", None)):
        return "attribute", output.loss
    if isinstance(output, Mapping) and _is_loss(output.get("loss")):
        return "key", output["loss"]
    return None, None


def _is_loss(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 0 and value.is_floating_point()


@contextlib.contextmanager
def _explained(model: nn.Module) -> Any:
    """Turn what Dynamo or the model raises while it is traced into a `CaptureError`."""
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        text = str(error).split("\nfrom user code")[0].split("\nUser Stack")[0].strip()
        what = f"{type(model).__name__} cannot be captured as one graph: {type(error).__name__}: {text}"
        where = _where(error)
        raise CaptureError(f"{what}\n  where: {where}\n  how to mend it: {_hint(type(error).__name__ + text + where)}") from error


def _where(error: Exception) -> str:
    """The innermost line of the user's that the error, or Dynamo's text of it, passes through."""
    frames = [frame for frame in user_frames(str(error)) if not frame.file.startswith(_OWN)]
    if not frames:
        frames = [frame for frame in user_frames("".join(traceback.format_tb(error.__traceback__))) if not frame.file.startswith(_OWN)]
    return f"{frames[-1].file}:{frames[-1].line}  {frames[-1].code}" if frames else "(no source line)"


_HINTS = (
    (
        ("expert_hit",),
        'experts are visited one by one, by what their indices say: model.set_experts_implementation("grouped_mm"), which sets '
        'config._experts_implementation, or "batched_mm", which copies an expert\'s weights for each token but splits over dp',
    ),
    (
        ("DynamicCache", "pytree"),
        "the output holds an object that is no tensor structure (a key-value cache): set config.use_cache=False, or return tensors only",
    ),
    (
        ("DataDependent", "data-dependent", "Dynamic control flow", "item()"),
        "forward reads the value of a tensor (a branch, .item(), .tolist()); write it with torch.where, or decide it before the call",
    ),
    (
        ("DynamicOutputShape", "nonzero"),
        "the shape of a result depends on values (a boolean index, nonzero, unique); keep the shape and mask with torch.where",
    ),
    (
        ("graph break", "Unsupported", "skip", "numpy"),
        "this line leaves the graph (I/O, a foreign library, an unsupported call); move it out of forward",
    ),
)


def _hint(text: str) -> str:
    found = (hint for words, hint in _HINTS if any(word.lower() in text.lower() for word in words))
    return next(found, "the model must run as plain tensor code on inputs of these shapes")
