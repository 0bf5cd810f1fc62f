"""The front door, and the compiler: one function that takes a model to a schedule, one list of passes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar._torch import outside_fake_modes
from autopar.checks.checker import Checker, check_compiled
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.memory import MemoryBudget
from autopar.cost.model import CostModel
from autopar.driver.compiled import Compiled
from autopar.driver.garbage import collection_paused
from autopar.driver.manager import DecidingPass, History, Log, Pass, run_passes
from autopar.errors import AutoparError, InputError, MicrobatchError
from autopar.frontend.capture import capture
from autopar.frontend.refusals import refuse_no_model
from autopar.graph.microbatches import has_estimates
from autopar.ir.freedom import Freedom
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.partition.whole_batch import Mixing, Statistics
from autopar.passes.forward.choose_kernels import ChooseKernels
from autopar.passes.forward.decompose_losses import DecomposeLosses
from autopar.passes.forward.detach_outputs import DetachOutputs
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
from autopar.passes.global_.choose_shardings import ChooseShardings, ShardingDecision
from autopar.passes.global_.decide_once import DecideOnce, FromFirst
from autopar.passes.global_.decompose_batch_norm import DecomposeBatchNorm
from autopar.passes.global_.decompose_convolutions import DecomposeConvolutions
from autopar.passes.global_.find_atoms import FindAtoms
from autopar.passes.global_.fold_no_ops import FoldNoOps
from autopar.passes.global_.insert_reshards import InsertReshards
from autopar.passes.global_.mark_pinned import MarkPinned
from autopar.passes.global_.mark_saved import MarkSaved
from autopar.passes.global_.merge_equal_calls import MergeEqualCalls
from autopar.passes.global_.pad_atoms import PadAtoms
from autopar.passes.global_.place_stages import PlaceStages, StageDecision
from autopar.passes.global_.reduce_compared import SettleCompared
from autopar.passes.global_.refine_mesh import RefineMesh
from autopar.passes.global_.trace_joint import TraceJoint
from autopar.passes.global_.views_of_chunks import ViewsOfChunks
from autopar.passes.global_.views_of_strides import ViewsOfStrides
from autopar.passes.local.copy_to_stages import CopyToStages
from autopar.passes.local.lower import Lower
from autopar.passes.local.separate_microbatches import SeparateMicrobatches
from autopar.passes.schedule.cut_fragments import cut_fragments
from autopar.passes.schedule.write_schedules import pipeline_schedules
from autopar.pipeline.actions import PipelineSchedule
from autopar.pipeline.order import best_order, chosen_schedule, ordered_for, pipeline_order
from autopar.plans.pins import freedom_of, without_batch
from autopar.plans.plan import Pins, Plan, PlannedInput
from autopar.plans.styles import UserPins, without_styles
from autopar.runtime.execute.world import World
from autopar.runtime.module.inputs import BatchDims, CallInputs, batch_dims_of
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.module.parameters import Placement

Backend = str | Callable[..., Any]


@dataclass(frozen=True)
class Options:
    """What the user asked of a compile, as far as passes need to know."""

    cluster: Cluster
    outputs: str | None = None
    batch_dims: BatchDims = None
    plan: Plan | None = None
    pins: Pins | Plan | None = None
    search_timeout: float | None = None
    budget: MemoryBudget = field(default_factory=MemoryBudget)
    freedom: Freedom = Freedom()
    num_microbatches: int | None = None
    microbatch_statistics: Statistics = None
    mixing: tuple[Mixing, ...] = ()
    schedule: str | PipelineSchedule | None = None
    device: str = "cpu"
    is_real: bool = False
    kernels: str = "auto"


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
    optimizer       whose state the budget counts: "adamw", "sgd", a class or an instance of torch.optim; Adam by default
    batch_dims      batch dims of inputs by name; by default dim 0 of every input as long there as the first
    outputs         "loss": the loss alone, where there is one (the default where gradients are on); "all": every tensor of the output
    search_timeout  seconds for the sharding search; the best found so far is taken, with its gap
    timeout         seconds that a real rank waits for its peers
    num_microbatches  how many slices every rank's share of the batch runs in, one after another; it must divide the share. By
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

    Raises `AutoparError` for an option that has no such value, `ModelError` for what is no `nn.Module`, `MeshError` for a mesh that
    cannot be used. With `example_inputs`, else at the first call: `InputError`, `CaptureError` for a model that is not one graph,
    `PlanError` for a plan, pins, budget or number of microbatches that cannot be kept. Each says how to mend it.
    """
    refuse_no_model(model)
    logical, pins = Mesh.of(mesh), without_styles(pins, model)
    logical.require_supported(None if isinstance(mesh, Mesh) else torch.distributed.get_world_size())
    if outputs not in (None, "loss", "all"):
        raise AutoparError(f'outputs={outputs!r} is unknown; use "loss" or "all"')
    if kernels not in ("auto", "triton", "aten", "off"):
        raise AutoparError(f'kernels={kernels!r} is unknown; use "auto", "triton", "aten" or "off"')
    if microbatch_statistics not in (None, "own"):
        raise AutoparError(f'microbatch_statistics={microbatch_statistics!r} is unknown; use "own", or leave it out')
    budget, freedom = MemoryBudget.of(memory_budget, optimizer), freedom_of(pins, plan, logical, memory_budget is not None)
    options = Options(Cluster.asked_for(cluster, mesh), outputs, batch_dims, plan, without_batch(pins), search_timeout, budget, freedom)
    options = replace(options, is_real=not isinstance(mesh, Mesh), num_microbatches=num_microbatches, schedule=schedule, kernels=kernels)
    options = replace(options, microbatch_statistics=microbatch_statistics)

    def parallel_of(model: nn.Module, world: World | None = None) -> ParallelModule:
        """A parallel module that has captured nothing yet; a deep copy is made by this, too, in the same world."""

        def capture_call(args: tuple[Any, ...], kwargs: dict[str, Any], pins: Mapping[str, Placement] | None = None) -> Compiled:
            # A model may move before a call.
            here = replace(options, device=_device_type(model) if isinstance(mesh, Mesh) else mesh.device_type)
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


def default_passes(
    options: Options,
    training: bool,
    placements: Mapping[str, Placement] | None = None,
    from_first: FromFirst | None = None,
    order: PipelineSchedule | None = None,
) -> tuple[Pass | DecidingPass, ...]:
    """The passes in order, each with the reason for its place. `order` is None where one microbatch runs through one stage."""
    choose = ChooseShardings(
        options.cluster,
        plan=options.plan,
        pins=options.pins,
        placements=placements,
        # The stages of a pipeline share what the graph holds; each is held to the budget when they are placed.
        budget=options.budget if order is None else options.budget.times(len(order.orders)),
        timeout=options.search_timeout,
    )
    held = {name: each.stages for name, each in (placements or {}).items() if each.stages}
    return (
        # FORWARD: before the trace, so that autograd derives the backward of what is written here.
        *((DetachOutputs(training),) if order is not None else ()),  # before the trace, as all here
        *_fusions(options),  # before losses are decomposed, random ops keyed and attention unified: these take what is left
        DecomposeLosses(),  # sums and counts explicit: they may then be split over the batch and the vocabulary
        UnifyAttention(),  # before the keys: dropout inside attention is a random site of its own
        *((FuseNorms(),) if _writes_rows(options) else ()),  # after attention, whose forms it would hide
        KeyRandom(),  # draws become a function of position: the same on any mesh
        *((FuseDropout(),) if _writes_rows(options) else ()),  # after the keys, whose draws it repeats, and the norms, whose sums it leaves
        *_choices(options),  # after the keys, which tell attention of its dropout; the backward is of the same kernel
        # GLOBAL
        TraceJoint(training),
        DecomposeBatchNorm(),  # after the trace, for a backward in closed form: autograd's of the sums would take twice the ops
        DecomposeConvolutions(),  # after the trace, too: its backward op yields the bias gradient
        ViewsOfStrides(),  # before folding, as chunks below: it leaves views, too
        ViewsOfChunks(),  # before folding: a split turned into views leaves views that change nothing
        FoldNoOps(),  # before merging: two calls are equal only once what lies between them is gone
        MarkPinned(_pinned_modules(options)),  # before saving: what the backward reads of a pinned value is the pinned one
        MarkSaved(),  # before merging: views that the backward makes anew may be there already
        MergeEqualCalls(),  # before the search: one value of three equal ones is gathered once
        SettleCompared(),  # after merging, which may find more readers of a value
        FindAtoms(),  # needs the final views
        # Needs atoms, which follow the samples; what comes after sees the axis of the microbatches.
        *((_microbatches(options, order.num_microbatches, order.num_ranks),) if order is not None else ()),
        PadAtoms(_placed(options, placements), options.is_real),  # needs atoms; what divides afterwards needs no sub-axes
        RefineMesh(),  # needs atoms; the search needs the final axes
        choose if from_first is None else DecideOnce(choose, from_first),  # real ranks: rank 0's plan for all
        InsertReshards(),  # every mismatch that the decision leaves is a node from here on
        # Needs shardings: what a stage costs follows from them.
        *((PlaceStages(order, options.cluster, options.budget, held, options.plan),) if order is not None else ()),
        # LOCAL
        Lower(),
        # Needs local shapes, and collectives as nodes.
        *((SeparateMicrobatches(options.microbatch_statistics), CopyToStages()) if order is not None else ()),
    )


def _fusions(options: Options) -> tuple[DecidingPass, ...]:
    """The passes that write ops of our own, but for norms, by `kernels` and the device."""
    if options.kernels == "off":
        return ()
    if options.kernels == "aten":
        return (FuseAttention(),)
    losses = (FuseCrossEntropy(), FuseProjection(options.budget.capacity_bytes))
    return (*losses, *((FuseGates(), FuseRotary()) if _writes_rows(options) else ()), FuseAttention())


def _microbatches(options: Options, wanted: int, num_stage_ranks: int) -> ChooseMicrobatches:
    """The number is the user's where it, a schedule drawn for it, or more than one without a pipeline was asked for."""
    is_asked = options.num_microbatches is not None or isinstance(options.schedule, PipelineSchedule) or num_stage_ranks == 1
    return ChooseMicrobatches(wanted, is_asked, options.microbatch_statistics, options.mixing)


def _writes_rows(options: Options) -> bool:
    """Whether norms, gates, rotary embeddings and dropout become ops of ours: a CPU's compiler joins plain ops with their neighbours."""
    return options.kernels == "triton" or (options.kernels == "auto" and options.cluster.device.name != "cpu")


def _choices(options: Options) -> tuple[DecidingPass, ...]:
    """The choice between kernels, where there are some: a laptop that plans for a GPU makes it, too."""
    device = options.cluster.device.name
    is_gpu = options.device == "cuda" or device not in ("cpu", "tpu", Cluster.ideal().device.name)
    return (ChooseKernels.by(options.kernels, device, options.plan),) if is_gpu else ()


def _placed(options: Options, placements: Mapping[str, Placement] | None) -> Mapping[str, Placement | PlannedInput]:
    """Known placements by parameter name; those of an earlier capture override the plan's."""
    plans = (each for each in (options.pins, options.plan) if isinstance(each, Plan))
    return {name: placed for plan in plans for name, placed in plan.parameters.items()} | dict(placements or {})


def compile_call(model: nn.Module, mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options, *rest: Any) -> Compiled:
    """`compile_once`; and again in one microbatch, if the default number turns out to change what the model computes."""
    try:
        return compile_once(model, mesh, args, kwargs, options, *rest)
    except MicrobatchError as error:
        if not error.found or _microbatches(options, 1, mesh.size_of(mesh.parts("pp"))).is_asked:
            raise
        return compile_once(model, mesh, args, kwargs, replace(options, mixing=error.found, microbatch_statistics=None), *rest)


@collection_paused()
def compile_once(
    model: nn.Module,
    mesh: Mesh,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    placements: Mapping[str, Placement] | None = None,
    from_first: FromFirst | None = None,
) -> Compiled:
    """The compiler: from a model and inputs of global shape to the schedule that every rank runs."""
    inputs = CallInputs.of(args, kwargs)
    args, kwargs = inputs.call()
    dims = batch_dims_of(inputs, options.batch_dims)
    if placements:
        mesh = next(iter(placements.values())).mesh
    batch_sizes = [tensor.shape[dims[index]] for index, _, tensor in inputs.tensors if index in dims]
    planned = options.plan.schedule if options.plan is not None else None
    schedule, number = chosen_schedule(options.schedule, options.num_microbatches, planned, mesh, batch_sizes)
    order = pipeline_order(schedule, mesh.with_microbatches(number)) if mesh.size_of(mesh.parts("pp")) * number > 1 else None
    # Where each may take its own statistics, batch norm's buffers are those of a microbatch from the start.
    mesh = mesh.with_microbatches(number if options.microbatch_statistics == "own" else 1)
    history = History()
    observers = (Checker(), Log(), history)
    start = time.perf_counter()
    forward = capture(model, args, kwargs, mesh.with_microbatches(number), options.outputs, dims)
    forward = number_sites(replace(forward, mesh=mesh, freedom=options.freedom))
    seconds = time.perf_counter() - start
    passes = default_passes(options, torch.is_grad_enabled(), placements, from_first, order)
    last = run_passes(forward, passes, observers, seconds)
    decision, local = history.decision(ChooseShardings.name), history.program(Lower)
    program = history.program(InsertReshards if order is None else PlaceStages)
    cost = CostModel(options.cluster, local.mesh, options.budget.optimizer)
    order = order and ordered_for(order, local.mesh.num_microbatches)
    if order is not None and schedule == "auto":
        order = best_order(program, cost, order, options.budget.capacity_bytes)
    schedules = (cut_fragments(last, options.device),) if order is None else pipeline_schedules(last, order, options.device)
    kernels = next((step.decision.kernels for step in history.steps if step.kind is ChooseKernels), {})
    plan, stages = replace(Plan.of(program, decision), kernels=kernels), None
    if order is not None:
        stages = history.decision(PlaceStages)
        plan = plan.with_stages(program, order, stages)
    compiled = Compiled(
        forward=history.program(KeyRandom),
        program=program,
        local=local,
        separated=history.program(SeparateMicrobatches) if order is not None and has_estimates(local) else None,
        schedules=schedules,
        plan=plan,
        steps=tuple(history.steps),
        search=decision,
        cost=cost,
        decide_again=lambda pins: _decide_again(history.program(FoldNoOps), options, without_styles(pins, model), order),
        keyed=key_captured,
        order=order,
        stages=stages,
    )
    check_compiled(compiled)
    return compiled


def _decide_again(
    program: Program, options: Options, pins: Pins | Plan | None, order: PipelineSchedule | None = None
) -> tuple[Program, ShardingDecision, StageDecision | None]:
    """Decide anew about `program`, as it was before pins were applied, with `pins` and no plan: with its reshards and stages, if any."""
    freedom = freedom_of(pins, None, program.mesh, options.budget.capacity_bytes < math.inf)
    passes = default_passes(replace(options, plan=None, pins=without_batch(pins)), training=True, order=order)
    first, last = (next(i for i, each in enumerate(passes) if isinstance(each, kind)) for kind in (MarkPinned, Lower))
    history = History()
    with outside_fake_modes():
        found = run_passes(program.copy(freedom=freedom), passes[first:last], (history,))
    return found, history.decision(ChooseShardings), history.decision(PlaceStages) if order is not None else None


def _pinned_modules(options: Options) -> tuple[str, ...]:
    """Patterns of what is pinned, and the modules that a plan had pinned."""
    pins = options.pins if isinstance(options.pins, Mapping) else {}
    return (*(options.plan.pinned if options.plan is not None else ()), *pins)


def _device_type(model: nn.Module) -> str:
    kind = next((parameter.device.type for parameter in model.parameters()), "cpu")
    return "cpu" if kind == "meta" else kind
