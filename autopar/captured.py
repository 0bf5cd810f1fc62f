"""What compiles and predictions begin with: the FORWARD program of a call."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopar.cache.describe import NotKnown
from autopar.cache.layer_lines import does_the_same
from autopar.cache.trace import traced
from autopar.driver.options import BatchOfFirst, Options
from autopar.errors import AutoparError, InputError
from autopar.frontend.capture import capture
from autopar.frontend.frozen_writes import known_as_buffers
from autopar.frontend.layer_runs import few_layers, longest_run
from autopar.graph.autocast import Autocast
from autopar.graph.layer_instances import with_all_layers
from autopar.graph.layers import NotRepeatedError
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placement
from autopar.ir.program import Program
from autopar.ir.source import WRAPPED
from autopar.passes.forward.key_random import number_sites
from autopar.pipeline.order import chosen_schedule, pipeline_order
from autopar.runtime.module.inputs import CallInputs, batch_dims_of

logger = logging.getLogger("autopar")
# What a call is as a graph, by the number of its microbatches.
Captures = dict[int, Program]


def captured(
    model: nn.Module,
    mesh: Mesh,
    inputs: CallInputs,
    options: Options,
    placements: Mapping[str, Placement] | None = None,
    known: Captures | None = None,
) -> Program:
    """The FORWARD program of a call, with the order of its microbatches and stages.

    Parameters that lie somewhere have `placements`. What is `known` of this call is not captured anew; what is captured is known then.
    """
    args, kwargs = inputs.call()
    dims = batch_dims_of(inputs, options.batch_dims) if options.shares is None else dict(options.shares.dims)
    if placements:
        mesh = next(iter(placements.values())).mesh
    batch_sizes = [tensor.shape[dims[index]] for index, _, tensor in inputs.tensors if index in dims]
    planned = options.plan.schedule if options.plan is not None else None
    schedule, number = chosen_schedule(options.schedule, options.num_microbatches, planned, mesh, batch_sizes)
    order = pipeline_order(schedule, mesh.with_microbatches(number))
    if options.microbatch_statistics == "own" and number > 1 and any(size % (mesh.num_shares * number) for size in batch_sizes):
        raise InputError(
            f'microbatch_statistics="own" takes the statistics of equal microbatches, and a batch of {min(batch_sizes)} does not divide '
            f"into {mesh.num_shares * number} of them (dp = {mesh.num_shares} × num_microbatches = {number}): pad or drop it, or leave "
            "microbatch_statistics out"
        )
    if options.precision is not None and Autocast.around(options.device) is not None:
        raise AutoparError("precision= and torch.autocast around the call both say what to compute in; leave one of them out")
    known = {} if known is None else known
    if number not in known:
        known[number] = _captured(model, args, kwargs, mesh.with_microbatches(number), options.outputs, dims)
    forward = known_as_buffers(known[number].copy(), placements or {})
    # Where each may take its own statistics, batch norm's buffers are those of a microbatch from the start.
    mesh = mesh.with_microbatches(number if options.microbatch_statistics == "own" else 1)
    signature = replace(forward.signature, guessed=inputs.names if isinstance(options.batch_dims, BatchOfFirst) else ())
    return number_sites(replace(forward, mesh=mesh, freedom=options.freedom, order=order, signature=signature))


def _captured(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh, outputs: str | None, dims: Mapping[int, int]
) -> Program:
    """As `capture`, in less time where the model has many equal layers: a few are captured, and the program written out for all.

    That all are equal is known by a record of what each does, and the captured program is tried against the record of the few.
    """
    run = longest_run(model)
    if run is None:
        return capture(model, args, kwargs, mesh, outputs, dims)
    try:
        with few_layers(model, run):
            few = traced(model, args, kwargs, torch.device("cpu"))
        full = traced(model, args, kwargs, torch.device("cpu"))
        if not does_the_same(full, few, run):
            raise NotRepeatedError("they do not all do the same")
        with few_layers(model, run):
            program = capture(model, args, kwargs, mesh, outputs, dims)
        if not few.is_done_by(program):
            raise NotRepeatedError("what was captured does other ops than the model on fake tensors")
        return with_all_layers(program, run, WRAPPED)
    except (NotKnown, NotRepeatedError, AutoparError) as why:
        logger.info("all of %s are captured one by one: %s", run.path, why)
    return capture(model, args, kwargs, mesh, outputs, dims)
