"""What a rank does for a microbatch of a model, read off its captured graph: `autopar.measure_work`."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopar._torch import outside_fake_modes, pytree
from autopar.captured import captured
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.model import CostModel
from autopar.driver.manager import run_passes
from autopar.driver.options import BatchDims, BatchOfFirst, Options
from autopar.errors import AutoparError, InputError, PlanError
from autopar.foresight.capture_work import Layered, layered, shortened
from autopar.foresight.read_work import read_work
from autopar.foresight.same_work import why_other, why_other_pins
from autopar.foresight.work import ModelWork
from autopar.graph.autocast import autocast_off
from autopar.ir.mesh import virtual_mesh
from autopar.partition.whole_batch import mixing
from autopar.passes.default_passes import default_passes
from autopar.passes.global_.choose_microbatches import ChooseMicrobatches
from autopar.passes.global_.insert_reshards import InsertReshards
from autopar.plans.plan import Plan
from autopar.plans.styles import UserPins, without_styles
from autopar.runtime.module.inputs import CallInputs, batch_dims_of

logger = logging.getLogger("autopar")
Inputs = Mapping[str, Any] | tuple[Any, ...]
_DTYPES = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16, "float32": torch.float32}


def measure_work(
    model: nn.Module,
    example_inputs: Inputs,
    cluster: Cluster | str,
    tp: int = 1,
    pins: UserPins | Plan | None = None,
    precision: str | None = "bf16",
    kernels: str = "off",
    batch_dims: BatchDims | None = None,
) -> ModelWork:
    """What each rank along tp does for one microbatch of `model`, as amounts that depend on its samples. See `predict`."""
    return works_of(model, example_inputs, cluster, pins, precision, kernels, batch_dims)(tp)


def works_of(
    model: nn.Module,
    example_inputs: Inputs,
    cluster: Cluster | str,
    pins: UserPins | Plan | None = None,
    precision: str | None = "bf16",
    kernels: str = "off",
    batch_dims: BatchDims | None = None,
) -> Callable[[int], ModelWork]:
    """`measure_work` by the size of tp: which layers are equal is found out once.

    Of equal layers a few are captured, where a forward of these, on fake tensors, does what one of all does.
    """
    if precision not in _DTYPES:
        raise PlanError(f'precision={precision!r} is unknown: use "bf16", "fp16", "float32", or None for what the model has')
    if isinstance(pins, Mapping) and "batch" in pins:
        raise PlanError(f"pins={{'batch': {pins['batch']!r}}}: predictions split samples over dp alone; leave it out, and take more dp")
    here = Cluster.named(cluster) if isinstance(cluster, str) else cluster
    args, kwargs = ((), dict(example_inputs)) if isinstance(example_inputs, Mapping) else (tuple(example_inputs), {})
    args, kwargs = pytree.tree_map(lambda leaf: _cast(leaf, _DTYPES[precision]), (args, kwargs))
    inputs, counted = CallInputs.of(args, kwargs), BatchOfFirst.of(model) if batch_dims is None else batch_dims
    dims = batch_dims_of(inputs, counted)
    sizes = [tensor.shape[dims[index]] for index, _, tensor in inputs.tensors if index in dims]
    if min(sizes, default=0) < 2:
        raise InputError(
            f"example_inputs has {min(sizes, default=0)} samples; pass 2 or more, so that the batch can be told from what has length 1"
        )
    options = Options(here, kernels=kernels, batch_dims=counted)
    whole = layered(model, _DTYPES[precision])
    candidates: list[Layered] = [*([few] if (few := _few(whole, pins, args, kwargs)) is not None else []), whole]

    def work(tp: int) -> ModelWork:
        while True:
            try:
                return _measured(candidates[0], inputs, replace(options, pins=without_styles(pins, candidates[0].model)), tp, sizes)
            except AutoparError as error:
                if len(candidates) == 1:
                    raise
                logger.info("all layers are captured, as few of them are refused: %s", error)
                candidates.pop(0)

    return work


def _few(whole: Layered, pins: UserPins | Plan | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Layered | None:
    """`whole` with few of its layers, where these do what all do."""
    for few in shortened(whole):
        why = why_other_pins(whole, few, pins) or why_other(whole, few, args, kwargs)
        if not why:
            return few
        logger.info("%d of %d layers do not do what all do: %s", len(few.layers), len(whole.layers), why)
    return None


def _measured(model: Layered, inputs: CallInputs, options: Options, tp: int, sizes: Sequence[int]) -> ModelWork:
    """`sizes` are those of the batch in each input that has one."""
    with outside_fake_modes(), autocast_off(), torch.enable_grad():
        program = captured(model.model, virtual_mesh(dp=1, tp=tp), inputs, options)
        passes = default_passes(options, training=True)
        last = next(number for number, each in enumerate(passes) if isinstance(each, InsertReshards))
        numbered = next(number for number, each in enumerate(passes) if isinstance(each, ChooseMicrobatches))
        program = run_passes(program, passes[:numbered])
        number = _least_divisor(math.gcd(*sizes))
        mixes = number is None or bool(mixing(program, number))
        program = run_passes(program, passes[numbered : last + 1])
        work = read_work(program, CostModel(options.cluster, program.mesh), model.paths, model.counts, sizes[0])
        parts = program.mesh.parts("tp")
        return replace(work, mixes_samples=mixes, tp_parts=tuple(map(dict(program.mesh.axes).__getitem__, parts)))


def _least_divisor(number: int) -> int | None:
    """Above 1. So many microbatches can be asked about: what does not divide has no splits, and would mix nothing."""
    return next((each for each in range(2, number + 1) if number % each == 0), None)


def with_samples(model: nn.Module, example_inputs: Inputs, num_samples: int, batch_dims: BatchDims | None = None) -> Inputs:
    """A batch of so many samples for `model`, on meta, of the shapes and dtypes of `example_inputs`; what has no batch stays."""
    args, kwargs = ((), dict(example_inputs)) if isinstance(example_inputs, Mapping) else (tuple(example_inputs), {})
    inputs = CallInputs.of(args, kwargs)
    dims = batch_dims_of(inputs, BatchOfFirst.of(model) if batch_dims is None else batch_dims)
    sizes = {id(tensor): (dims[index], tensor) for index, _, tensor in inputs.tensors if index in dims}

    def larger(leaf: Any) -> Any:
        if id(leaf) not in sizes:
            return leaf
        dim, tensor = sizes[id(leaf)]
        shape = (*tensor.shape[:dim], num_samples, *tensor.shape[dim + 1 :])
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    return pytree.tree_map(larger, kwargs or args)


def _cast(leaf: Any, dtype: torch.dtype | None) -> Any:
    is_cast = dtype is not None and isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    return torch.zeros(leaf.shape, dtype=dtype, device="meta") if is_cast else leaf


def tokens_per_sample(example_inputs: Inputs, batch_dims: BatchDims | None = None) -> int:
    """How many ids a sample has; 0 where no input is of ids."""
    args, kwargs = ((), dict(example_inputs)) if isinstance(example_inputs, Mapping) else (tuple(example_inputs), {})
    inputs = CallInputs.of(args, kwargs)
    dims = batch_dims_of(inputs, batch_dims) if batch_dims is not None and inputs.names else {}
    ids = ((index, tensor) for index, _, tensor in inputs.tensors if tensor.ndim == 2 and tensor.dtype == torch.int64)
    return next((tensor.shape[1 - dims.get(index, 0)] for index, tensor in ids), 0)
