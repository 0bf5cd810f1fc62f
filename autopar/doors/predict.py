"""The door to predictions: `autopar.predict`, what a step of a plan takes on a cluster that nobody has started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from autopar.cost.hardware.cluster import Cluster
from autopar.doors.measure_work import Inputs, measure_work
from autopar.driver.options import BatchDims
from autopar.errors import InputError, MeshError, PlanError
from autopar.foresight.constants import Constants, SoftwareProfile
from autopar.foresight.offload import choices
from autopar.foresight.prediction import Prediction
from autopar.foresight.price import Prices
from autopar.foresight.step import RECOMPUTE, Step, StepPlan
from autopar.foresight.work import ModelWork
from autopar.ir.actions import PipelineSchedule
from autopar.ir.mesh import Mesh, virtual_mesh
from autopar.ir.offload import Offload
from autopar.ir.zero import LEVELS
from autopar.partition.whole_batch import Statistics
from autopar.plans.plan import Plan
from autopar.plans.styles import UserPins

AXES = ("pp", "dp", "tp")


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
    batch_dims: BatchDims | None = None,
    optimizer: Any = None,
    microbatch_statistics: Statistics = None,
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
    batch_dims      which dim of the inputs counts samples, as for `autopar.compile`
    optimizer       whose state is counted, "sgd", a class of torch.optim or an instance; by default the profile's, Adam's in all of them
    microbatch_statistics  "own" accepts, as for `autopar.compile`, that microbatches of a model that mixes samples take their own

    What `autopar.compile` does besides has no price here: regions under `torch.utils.checkpoint` (its recompute="auto"; say "full" or
    "selective"), gradient clipping and averages of a `TrainStep`, collectives in pieces, `pad_to` (pass inputs as long as they become).
    Of equal layers a few are captured and counted as often as they are there, see `autopar.foresight.capture_work`. Raises `MeshError`,
    `InputError`, `PlanError` and what a capture raises; each says what would work.
    """
    return step_of(
        model, cluster, mesh, global_batch, example_inputs, microbatch, schedule, num_chunks, recompute, zero, pins, precision, kernels,
        profile, live_limit, offload, batch_dims, optimizer, microbatch_statistics,
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
    batch_dims: BatchDims | None = None,
    optimizer: Any = None,
    microbatch_statistics: Statistics = None,
) -> Step:
    """What `predict` predicts of; others can be priced beside it."""
    place = virtual_mesh(**mesh) if isinstance(mesh, Mapping) else mesh
    here = _cluster(cluster, place)
    sizes = _sizes(place)
    per_replica = _per_replica(global_batch, sizes["dp"], microbatch)
    _refuse(recompute, zero, sizes, schedule, num_chunks)
    known = SoftwareProfile.named(profile)
    if isinstance(model, ModelWork):
        work = model
    else:
        work = measure_work(model, example_inputs, here, sizes["tp"], pins, precision, kernels, batch_dims)
    known = known.updating(optimizer).beside(work.itemsize)
    if work.mixes_samples and per_replica > 1 and microbatch_statistics != "own":
        raise PlanError(
            f"the model mixes samples (batch norm in training, the root of a mean), and computes something else in {per_replica} "
            f"microbatches: pass microbatch={global_batch // sizes['dp']}, a replica's share, or "
            'microbatch_statistics="own" where each may take its own'
        )
    away = choices(offload)
    if len(away) != 1 or offload == "needed":
        raise PlanError(f'offload={offload!r} leaves open what lies on the host: use "activations", "optimizer" or an Offload of both')
    plan = StepPlan(microbatch, per_replica, sizes["dp"], sizes["pp"], schedule, num_chunks, recompute, zero, live_limit, away[0])
    ordered = Mesh(tuple((axis, sizes[axis]) for axis in AXES))
    return Step(work, plan, Prices(here, ordered, Constants.of(here, work.itemsize), known, work.tp_parts))


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
