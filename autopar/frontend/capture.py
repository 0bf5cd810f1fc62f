"""Capture: an unmodified `nn.Module` and example inputs become a FORWARD program.

`torch.export.export(strict=True)` (Dynamo, public API) keeps composite ops single, parameter names
original and source lines attached; `autopar.frontend.exported` brings what it returns to FORWARD form.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from autopar._torch import FakeTensorMode, fake_mode, fake_mode_of, foreign_parameters_refused, is_fake, pytree
from autopar.errors import CaptureError
from autopar.frontend._torch import (
    asking_for_gradients_ignored,
    checkpoints_called,
    constraints_unchecked,
    data_detached,
    exports_let_go,
    masked_reads_open,
    numpy_kept,
    parameters_not_copied,
    variables_traced,
)
from autopar.frontend._torch_export import functions_not_looked_up, operands_traced_as_they_are, regions_traced
from autopar.frontend.asked_layouts import Asked, asked_layouts, asked_otherwise, with_asked, written_by_layout
from autopar.frontend.assigned_buffers import Assigned, assigned_buffers, assigned_value, assigned_written
from autopar.frontend.attribute_reads import read_and_assigned
from autopar.frontend.attributes import attributes_kept, num_hooks, numbers_of, others, tensors_of
from autopar.frontend.caches import caches_kept_clean
from autopar.frontend.custom_functions import custom_functions_kept
from autopar.frontend.explained import explained
from autopar.frontend.exported import forward_program
from autopar.frontend.fast_paths import fast_paths_off
from autopar.frontend.hooks import hooks_kept
from autopar.frontend.known_masks import known_masks_counted
from autopar.frontend.library_checks import library_checks_asserted
from autopar.frontend.masked_reads import takes_up
from autopar.frontend.outputs import OutputElement, OutputSpec, flattened
from autopar.frontend.refusals import (
    asking_for_gradients,
    backward_hooks_apart,
    inference_mode_refused,
    refuse_lost,
    refuse_sparse,
    warn_of_frozen,
    warn_of_globals,
    warn_of_reassigned,
)
from autopar.frontend.shared_memory import refuse_shared_writes
from autopar.frontend.traced import as_traced
from autopar.frontend.value_checks import asserts_assumed
from autopar.frontend.variables import variable
from autopar.graph.autocast import Autocast, autocast_off, casts_not_cached
from autopar.graph.causal_biases import causal_biases_plain, refuse_biases
from autopar.graph.late_code import code_written_late
from autopar.graph.model_device import model_device
from autopar.graph.synced_norms import norms_of_the_batch
from autopar.ir.mesh import Mesh
from autopar.ir.program import Output, Program

logger = logging.getLogger("autopar")
# The batch dim of each input that has one, by the input's flat index.
BatchDimByIndex = Mapping[int, int] | None


class _Captured(nn.Module):
    """What is exported: the model, returning these elements of its output, or everything (None), and what it has `assigned` to buffers."""

    def __init__(self, model: nn.Module, places: tuple[OutputElement, ...] | None, assigned: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.places = places
        self.assigned = assigned

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.model(*args, **kwargs)
        kept = output if self.places is None else tuple(place.of(output) for place in self.places)
        return (kept, [assigned_value(self.model, name) for name in self.assigned]) if self.assigned else kept


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mesh: Mesh,
    outputs: str | None = None,
    batch_dims: BatchDimByIndex = None,
) -> Program:
    """Capture `model(*args, **kwargs)` as a FORWARD program.

    Inputs have the global batch's shapes; their values are not read. `outputs="all"` keeps every tensor of
    the output, "loss" the loss alone where there is one. None does that where gradients are on; where they are off, or there is no loss,
    it keeps every tensor, but not what lies in objects of other kinds (a key-value cache). `batch_dims` gives the batch dim of every input
    that has one; by default it is dim 0 of every tensor whose dim 0 is as long as the first one's.
    Raises `CaptureError`.
    """
    if outputs not in (None, "loss", "all"):
        raise CaptureError(f'outputs={outputs!r} is neither "loss" nor "all"')
    args, kwargs = _distinct_examples(model, args, kwargs)
    autocast = Autocast.around(model_device(model).type)
    with _as_graphs_hold_it(model):
        with attributes_kept(model, but_hooks=True) as written, caches_kept_clean(), asserts_assumed():
            numbers, hooks = numbers_of(model), num_hooks(model)
            # What has no batch dim is not put together again from what several microbatches make.
            spec, asked = _output_spec(model, args, kwargs, _batch_size(args, kwargs, batch_dims) if mesh.num_microbatches > 1 else None)
            warn_of_frozen(numbers, numbers_of(model), but_flags=num_hooks(model) > hooks)
        if outputs == "loss" and spec.loss_index is None:
            raise CaptureError(
                'outputs="loss" was asked for, but the model returns no scalar, no `.loss` and no ["loss"], nor a tuple with exactly one '
                'scalar; pass labels, or outputs="all"'
            )
        kept = _kept(spec, outputs)
        if outputs is None and kept is not None and (left := [place.name for place in spec.elements if place not in kept]):
            logger.info('of the output the loss alone is computed, and not %s: outputs="all" computes all', ", ".join(map(repr, left)))
        program, assigned = _exported(model, args, kwargs, mesh, spec, kept, autocast)
    refuse_sparse(program, model)
    refuse_lost(program, assigned)
    program = with_asked(_with_batch_dims(program, batch_dims), written_by_layout(program) | asked)
    if mesh.num_shares > 1 and program.signature.outputs_of("output"):
        program = _with_batch_dims_of_outputs(program, model, args, kwargs)
    return replace(program, written=tuple(sorted(written)))


@contextmanager
def _as_graphs_hold_it(model: nn.Module) -> Generator[None]:
    """While this is entered, `model` runs as plain ops of torch's; afterwards it is as it was."""
    with causal_biases_plain(model), norms_of_the_batch(model), attributes_kept(model), backward_hooks_apart(model):
        with library_checks_asserted(), casts_not_cached(), fast_paths_off():
            yield


def _exported(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mesh: Mesh,
    spec: OutputSpec,
    places: tuple[OutputElement, ...] | None,
    autocast: Autocast | None,
) -> tuple[Program, Assigned]:
    """The program, and of what forward assigns to buffers why it is not in it."""
    written = tuple(name for name, why in spec.assigned.items() if not why)
    trainable = frozenset(name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad)
    with custom_functions_kept(), hooks_kept(), data_detached(), constraints_unchecked(), parameters_not_copied():
        with (
            asking_for_gradients_ignored(),
            variables_traced(variable),
            checkpoints_called(),
            numpy_kept(),
            code_written_late(),
            explained(model),
            caches_kept_clean(),
            exports_let_go(),
            foreign_parameters_refused(),
            functions_not_looked_up(),
            known_masks_counted(),
            operands_traced_as_they_are(),
            regions_traced(),
            warnings.catch_warnings(record=True) as heard,
            torch.enable_grad(),
        ):
            warnings.simplefilter("always")
            exported = torch.export.export(_Captured(model, places, written), args, kwargs, strict=True)
        refuse_biases(exported.constants)
        warn_of_globals(str(warning.message) for warning in heard)
        kept = None if places is None else tuple(leaf for place in places for leaf in place.leaves)
        leaves, device = (spec.structure, spec.leaves, spec.loss_index, kept), model_device(model).type
        with autocast_off():
            asking = asking_for_gradients(model, exported.constants)
            program = forward_program(exported, mesh, trainable, *leaves, device, autocast, asking, written)
        program, assigned = assigned_written(program, model, spec.assigned)
    refuse_shared_writes(program, model, {name: each for name, each in exported.constants.items() if isinstance(each, torch.Tensor)})
    return _with_first_names(program, model), assigned


def _kept(spec: OutputSpec, outputs: str | None) -> tuple[OutputElement, ...] | None:
    """The elements of the output that are computed; None for all that it is."""
    if outputs == "all":
        return None
    if spec.loss is None:
        return spec.elements if spec.has_objects and spec.elements else None
    return (spec.loss,) if outputs == "loss" or torch.is_grad_enabled() else spec.elements


def _batch_size(args: tuple[Any, ...], kwargs: dict[str, Any], batch_dims: BatchDimByIndex) -> int | None:
    leaves = pytree.tree_leaves((args, kwargs))
    if batch_dims is None:
        batch_dims = {index: 0 for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.ndim}
    return next((leaves[index].shape[dim] for index, dim in sorted(batch_dims.items())), None)


def _with_first_names(program: Program, model: nn.Module) -> Program:
    """Buffers of a module that goes by two names are called by the first, as parameters are."""
    names = {id(buffer): name for name, buffer in reversed(list(model.named_buffers(remove_duplicate=False)))}
    first = {name: names[id(buffer)] for name, buffer in model.named_buffers(remove_duplicate=False)}

    def named(items: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(replace(item, name=first.get(item.name, item.name)) if item.kind == "buffer" else item for item in items)

    signature = program.signature
    return replace(program, signature=replace(signature, inputs=named(signature.inputs), outputs=named(signature.outputs)))


def _with_batch_dims(program: Program, batch_dims: BatchDimByIndex) -> Program:
    if batch_dims is None:
        sized = [item for item in program.signature.inputs_of("batch") if item.shape]
        batch_dims = {int(item.name): 0 for item in sized if item.shape[0] == sized[0].shape[0]}
    inputs = tuple(
        replace(item, batch_dim=batch_dims.get(int(item.name))) if item.kind == "batch" else item for item in program.signature.inputs
    )
    return replace(program, signature=replace(program.signature, inputs=inputs))


def _with_batch_dims_of_outputs(program: Program, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
    """With the dim of each tensor of the output that counts samples: the first that is twice as long for twice the batch. No size alone
    tells (8 samples, 8 classes), nor does the graph where an op goes across samples (`flip(0)`). Left open where forward fails on that."""
    dims = {int(item.name): item.batch_dim for item in program.signature.inputs_of("batch") if item.batch_dim is not None}
    leaves, structure = pytree.tree_flatten((args, kwargs))
    try:
        twice = [_empty_twice(leaf, dims[index]) if index in dims else leaf for index, leaf in enumerate(leaves)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _, found = described_output(model, *pytree.tree_unflatten(twice, structure))
    except Exception as error:  # whatever a model says to a batch that nobody gave it
        logger.debug("which dims of the output count samples is read off the graph: %s", error)
        return program

    def counted(item: Output) -> Output:
        shape = found[int(item.name)] if item.kind == "output" and int(item.name) < len(found) else None
        if not isinstance(shape, torch.Size) or len(shape) != len(item.shape):
            return item
        dim = next((dim for dim, size in enumerate(item.shape) if shape[dim] == 2 * size > 0), None)
        return replace(item, batch_dim=dim, is_whole=shape == item.shape)

    return replace(program, signature=replace(program.signature, outputs=tuple(map(counted, program.signature.outputs))))


def _empty_twice(leaf: torch.Tensor, dim: int) -> torch.Tensor:
    """As long again along `dim`, without values."""
    return leaf.new_empty([size * (1 + (number == dim)) for number, size in enumerate(leaf.shape)])


def _distinct_examples(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Fresh tensors of the same shapes: the same tensor given twice (ids as labels) must stay two inputs."""
    device = model_device(model)

    def example(leaf: Any) -> Any:
        return torch.zeros(leaf.shape, dtype=leaf.dtype, device=device) if isinstance(leaf, torch.Tensor) else leaf

    with _fake_mode_of(model) or nullcontext():
        return pytree.tree_map(example, (args, kwargs))


def _fake_mode_of(model: nn.Module) -> FakeTensorMode | None:
    """That of the tensors of `model` where some are fake."""
    return next((fake_mode_of(each) for each in chain(model.parameters(), model.buffers()) if is_fake(each)), None)


def described_output(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The structure of what `model(*args, **kwargs)` returns, and its flat leaves, of a tensor its shape. Values are not read."""
    args, kwargs = _distinct_examples(model, args, kwargs)
    with _as_graphs_hold_it(model):
        with attributes_kept(model, but_hooks=True), caches_kept_clean(), asserts_assumed():
            output, *_ = _fake_output(model, args, kwargs)
    leaves, structure = flattened(output)
    return structure, [leaf.shape if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _output_spec(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], batch_size: int | None) -> tuple[OutputSpec, Asked]:
    """Run the forward on fake tensors to learn what it returns and asks, and warn of tensors that it keeps from call to call."""
    output, assigned, reassigned, asked = _fake_output(model, args, kwargs, is_watched=True)
    warn_of_reassigned(reassigned)
    return OutputSpec.of(output, assigned, batch_size), asked


def _fake_output(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], is_watched: bool = False
) -> tuple[Any, Assigned, tuple[str, ...], Asked]:
    """What the forward returns on fake tensors, the buffers for which it sets others, where it `is_watched` the attributes that it reads
    and sets anew, and the inputs of which it asks how they lie."""
    mode, held, hooks = _fake_mode_of(model) or fake_mode(), tensors_of(model), num_hooks(model)
    state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    refused = inference_mode_refused() if torch.is_grad_enabled() else nullcontext()
    with (
        mode,
        explained(model),
        torch.random.fork_rng(devices=[]),
        refused,
        known_masks_counted(),
        masked_reads_open(mode, takes_up) as refuse_open,
    ):

        def fake(leaf: Any) -> Any:
            return mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) and not is_fake(leaf) else leaf

        fakes: dict[str, torch.Tensor] = {name: fake(value) for name, value in state.items()}
        fake_args, fake_kwargs = pytree.tree_map(fake, (args, kwargs))
        before = dict(fakes)
        reassigned: tuple[str, ...] = ()

        leaves, structure = pytree.tree_flatten((fake_args, fake_kwargs))

        def run(tensors: dict[str, torch.Tensor], given: list[Any] = leaves) -> Any:
            return as_traced(lambda: torch.func.functional_call(model, tensors, *pytree.tree_unflatten(given, structure)))

        asked: Asked = {}
        with asked_layouts(leaves) as watch:
            output = run(fakes)
        refuse_open((flattened(output)[0], fakes))
        if is_watched and others(held, tensors_of(model)) and num_hooks(model) == hooks:  # hooks that a second run might install again
            reassigned = read_and_assigned(model, lambda: run(dict(before)))
        if is_watched:
            asked = watch.asked
        if (asked or watch.answers) and is_watched and num_hooks(model) == hooks:
            with attributes_kept(model):
                asked = asked_otherwise(watch, leaves, lambda given: run(dict(before), given))
    # After the call torch has noted in `fakes` what the model set.
    return output, assigned_buffers(model, before, fakes), reassigned, asked
