"""The door to predictions: `autopar.predict`, what a step of a plan takes on a cluster that nobody has started."""

from __future__ import annotations

from collections.abc import Mapping
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
from autopar.errors import InputError, MeshError, PlanError
from autopar.foresight.capture_work import shortened
from autopar.foresight.constants import Constants, SoftwareProfile
from autopar.foresight.offload import choices
from autopar.foresight.prediction import Prediction
from autopar.foresight.price import Prices
from autopar.foresight.read_work import read_work
from autopar.foresight.step import RECOMPUTE, Step, StepPlan
from autopar.foresight.work import ModelWork
from autopar.graph.autocast import autocast_off
from autopar.ir.actions import PipelineSchedule
from autopar.ir.mesh import Mesh, virtual_mesh
from autopar.ir.offload import Offload
from autopar.ir.zero import LEVELS
from autopar.partition.whole_batch import mixing
from autopar.passes.default_passes import default_passes
from autopar.passes.global_.choose_microbatches import ChooseMicrobatches
from autopar.passes.global_.insert_reshards import InsertReshards
from autopar.plans.plan import Plan
from autopar.plans.styles import UserPins, without_styles
from autopar.runtime.module.inputs import CallInputs, batch_dims_of

Inputs = Mapping[str, Any] | tuple[Any, ...]
AXES = ("pp", "dp", "tp")
_DTYPES = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16, "float32": torch.float32}


def predict(
    model: nn.Module | ModelWork,
    *,
    cluster: Cluster | str,
    mesh: Mesh | Mapping[str, int],
    global_batch: int,
    example_inputs: Inputs = (),
    microbatch: int = 1,
    schedule: str | PipelineSchedule = "1f1b",
    num_chunks: int = 1,
    recompute: str = "none",
    zero: int = 0,
    pins: UserPins | Plan | None = None,
    precision: str | None = "bf16",
    kernels: str = "off",
    profile: str | SoftwareProfile = "fused",
    live_limit: float | None = None,
    offload: str | Offload | None = None,
) -> Prediction:
    """Seconds and bytes of one training step of `model`, from its captured graph: nothing is allocated, and no device is needed.

    model           a module, on the meta device or not, or the work of one that `measure_work` has read: it serves all plans of one `tp`
    cluster         as `autopar.compile` takes it, and with a number of devices where it should be held against the mesh: "h100:128"
    mesh            sizes of pp, dp and tp: {"pp": 2, "dp": 8, "tp": 4}; the last is within a node as far as it goes
    global_batch    samples of a step; each of the dp replicas runs its share in microbatches of `microbatch` samples
    example_inputs  a batch as a call would get it, of any number of samples from 2 on; may be on meta
    schedule        as `autopar.compile` has it; "auto" is searched for within the memory of `live_limit` microbatches a rank. With
                    "interleaved", `num_chunks` stages lie on a rank
    recompute       "none", "selective" (from the first to the last product of two activations of a layer: attention's core) or "full"
    zero            level of ZeRO over dp
    pins            who splits what over tp, as in `autopar.compile`; without them the search finds the best
    precision       "bf16", "fp16" or "float32", that of parameters and activations; None leaves what the model has
    kernels         as `autopar.compile` has it; by default ops stay as they are written
    profile         what the software does: a name of `autopar.foresight.constants.PROFILES`, or a `SoftwareProfile`
    offload         what lies on the host: "activations", all that forwards keep, "optimizer", its state, or an `Offload`

    Equal layers are captured twice and counted as often as they are there, see `autopar.foresight.capture_work`. Raises `MeshError`,
    `InputError`, `PlanError` and what a capture raises; each says what would work.
    """
    return step_of(
        model, cluster, mesh, global_batch, example_inputs, microbatch, schedule, num_chunks, recompute, zero, pins, precision, kernels,
        profile, live_limit, offload,
    ).prediction()  # fmt: skip


def step_of(
    model: nn.Module | ModelWork,
    cluster: Cluster | str,
    mesh: Mesh | Mapping[str, int],
    global_batch: int,
    example_inputs: Inputs = (),
    microbatch: int = 1,
    schedule: str | PipelineSchedule = "1f1b",
    num_chunks: int = 1,
    recompute: str = "none",
    zero: int = 0,
    pins: UserPins | Plan | None = None,
    precision: str | None = "bf16",
    kernels: str = "off",
    profile: str | SoftwareProfile = "fused",
    live_limit: float | None = None,
    offload: str | Offload | None = None,
) -> Step:
    """What `predict` predicts of; others can be priced beside it."""
    place = virtual_mesh(**mesh) if isinstance(mesh, Mapping) else mesh
    here = _cluster(cluster, place)
    sizes = _sizes(place)
    per_replica = _per_replica(global_batch, sizes["dp"], microbatch)
    _refuse(recompute, zero, sizes, schedule, num_chunks)
    known = SoftwareProfile.named(profile)
    work = model if isinstance(model, ModelWork) else measure_work(model, example_inputs, here, sizes["tp"], pins, precision, kernels)
    known = known.beside(work.itemsize)
    away = choices(offload)
    if len(away) != 1 or offload == "needed":
        raise PlanError(f'offload={offload!r} leaves open what lies on the host: use "activations", "optimizer" or an Offload of both')
    plan = StepPlan(microbatch, per_replica, sizes["dp"], sizes["pp"], schedule, num_chunks, recompute, zero, live_limit, away[0])
    ordered = Mesh(tuple((axis, sizes[axis]) for axis in AXES))
    return Step(work, plan, Prices(here, ordered, Constants.of(here, work.itemsize), known, work.tp_parts))


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
    """What each rank along tp does for one microbatch of `model`, as amounts that depend on its samples. See `predict`, and
    `autopar.compile` for `batch_dims`."""
    if precision not in _DTYPES:
        raise PlanError(f'precision={precision!r} is unknown: use "bf16", "fp16", "float32", or None for what the model has')
    short = shortened(model, _DTYPES[precision])
    here = Cluster.named(cluster) if isinstance(cluster, str) else cluster
    args, kwargs = ((), dict(example_inputs)) if isinstance(example_inputs, Mapping) else (tuple(example_inputs), {})
    args, kwargs = pytree.tree_map(lambda leaf: _cast(leaf, _DTYPES[precision]), (args, kwargs))
    inputs, counted = CallInputs.of(args, kwargs), BatchOfFirst.of(model) if batch_dims is None else batch_dims
    dims = batch_dims_of(inputs, counted)
    num_samples = next((tensor.shape[dims[index]] for index, _, tensor in inputs.tensors if index in dims), 0)
    if num_samples < 2:
        raise InputError(f"example_inputs has {num_samples} samples; pass 2 or more, so that the batch can be told from what has length 1")
    options = Options(here, pins=without_styles(pins, short.model), kernels=kernels, batch_dims=counted)
    with outside_fake_modes(), autocast_off(), torch.enable_grad():
        program = captured(short.model, virtual_mesh(dp=1, tp=tp), inputs, options)
        passes = default_passes(options, training=True)
        last = next(number for number, each in enumerate(passes) if isinstance(each, InsertReshards))
        numbered = next(number for number, each in enumerate(passes) if isinstance(each, ChooseMicrobatches))
        program = run_passes(program, passes[:numbered])
        mixes = bool(mixing(program, 2))
        program = run_passes(program, passes[numbered : last + 1])
        work = read_work(program, CostModel(here, program.mesh), short.layers, short.counts, num_samples)
        parts = program.mesh.parts("tp")
        return replace(work, mixes_samples=mixes, tp_parts=tuple(map(dict(program.mesh.axes).__getitem__, parts)))


def with_samples(model: nn.Module, example_inputs: Inputs, num_samples: int) -> Inputs:
    """A batch of so many samples for `model`, on meta, of the shapes and dtypes of `example_inputs`; what has no batch stays."""
    args, kwargs = ((), dict(example_inputs)) if isinstance(example_inputs, Mapping) else (tuple(example_inputs), {})
    inputs = CallInputs.of(args, kwargs)
    dims = batch_dims_of(inputs, BatchOfFirst.of(model))
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


def _cluster(cluster: Cluster | str, mesh: Mesh) -> Cluster:
    """With "name:number" the mesh must not be larger than that."""
    if isinstance(cluster, Cluster):
        return cluster
    found, number = Cluster.with_number(cluster)
    if number is not None and mesh.size > number:
        dp = number * dict(mesh.axes).get("dp", 1) // mesh.size
        smaller = f"take dp = {dp}" if dp else "take less of pp or tp"
        larger = f"{cluster.rpartition(':')[0]}:{mesh.size}"
        raise MeshError(f"the mesh ({mesh}) has {mesh.size} ranks, the cluster {number} devices: {smaller}, or a larger cluster, {larger}")
    return found


def tokens_per_sample(example_inputs: Inputs, batch_dims: BatchDims | None = None) -> int:
    """How many ids a sample has; 0 where no input is of ids."""
    args, kwargs = ((), dict(example_inputs)) if isinstance(example_inputs, Mapping) else (tuple(example_inputs), {})
    inputs = CallInputs.of(args, kwargs)
    dims = batch_dims_of(inputs, batch_dims) if batch_dims is not None and inputs.names else {}
    ids = ((index, tensor) for index, _, tensor in inputs.tensors if tensor.ndim == 2 and tensor.dtype == torch.int64)
    return next((tensor.shape[1 - dims.get(index, 0)] for index, tensor in ids), 0)


def _sizes(mesh: Mesh) -> dict[str, int]:
    unknown = [name for name in mesh.names if name not in AXES]
    if unknown:
        raise MeshError(f"predict knows the axes pp, dp and tp, not {', '.join(unknown)}: rename or leave out")
    return {axis: dict(mesh.axes).get(axis, 1) for axis in AXES}


def _per_replica(global_batch: int, dp: int, microbatch: int) -> int:
    """Microbatches of a replica."""
    if global_batch < 1 or microbatch < 1 or global_batch % (dp * microbatch):
        share = global_batch // dp if global_batch > 0 and global_batch % dp == 0 else 0
        fitting = ", ".join(str(size) for size in range(1, share + 1) if share % size == 0)
        mend = (
            f"microbatch may be {fitting}"
            if share
            else f"global_batch may be {max(1, round(global_batch / (dp * microbatch))) * dp * microbatch}"
        )
        raise InputError(f"a global batch of {global_batch} does not divide into dp = {dp} shares of microbatches of {microbatch}: {mend}")
    return global_batch // (dp * microbatch)


def _refuse(recompute: str, zero: int, sizes: Mapping[str, int], schedule: str | PipelineSchedule, num_chunks: int) -> None:
    if recompute not in RECOMPUTE:
        raise PlanError(f"recompute={recompute!r} is unknown: use {', '.join(RECOMPUTE)}")
    if zero not in LEVELS:
        raise PlanError(f"zero={zero!r} is no level of ZeRO: use 0, 1, 2 or 3")
    if num_chunks < 1 or (num_chunks > 1 and schedule != "interleaved"):
        raise PlanError(f'num_chunks={num_chunks} wants schedule="interleaved" and 1 or more; schedule is {schedule!r}')
    if isinstance(schedule, PipelineSchedule) and schedule.num_ranks != sizes["pp"]:
        raise PlanError(f"the schedule has {schedule.num_ranks} ranks, and pp = {sizes['pp']}; draw it for as many")
