"""The front door, and the compiler: one function that takes a model to a schedule, one list of passes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar._torch import outside_fake_modes
from autopar.checks.checker import Checker
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.memory import MemoryBudget
from autopar.cost.model import CostModel
from autopar.driver.compiled import Compiled
from autopar.driver.decide_once import FromFirst
from autopar.driver.garbage import collection_paused
from autopar.driver.manager import DecidingPass, History, Log, Pass, run_passes
from autopar.driver.optimizers import OptimizerRecipe, updates_of
from autopar.driver.options import BatchDims, Options
from autopar.driver.train_step import TrainStep
from autopar.errors import AutoparError, InputError, MicrobatchError
from autopar.frontend.capture import capture
from autopar.frontend.refusals import refuse_no_model
from autopar.graph.autocast import Autocast, autocast_off
from autopar.graph.microbatches import has_estimates
from autopar.ir.actions import PipelineSchedule
from autopar.ir.fusion import KernelDecision
from autopar.ir.mesh import Mesh
from autopar.ir.precision import MixedPrecision
from autopar.ir.program import Form, Program
from autopar.ir.shares import UnequalShares
from autopar.ir.zero import ZeRO
from autopar.partition.whole_batch import Statistics
from autopar.passes.forward.cast_to_precision import CastToPrecision
from autopar.passes.forward.choose_kernels import ChooseKernels
from autopar.passes.forward.decompose_losses import DecomposeLosses
from autopar.passes.forward.detach_outputs import DetachOutputs
from autopar.passes.forward.drop_empty_parts import DropEmptyParts
from autopar.passes.forward.fuse_attention import FuseAttention
from autopar.passes.forward.fuse_cross_entropy import FuseCrossEntropy
from autopar.passes.forward.fuse_dropout import FuseDropout
from autopar.passes.forward.fuse_gates import FuseGates
from autopar.passes.forward.fuse_norms import FuseNorms
from autopar.passes.forward.fuse_projection import FuseProjection
from autopar.passes.forward.fuse_rotary import FuseRotary
from autopar.passes.forward.key_captured import key_captured
from autopar.passes.forward.key_random import KeyRandom, number_sites
from autopar.passes.forward.unify_attention import UnifyAttention
from autopar.passes.global_.choose_microbatches import ChooseMicrobatches
from autopar.passes.global_.choose_order import ChooseOrder
from autopar.passes.global_.choose_shardings import ChooseShardings
from autopar.passes.global_.decompose_batch_norm import DecomposeBatchNorm
from autopar.passes.global_.decompose_convolutions import DecomposeConvolutions
from autopar.passes.global_.find_atoms import FindAtoms
from autopar.passes.global_.fold_no_ops import FoldNoOps
from autopar.passes.global_.hold_copies import HoldCopies
from autopar.passes.global_.insert_reshards import InsertReshards
from autopar.passes.global_.mark_pinned import MarkPinned
from autopar.passes.global_.mark_saved import MarkSaved
from autopar.passes.global_.merge_equal_calls import MergeEqualCalls
from autopar.passes.global_.pad_atoms import PadAtoms
from autopar.passes.global_.pad_batch import PadBatch
from autopar.passes.global_.pad_parameters import PadParameters
from autopar.passes.global_.place_stages import PlaceStages
from autopar.passes.global_.reduce_compared import ReduceCompared
from autopar.passes.global_.refine_mesh import RefineMesh
from autopar.passes.global_.trace_joint import TraceJoint
from autopar.passes.global_.views_of_chunks import ViewsOfChunks
from autopar.passes.global_.views_of_strides import ViewsOfStrides
from autopar.passes.local.copy_to_stages import CopyToStages
from autopar.passes.local.lower import Lower
from autopar.passes.local.separate_microbatches import SeparateMicrobatches
from autopar.passes.schedule.bucket_collectives import BucketCollectives
from autopar.passes.schedule.exchange_ties import ExchangeTies
from autopar.passes.schedule.free_buffers import FreeBuffers
from autopar.passes.schedule.gather_ahead import GatherAhead
from autopar.passes.schedule.hand_out import HandOut
from autopar.passes.schedule.order_actions import OrderActions
from autopar.passes.schedule.reduce_gradients import ReduceGradients
from autopar.passes.schedule.write_actions import WriteActions
from autopar.passes.schedule.write_updates import WriteUpdates
from autopar.pipeline.order import chosen_schedule, pipeline_order
from autopar.plans.decisions import ShardingDecision, StageDecision
from autopar.plans.pins import freedom_of, precision_of, without_batch
from autopar.plans.plan import Pins, Plan, PlannedInput
from autopar.plans.styles import UserPins, without_styles
from autopar.runtime.execute.world import World
from autopar.runtime.module.inputs import CallInputs, batch_dims_of
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.module.parameters import Placement
from autopar.runtime.train.trainer import Trainer

Backend = str | Callable[..., Any]


def compile(
    model: nn.Module,
    mesh: Mesh | DeviceMesh,
    *,
    example_inputs: Mapping[str, Any] | tuple[Any, ...] | None = None,
    backend: Backend = "inductor",
    plan: Plan | None = None,
    pins: UserPins | Plan | None = None,
    cluster: Cluster | str | None = None,
    memory_budget: str | float | None = None,
    optimizer: Any = None,
    batch_dims: BatchDims = None,
    outputs: str | None = None,
    search_timeout: float | None = None,
    timeout: float | None = None,
    num_microbatches: int | None = None,
    microbatch_statistics: Statistics = None,
    schedule: str | PipelineSchedule | None = None,
    kernels: str = "auto",
    train_step: TrainStep | None = None,
    precision: str | MixedPrecision | None = None,
    zero: int | ZeRO | None = None,
) -> ParallelModule:
    """`model` on `mesh`, behind a plain call: `loss = parallel(**batch).loss; loss.backward()`.

    mesh            a torch `DeviceMesh` with named axes, or `autopar.virtual_mesh(dp=2, tp=2)`: the same ranks in this process
    example_inputs  a batch as a call would get it (keyword arguments as a dict, positional ones as a tuple): capture happens
                    at once; else at the first call
    backend         "eager", "aot_eager", "inductor", any torch.compile backend by name, or a callable
    plan            decisions of an earlier compile, see `Plan.load`
    pins            shardings of parameters and of what modules return, by name pattern: {"*.mlp.c_fc.weight": (None, "tp"),
                    "h.*.mlp": (None, "tp", ...)}, or a dict for `parallelize_module`; {"batch": ("dp", "tp")} lets axes besides dp
                    split the batch
    cluster         hardware to price on, by name or as a `Cluster`; a virtual mesh takes the ideal one (links free)
    memory_budget   what a rank may hold: "40GiB", or bytes. Parameters may then be split over dp as well
    optimizer       what `parallel.train_step(**batch)` updates by, and `parallel.optimizer` is: an instance made of the model's
                    parameters, a class, (class, options), a `functools.partial`, or a function of the parameters. A memory budget
                    counts its state; a name ("adamw", "sgd") is for that alone. Adam's by default
    train_step      what `parallel.train_step` does besides, see `TrainStep`: clipping, accumulation, scaling, averages
    batch_dims      batch dims of inputs by name; by default dim 0 of every input as long there as the first
    outputs         "loss": the loss alone, where there is one (the default where gradients are on); "all": every tensor of the output
    search_timeout  seconds for the sharding search; the best found so far is taken, with its gap
    timeout         seconds that a real rank waits for its peers
    num_microbatches  how many slices every rank's share of the batch runs in, one after another; shares are padded to it. By
                    default 1, and with pp > 1 the largest divisor of the share up to 4 · pp with which the model computes what it
                    does on the whole batch: 1 where it mixes samples (batch norm in training, the root of a mean)
    microbatch_statistics  "own": where the model mixes samples each microbatch takes its own, as if it were the whole batch. Without
                    it a number of microbatches that changes what the model computes is a `PlanError`
    schedule        the order of a pipeline: "1f1b" (the default), "gpipe", "interleaved", "zb-h1", "zb-h2", "zb-v", "auto" (found
                    by cost within the memory budget), or a `PipelineSchedule`
    kernels         "auto": what is written in plain ops becomes ops of ours, where both compute the same: attention and cross
                    entropy, and on other devices than a CPU norms, gated activations, rotary embeddings and dropout;
                    "triton": all of these on any device; "aten": attention alone; "off": none. An op of ours runs in Triton on
                    CUDA and in ATen elsewhere. Where torch's own attention kernels know all of it (no mask, dropout, window, soft
                    cap or ids), "triton" takes ours, "aten" and "off" torch's, "auto" what was measured to be the fastest
    precision       "bf16", "fp16", or a `MixedPrecision`: parameters stay float32, contractions and attention compute in the lower dtype,
                    norms, softmax, losses and sums of gradients in float32. With "fp16" `train_step` scales the loss (`LossScale`), and
                    a plain loop has to, by `parallel.scaler()`
    zero            level 1, 2 or 3 of ZeRO, or a `ZeRO`: parameters, gradients and optimizer state lie in parts over dp. 0: whole.
                    Without it they lie whole, and under a memory budget as it takes

    Raises `AutoparError` for an option that has no such value, `ModelError` for what is no `nn.Module`, `MeshError` for a mesh that
    cannot be used. With `example_inputs`, else at the first call: `InputError`, `CaptureError` for a model that is not one graph,
    `PlanError` for a plan, pins, budget or number of microbatches that cannot be kept. Each says how to mend it.
    """
    refuse_no_model(model)
    logical, pins = Mesh.of(mesh), without_styles(pins, model)
    logical.require_supported(None if isinstance(mesh, Mesh) else torch.distributed.get_world_size())
    in_dtypes = precision_of(precision, plan)
    recipe, step_options = OptimizerRecipe.of(optimizer), (train_step or TrainStep()).scaled_for(in_dtypes)
    options = Options(
        cluster=Cluster.asked_for(cluster, mesh),
        outputs=outputs,
        batch_dims=batch_dims,
        plan=plan,
        pins=without_batch(pins),
        search_timeout=search_timeout,
        budget=MemoryBudget.of(memory_budget, recipe.sample if recipe is not None else optimizer),
        freedom=freedom_of(pins, plan, logical, memory_budget is not None, ZeRO.of(zero)),
        num_microbatches=num_microbatches,
        microbatch_statistics=microbatch_statistics,
        schedule=schedule,
        is_real=not isinstance(mesh, Mesh),
        kernels=kernels,
        updates=updates_of(recipe, step_options),
        precision=in_dtypes,
    )

    def parallel_of(model: nn.Module, world: World | None = None) -> ParallelModule:
        """A parallel module that has captured nothing yet; a deep copy is made by this, too, in the same world."""

        def capture_call(
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            pins: Mapping[str, Placement] | None = None,
            shares: UnequalShares | None = None,
        ) -> Compiled:
            # A model may move before a call.
            here = replace(options, shares=shares, device=_device_type(model) if isinstance(mesh, Mesh) else mesh.device_type)
            with outside_fake_modes():  # what we compute ourselves, masks and angles, has values
                return compile_call(model, logical, args, kwargs, here, pins, None if isinstance(mesh, Mesh) else parallel.from_first)

        parallel = ParallelModule(
            model,
            logical,
            capture=capture_call,
            backend=backend,
            device_mesh=None if isinstance(mesh, Mesh) else mesh,
            batch_dims=batch_dims,
            timeout=timeout,
            num_microbatches=num_microbatches,
            world=world,
            for_copy=parallel_of,
            trainer=Trainer(recipe if world is None else None, step_options),  # an optimizer is of one module
        )
        return parallel

    parallel = parallel_of(model)
    if isinstance(example_inputs, Mapping):
        parallel.prepare((), dict(example_inputs))
    elif isinstance(example_inputs, (tuple, list)):
        parallel.prepare(tuple(example_inputs), {})
    elif example_inputs is not None:
        raise InputError(
            f"example_inputs is a {type(example_inputs).__name__}; pass a dict of keyword arguments or a tuple of positional ones"
        )
    return parallel


def default_passes(options: Options, training: bool, placements: Mapping[str, Placement] | None = None) -> tuple[Pass | DecidingPass, ...]:
    """The passes in order, each with the reason for its place. What one that has nothing to do returns is the program that it got."""
    cluster, budget, plan, own = options.cluster, options.budget, options.plan, options.microbatch_statistics
    choose = ChooseShardings(cluster, plan=plan, pins=options.pins, placements=placements, budget=budget, timeout=options.search_timeout)
    buckets = plan.buckets if plan is not None else None
    held = {name: each.stages for name, each in (placements or {}).items() if each.stages}
    return (
        # FORWARD: before the trace, so that autograd derives the backward of what is written here.
        CastToPrecision(options.precision),  # the first: what is fused, and how, follows from dtypes
        DetachOutputs(training),  # before the trace, as all here
        DropEmptyParts(),  # before the fusions: they need not know of caches that hold nothing
        FuseCrossEntropy(options.fuses_losses),  # this and the next four before losses are decomposed, …
        FuseProjection(budget.capacity_bytes),  # after its cross entropy
        FuseGates(options.writes_rows),
        FuseRotary(options.writes_rows),
        FuseAttention(options.fuses_attention),  # … random ops keyed and attention unified: these take what is left
        DecomposeLosses(),  # sums and counts explicit: they may then be split over the batch and the vocabulary
        UnifyAttention(),  # before the keys: dropout inside attention is a random site of its own
        FuseNorms(is_asked=options.writes_rows),  # after attention, whose forms it would hide
        KeyRandom(),  # draws become a function of position: the same on any mesh
        FuseDropout(is_asked=options.writes_rows),  # after the keys, whose draws it repeats, and the norms, whose sums it leaves
        # After the keys, which tell attention of its dropout; the backward is of the same kernel.
        ChooseKernels.by(options.kernels, cluster.device.name, plan, options.chooses_kernels),
        # GLOBAL
        TraceJoint(training),
        DecomposeBatchNorm(),  # after the trace, for a backward in closed form: autograd's of the sums would take twice the ops
        DecomposeConvolutions(),  # after the trace, too: its backward op yields the bias gradient
        ViewsOfStrides(),  # before folding, as chunks below: it leaves views, too
        ViewsOfChunks(),  # before folding: a split turned into views leaves views that change nothing
        FoldNoOps(),  # before merging: two calls are equal only once what lies between them is gone
        PadBatch(options.shares),  # before merging: a range of samples may be equal to one of positions, and only one is padded
        MarkPinned(options.pinned_modules),  # before saving: what the backward reads of a pinned value is the pinned one
        MarkSaved(),  # before merging: views that the backward makes anew may be there already
        MergeEqualCalls(),  # before the search: one value of three equal ones is gathered once
        ReduceCompared(),  # after merging, which may find more readers of a value
        HoldCopies(),  # after saving, for it takes the place of what is saved; before atoms, which its nodes need
        FindAtoms(),  # needs the final views
        ChooseMicrobatches(options.is_number_asked, own, options.mixing),  # needs atoms, which follow the samples
        PadAtoms(_placed(options, placements), options.is_real),  # needs atoms; what divides afterwards needs no sub-axes
        PadParameters(),  # after padded atoms, which may divide; the mesh and the search need the sizes
        RefineMesh(plan),  # needs atoms; the search needs the final axes
        choose,  # needs atoms, padding and the mesh: they say what can be split
        InsertReshards(),  # every mismatch that the decision leaves is a node from here on
        PlaceStages(cluster, budget, held, plan),  # needs shardings: what a stage costs follows from them
        ChooseOrder(options.is_order_free, cluster, budget),  # needs what the stages cost
        # LOCAL
        Lower(),
        SeparateMicrobatches(own),  # needs local shapes, and collectives as nodes
        CopyToStages(),  # the last that adds calls
        # SCHEDULE: what every rank executes
        OrderActions(options.device),  # whole actions, and what stages send
        WriteActions(),  # each as its fragments and collectives
        ReduceGradients(),  # after the last backward of a stage
        ExchangeTies(),  # needs the sums of all stages
        HandOut(),  # needs all results
        GatherAhead(cluster, buckets, budget),  # after all collectives are written
        BucketCollectives(cluster, buckets, budget),  # after gathers, which take memory first
        FreeBuffers(),  # after all that uses buffers: what is added later is in use, too
        WriteUpdates(options.updates),  # after the plain step is whole: `train_step` runs another
    )


def _placed(options: Options, placements: Mapping[str, Placement] | None) -> Mapping[str, Placement | PlannedInput]:
    """Known placements by parameter; an earlier capture overrides the plan."""
    plans = (each for each in (options.pins, options.plan) if isinstance(each, Plan))
    return {name: placed for plan in plans for name, placed in plan.parameters.items()} | dict(placements or {})


@collection_paused()
def compile_call(
    model: nn.Module,
    mesh: Mesh,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    placements: Mapping[str, Placement] | None = None,
    from_first: FromFirst | None = None,
) -> Compiled:
    """The compiler: from a model and inputs of global shape to the schedule that every rank runs."""
    history, start = History(), time.perf_counter()
    forward = _captured(model, mesh, CallInputs.of(args, kwargs), options, placements)
    passes = default_passes(options, torch.is_grad_enabled(), placements)
    try:
        with autocast_off():
            run_passes(forward, passes, (Checker(), Log(), history), time.perf_counter() - start, from_first)
    except MicrobatchError as error:
        # A number that nobody asked for turned out to change what the model computes.
        if not error.found or options.is_number_asked or forward.order.num_ranks == 1:
            raise
        in_one = replace(options, mixing=error.found, microbatch_statistics=None)
        return compile_call(model, mesh, args, kwargs, in_one, placements, from_first)
    return _compiled(history, options, model)


def _captured(model: nn.Module, mesh: Mesh, inputs: CallInputs, options: Options, placements: Mapping[str, Placement] | None) -> Program:
    """The FORWARD program of a call, with the order of its microbatches and stages."""
    args, kwargs = inputs.call()
    dims = batch_dims_of(inputs, options.batch_dims) if options.shares is None else dict(options.shares.dims)
    if placements:
        mesh = next(iter(placements.values())).mesh
    batch_sizes = [tensor.shape[dims[index]] for index, _, tensor in inputs.tensors if index in dims]
    planned = options.plan.schedule if options.plan is not None else None
    schedule, number = chosen_schedule(options.schedule, options.num_microbatches, planned, mesh, batch_sizes)
    order = pipeline_order(schedule, mesh.with_microbatches(number))
    if options.microbatch_statistics == "own" and number > 1 and any(size % (_num_shares(mesh) * number) for size in batch_sizes):
        raise InputError(
            f'microbatch_statistics="own" takes the statistics of equal microbatches, and a batch of {min(batch_sizes)} does not divide '
            f"into {_num_shares(mesh) * number} of them (dp = {_num_shares(mesh)} × num_microbatches = {number}): pad or drop it, or leave "
            "microbatch_statistics out"
        )
    if options.precision is not None and Autocast.around(options.device) is not None:
        raise AutoparError("precision= and torch.autocast around the call both say what to compute in; leave one of them out")
    forward = capture(model, args, kwargs, mesh.with_microbatches(number), options.outputs, dims)
    # Where each may take its own statistics, batch norm's buffers are those of a microbatch from the start.
    mesh = mesh.with_microbatches(number if options.microbatch_statistics == "own" else 1)
    return number_sites(replace(forward, mesh=mesh, freedom=options.freedom, order=order))


def _num_shares(mesh: Mesh) -> int:
    return mesh.size_of(mesh.parts("dp"))


def _compiled(history: History, options: Options, model: nn.Module) -> Compiled:
    """What the passes left behind."""
    program, schedule = history.last(Form.GLOBAL), history.schedule_before(WriteUpdates)
    updating = history.schedule_steps[-1].program
    # Not after the passes before them by name: others may stand between.
    local, separated = history.before(SeparateMicrobatches), history.before(CopyToStages)
    decision, stages = history.decision(ChooseShardings), history.decision(PlaceStages)
    kernels = next((step.decision.kernels for step in history.graph_steps if isinstance(step.decision, KernelDecision)), {})
    buckets = {**history.decision(GatherAhead).bytes, **history.decision(BucketCollectives).bytes}
    return Compiled(
        forward=history.last(Form.FORWARD),
        program=program,
        local=local,
        separated=separated if has_estimates(local) else None,
        schedule=schedule,
        plan=replace(Plan.of(program, decision, stages), kernels=kernels, buckets=buckets),
        steps=history.graph_steps,
        schedule_steps=history.schedule_steps,
        search=decision,
        cost=CostModel(options.cluster, local.mesh, options.budget.optimizer),
        decide_again=lambda pins: _decide_again(history.before(MarkPinned), options, without_styles(pins, model)),
        keyed=key_captured,
        stages=stages,
        updating=updating if updating is not schedule else None,
    )


def _decide_again(program: Program, options: Options, pins: Pins | Plan | None) -> tuple[Program, ShardingDecision, StageDecision | None]:
    """Decide anew about `program`, as it was before pins were applied, with `pins` and no plan: with its reshards and stages, if any."""
    freedom = freedom_of(pins, None, program.mesh, options.budget.capacity_bytes < math.inf, options.freedom.zero)
    passes = default_passes(replace(options, plan=None, pins=without_batch(pins)), training=True)
    first, last = (next(i for i, each in enumerate(passes) if isinstance(each, kind)) for kind in (MarkPinned, Lower))
    history = History()
    with outside_fake_modes(), autocast_off():
        found = run_passes(program.copy(freedom=freedom), passes[first:last], (history,))
    assert isinstance(found, Program)
    return found, history.decision(ChooseShardings), history.decision(PlaceStages)


def _device_type(model: nn.Module) -> str:
    kind = next((parameter.device.type for parameter in model.parameters()), "cpu")
    return "cpu" if kind == "meta" else kind
