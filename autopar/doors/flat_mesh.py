"""A flat mesh, ranks without a plan: which pp × dp × tp they become, and what runs on it, is what `autopar.rank_plans` finds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import autopar.errors
from autopar.cost.hardware.cluster import Cluster
from autopar.doors.rank_plans import rank_plans
from autopar.driver.options import BatchDims
from autopar.errors import InputError, MeshError, PlanError
from autopar.foresight.ranking import RankedPlans
from autopar.ir.actions import PipelineSchedule
from autopar.ir.mesh import FLAT, Mesh
from autopar.ir.offload import Offload
from autopar.ir.precision import MixedPrecision
from autopar.pipeline.schedules import generate
from autopar.runtime.module.inputs import CallInputs, batch_dims_of

logger = logging.getLogger("autopar")
Example = Mapping[str, Any] | tuple[Any, ...] | None


class Chosen(NamedTuple):
    """A mesh, and options of `autopar.compile` where the user gave none."""

    mesh: Mesh | DeviceMesh
    schedule: str | PipelineSchedule | None
    num_microbatches: int | None
    zero: Any
    recompute: str


def is_flat(mesh: Mesh | DeviceMesh) -> bool:
    """Whether it has one axis, without a name or called "world"."""
    if isinstance(mesh, Mesh):
        return mesh.names == (FLAT,)
    return isinstance(mesh, DeviceMesh) and mesh.ndim == 1 and mesh.mesh_dim_names in (None, (FLAT,))


def chosen(
    model: nn.Module,
    mesh: Mesh | DeviceMesh,
    example: Example,
    cluster: Cluster,
    *,
    batch_dims: BatchDims,
    memory: str | float | None = None,
    schedule: str | PipelineSchedule | None = None,
    num_microbatches: int | None = None,
    zero: Any = None,
    recompute: str = "auto",
    kernels: str = "auto",
    precision: MixedPrecision | None = None,
    offload: Offload | None = None,
    optimizer: Any = None,
) -> Chosen:
    """The fastest plan of the ranks of a flat `mesh` for batches as `example`, which is of the global batch; what was asked for stays.

    On processes rank 0 searches, and all have its answer. Within a memory budget ZeRO and recomputation stay open: a compile counts what a
    step takes, to the byte. Raises `InputError` without an example, `PlanError` where no plan fits, `MeshError` for a part of the world.
    """
    if not isinstance(example, (Mapping, tuple, list)) or not example:
        raise InputError("a flat mesh becomes pp × dp × tp for a batch: pass example_inputs, of the global batch, as a dict or a tuple")
    if isinstance(schedule, PipelineSchedule):
        raise PlanError("schedule= is one of so many ranks, and a flat mesh has no pp yet: name one, or pass the mesh that it is for")
    if not isinstance(mesh, Mesh) and mesh.size() != dist.get_world_size():
        raise MeshError(f"the flat mesh has {mesh.size()} of {dist.get_world_size()} ranks: give it all, or name its axes")
    inputs = dict(example) if isinstance(example, Mapping) else tuple(example)

    def found() -> dict[str, Any]:
        ranked = rank_plans(
            model,
            cluster=cluster,
            num_devices=mesh.size if isinstance(mesh, Mesh) else mesh.size(),
            global_batch=_global_batch(inputs, batch_dims),
            example_inputs=inputs,
            memory=memory,
            precision=_PRECISIONS.get(precision.param) if precision is not None else None,
            kernels=kernels,
            num_microbatches=num_microbatches,
            schedule=None if schedule == "auto" else schedule,
            # What "selective" leaves out here is attention's core, and in a compile all but what products make.
            recompute=("none", "full") if recompute in ("auto", "selective") else recompute,
            zero=zero if isinstance(zero, int) else None,
            offload=offload,
            batch_dims=batch_dims,
            optimizer=optimizer,
        )
        return _answer(ranked)

    answer = found() if isinstance(mesh, Mesh) else _from_first(mesh, found)
    axes = tuple((str(name), int(number)) for name, number in answer["axes"])
    pp, number, is_free = dict(axes).get("pp", 1), answer["num_microbatches"], memory is None
    drawn = generate(answer["schedule"], pp, number, answer["num_chunks"]) if pp > 1 else None
    return Chosen(
        Mesh(axes) if isinstance(mesh, Mesh) else _reshaped(mesh, axes),
        drawn if schedule is None else schedule,
        number if num_microbatches is None and max(pp, number) > 1 else num_microbatches,
        answer["zero"] or None if zero is None and is_free else zero,
        answer["recompute"] if recompute == "auto" and is_free and answer["recompute"] == "full" else recompute,
    )


_PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def _global_batch(example: Mapping[str, Any] | tuple[Any, ...], batch_dims: BatchDims) -> int:
    inputs = CallInputs.of((), dict(example)) if isinstance(example, Mapping) else CallInputs.of(example, {})
    dims = batch_dims_of(inputs, batch_dims)
    return next((tensor.shape[dims[index]] for index, _, tensor in inputs.tensors if index in dims), 0)


def _answer(ranked: RankedPlans) -> dict[str, Any]:
    """The best plan, as it goes to other ranks."""
    if not ranked.is_complete:
        raise KeyboardInterrupt
    if not ranked.plans:
        raise PlanError(f"no plan was found for the ranks of the flat mesh:\n{ranked}")
    logger.info("the flat mesh becomes the first of\n%s", ranked)
    best = ranked.plans[0]
    return {
        "axes": [axis for axis in best.axes if axis[1] > 1] or [("dp", 1)],
        "schedule": best.plan.schedule,
        "num_chunks": best.plan.num_chunks,
        "num_microbatches": best.plan.num_microbatches,
        "zero": best.plan.zero,
        "recompute": best.plan.recompute,
    }


def _from_first(mesh: DeviceMesh, found: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What rank 0 finds, on all; or the error that it raises, of the same class where that is one of ours."""
    told: list[Any] = [None, "", ""]
    first, mine = int(mesh.mesh[0]), None
    if dist.get_rank() == first:
        try:
            told[0] = found()
        except BaseException as error:  # whatever it is, the others wait for this rank's answer
            mine, told[1:] = error, [type(error).__name__, str(error)]
    dist.broadcast_object_list(told, src=first, group=mesh.get_group())
    answer, kind, text = told
    if mine is not None:
        raise mine
    if answer is None:
        known = getattr(autopar.errors, kind, None)
        raise (known or PlanError)(f"rank {first} found no plan: {text if known else f'{kind}: {text}'}")
    return answer


def _reshaped(mesh: DeviceMesh, axes: tuple[tuple[str, int], ...]) -> DeviceMesh:
    names, sizes = zip(*axes, strict=True)
    return DeviceMesh(mesh.device_type, mesh.mesh.reshape(sizes), mesh_dim_names=names)
