"""The front door, and the compiler: one function that takes a model to a schedule, one list of passes."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar._torch import outside_fake_modes
from autopar.cache.compiles import Question
from autopar.captured import Captures, captured
from autopar.checks.checker import Checker
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.memory import MemoryBudget
from autopar.cost.model import CostModel
from autopar.driver.compiled import Compiled
from autopar.driver.decide_once import FromFirst
from autopar.driver.garbage import collection_paused
from autopar.driver.manager import History, Log, Next, run_passes
from autopar.driver.optimizers import OptimizerRecipe, gathered_by, refuse_no_host_update, updates_of
from autopar.driver.options import BatchOfFirst, Options, refuse_no_number
from autopar.driver.pad_to import PadTo
from autopar.driver.progress import progress
from autopar.driver.train_step import TrainStep
from autopar.errors import InputError, MeshError, MicrobatchError, PlanError
from autopar.flat_mesh import chosen, is_flat
from autopar.frontend.refusals import refuse_no_model, refuse_placed
from autopar.graph.autocast import autocast_off
from autopar.graph.microbatches import has_estimates
from autopar.ir.actions import PipelineSchedule
from autopar.ir.fusion import KernelDecision
from autopar.ir.mesh import Mesh, virtual_mesh
from autopar.ir.offload import Offload
from autopar.ir.placement import Placement
from autopar.ir.precision import MixedPrecision
from autopar.ir.program import Form, Program
from autopar.ir.shares import UnequalShares
from autopar.ir.zero import ZeRO
from autopar.partition.whole_batch import Statistics
from autopar.passes.default_passes import default_passes
from autopar.passes.forward.key_captured import key_captured
from autopar.passes.global_.choose_shardings import ChooseShardings
from autopar.passes.global_.mark_pinned import MarkPinned
from autopar.passes.global_.place_stages import PlaceStages
from autopar.passes.global_.recompute import Recompute, recomputed_keys
from autopar.passes.local.chunk_collectives import ChunkCollectives
from autopar.passes.local.copy_to_stages import CopyToStages
from autopar.passes.local.lower import Lower
from autopar.passes.local.separate_microbatches import SeparateMicrobatches
from autopar.passes.schedule.bucket_collectives import BucketCollectives
from autopar.passes.schedule.gather_ahead import GatherAhead
from autopar.passes.schedule.offload_activations import OffloadActivations
from autopar.passes.schedule.write_updates import WriteUpdates
from autopar.passes.schedule.write_versions import WriteVersions
from autopar.plans.pins import freedom_of, offload_of, precision_of, without_batch
from autopar.plans.plan import Offloaded, Pins, Plan
from autopar.plans.styles import UserPins, without_styles
from autopar.reports.memory import Memory, capacity_of, memory_of
from autopar.reused import Call, CallCompiler
from autopar.runtime.birth.weights import UserWeights, Weights
from autopar.runtime.execute.fragments import rank_sizes
from autopar.runtime.execute.world import World
from autopar.runtime.module.inputs import CallInputs
from autopar.runtime.module.parallel_module import ParallelModule
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
    batch_dims: int | Mapping[str, int | None] | None = None,
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
    recompute: str = "auto",
    offload: str | Offload | None = None,
    weights: UserWeights = None,
    pad_to: PadTo | None = None,
    cache: str | os.PathLike[str] | None = None,
    collective_chunks: str | int = "auto",
) -> ParallelModule:
    """`model` on `mesh`, behind a plain call: `loss = parallel(**batch).loss; loss.backward()`.

    mesh            a torch `DeviceMesh` with named axes, or `autopar.virtual_mesh(dp=2, tp=2)`: the same ranks in this process. A flat
                    one, without names or with the one axis "world", becomes the pp × dp × tp that `autopar.rank_plans` finds, with its
                    schedule, microbatches, recomputation and ZeRO where these are not given; inputs are of the global batch then,
                    and what a call on processes returns besides the loss is of the rank's share
    example_inputs  a batch as a call would get it (keyword arguments as a dict, positional ones as a tuple): capture happens
                    at once; else at the first call
    backend         "eager", "aot_eager", "inductor", any torch.compile backend by name, or a callable
    plan            decisions of an earlier compile, see `Plan.load`
    pins            shardings of parameters and of what modules return, by name pattern: {"*.mlp.c_fc.weight": (None, "tp"),
                    "h.*.mlp": (None, "tp", ...)}, or a dict for `parallelize_module`; {"batch": ("dp", "tp")} lets axes besides dp
                    split the batch
    cluster         hardware to price on, by name or as a `Cluster`; a virtual mesh takes the ideal one (links free)
    memory_budget   what a rank may hold at any time of a step, see `parallel.memory()`: "40GiB", or bytes. Parameters may then be split
                    over dp as well; a first run that takes more is a `MemoryBudgetError`
    optimizer       what `parallel.train_step(**batch)` updates by, and `parallel.optimizer` is: an instance made of the model's
                    parameters, a class, (class, options), a `functools.partial`, or a function of the parameters. A memory budget
                    counts its state; a name ("adamw", "sgd") is for that alone. Adam's by default
    train_step      what `parallel.train_step` does besides, see `TrainStep`: clipping, accumulation, scaling, averages
    batch_dims      batch dims of inputs by name; by default dim 0 of every input as long there as that of forward's first
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
                    norms, softmax, losses and sums of gradients in float32. With "fp16" `train_step` scales the loss (`LossScale`), as it
                    does under a torch.autocast in float16, and a plain loop has to, by `parallel.scaler()`
    zero            level 1, 2 or 3 of ZeRO, or a `ZeRO`: parameters, gradients and optimizer state lie in parts over dp. 0: whole.
                    Without it they lie whole, and under a memory budget as it takes
    recompute       what the backward computes again instead of keeping it: "auto" the regions that the model has under
                    `torch.utils.checkpoint`; "none" nothing; "full" every layer (a module with a number in its path) from what it reads;
                    "selective" all of a layer but what contractions and attentions make
    offload         "activations": what the backward reads lies in the memory of the host meanwhile, as far as that lowers the peak, and
                    under a memory budget as little of it as that takes; "auto" so where that is the fastest way into the budget;
                    "optimizer": its state lies there, and `train_step` updates there;
                    "parameters": they lie there, and are on the device while it reads them; so does the optimizer's state, and updates are
                    made there; or an `Offload`, which says what lies where, in files, too
    weights         values for a model on meta: "init", by its own initialisers, the same on any mesh; a path of safetensors files, of
                    which each rank reads its part; "rank0", those of rank 0; see `Weights`
    pad_to          lengths that batches are padded to, and by what, so that many lengths share a few programs; see `PadTo`
    cache           a folder for compiled programs, which later processes read if their model does the same, line by line; on processes
                    rank 0 reads or compiles for all. Whoever may write to it can run code here (pickle): keep it to yourself
    collective_chunks  how many pieces of rows go one after another where products wait for a gather, or a sum over ranks for products, so
                    that one moves while another is computed: "auto" by cost, "off", or a number for all that can be cut into so many

    Raises `AutoparError` for an option that has no such value, `ModelError` for what is no `nn.Module` or has DTensors for parameters,
    `MeshError` for a mesh that cannot be used. With `example_inputs`, else at the first call: `InputError`, `CaptureError` for a model that
    is not one graph, `PlanError` for a plan, pins, budget or number of microbatches that cannot be kept. Each says how to mend it.
    """
    refuse_no_model(model)
    refuse_placed(model)
    refuse_no_number(num_microbatches)
    takes_global = is_flat(mesh)
    if takes_global:
        if pins is not None or plan is not None:
            raise PlanError("pins= and plan= speak of axes, and a flat mesh has none yet: pass the mesh that they are for")
        mesh, schedule, num_microbatches, zero, recompute = chosen(
            model,
            mesh,
            example_inputs,
            Cluster.asked_for(cluster, mesh),
            batch_dims=BatchOfFirst.of(model) if batch_dims is None else batch_dims,
            memory=memory_budget,
            schedule=schedule,
            num_microbatches=num_microbatches,
            zero=zero,
            recompute=recompute,
            kernels=kernels,
            precision=precision_of(precision, None),
            offload=Offload.of(offload),
        )
    logical, pins = Mesh.of(mesh), without_styles(pins, model)
    logical.require_supported(None if isinstance(mesh, Mesh) else torch.distributed.get_world_size())
    in_dtypes = precision_of(precision, plan)
    by_plan = isinstance(pins, Plan)
    recipe, step_options = OptimizerRecipe.of(optimizer), (train_step or TrainStep()).scaled_for(in_dtypes)
    budget, away = MemoryBudget.of(memory_budget, recipe.sample if recipe is not None else optimizer), offload_of(offload, plan)
    refuse_no_host_update(away, recipe, step_options)
    budget = budget.gathering(gathered_by(recipe, step_options))
    budget = budget.with_away(away)
    options = Options(
        cluster=Cluster.asked_for(cluster, mesh),
        outputs=outputs,
        batch_dims=BatchOfFirst.of(model) if batch_dims is None else batch_dims,
        plan=plan,
        pins=without_batch(pins),
        search_timeout=search_timeout,
        budget=budget.holding(in_dtypes.grad) if recipe is not None and in_dtypes is not None else budget,
        freedom=freedom_of(pins, plan, logical, memory_budget is not None, ZeRO.of(zero)),
        num_microbatches=num_microbatches,
        microbatch_statistics=microbatch_statistics,
        schedule=schedule,
        is_real=not isinstance(mesh, Mesh),
        kernels=kernels,
        updates=updates_of(recipe, step_options),
        precision=in_dtypes,
        recompute=recompute,
        versions=step_options.versions,
        offload=away,
        collective_chunks=collective_chunks,
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
            device = _device_type(model) if isinstance(mesh, Mesh) else mesh.device_type
            budget = replace(options.budget, over_gloo=options.is_real and device == "cpu")
            here = replace(options, shares=shares, device=device, budget=budget)
            # What is captured without gradients says where parameters lie in training, too, and nothing of what that takes.
            is_open = plan is None and torch.is_grad_enabled()
            by_name = here.by_name(logical, by_plan or bool(pins)) if is_open else ()

            def memory(compiled: Compiled) -> Memory:
                return memory_of(compiled, rank_sizes(compiled, backend, model), *capacity_of(compiled))

            def compile_by(call: Call, options: Options, from_first: FromFirst | None, known: Captures) -> Compiled:
                return compile_call(model, logical, *call, options, pins, from_first, known)

            question = Question(model, args, kwargs, logical, here, pins, backend == "eager")
            together = (None, None) if isinstance(mesh, Mesh) else (parallel.from_first, parallel.gathered)
            return CallCompiler(question, compile_by, memory, by_name, *together).compiled(cache)

        parallel = ParallelModule(
            model,
            logical,
            capture=capture_call,
            backend=backend,
            device_mesh=None if isinstance(mesh, Mesh) else mesh,
            batch_dims=options.batch_dims,
            timeout=timeout,
            num_microbatches=num_microbatches,
            world=world,
            for_copy=parallel_of,
            trainer=Trainer(recipe if world is None else None, step_options, away),  # an optimizer is of one module
            weights=Weights.of(weights),
            takes_global=takes_global,
            pad_to=pad_to,
            is_cached=cache is not None,
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


def estimate_memory(
    model: nn.Module,
    mesh: Mesh | Mapping[str, int],
    example_inputs: Mapping[str, Any] | tuple[Any, ...],
    *,
    cluster: Cluster | str | None = None,
    optimizer: Any = "adamw",
    backend: Backend = "eager",
    **options: Any,
) -> Memory:
    """What `autopar.compile(model, mesh, ...).memory()` would say of these ranks, without any of them, a GPU or a launcher.

    The model and the inputs may be on the meta device (`with torch.device("meta"): model = …`): nothing is allocated. `mesh` is one of
    `autopar.virtual_mesh`, or its axes, {"dp": 8, "tp": 4}; `example_inputs` are of the global batch. With a `cluster` the shardings are
    those that are best on it, and whether the step fits is asked of its devices, unless `memory_budget=` says another limit. `options` are
    others of `autopar.compile`. Raises what that raises; `MemoryBudgetError` where nothing was found that fits into a `memory_budget`.
    """
    if not isinstance(mesh, (Mesh, Mapping)):
        raise MeshError(f"estimate_memory takes autopar.virtual_mesh(...) or the axes of a mesh, {{'dp': 8}}, not a {type(mesh).__name__}")
    there = mesh if isinstance(mesh, Mesh) else virtual_mesh(**mesh)
    kept: dict[str, Any] = {"cluster": cluster, "optimizer": optimizer, "backend": backend, **options}
    return compile(model, there, example_inputs=example_inputs, **kept).memory()


@collection_paused()
def compile_call(
    model: nn.Module,
    mesh: Mesh,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    placements: Mapping[str, Placement] | None = None,
    from_first: FromFirst | None = None,
    known: Captures | None = None,
) -> Compiled:
    """The compiler: from a model and inputs of global shape to the schedule that every rank runs. What is `known` is not captured anew."""
    known = {} if known is None else known
    # What these are given is looked at below, and by those who decide again.
    history, start = History(frozenset({MarkPinned, SeparateMicrobatches, CopyToStages})), time.perf_counter()
    with progress("capturing the model"):
        forward = captured(model, mesh, CallInputs.of(args, kwargs), options, placements, known)
    if options.updates is not None and forward.needs_scale:  # of a loss that is scaled gradients are looked at first, all of them
        options = replace(options, updates="end")
    passes = default_passes(options, torch.is_grad_enabled(), placements)
    try:
        with autocast_off(), progress("compiling", start) as show:
            run_passes(forward, passes, (Checker(), Log(), history, Next(passes, show)), time.perf_counter() - start, from_first)
    except MicrobatchError as error:
        # A number that nobody asked for turned out to change what the model computes.
        if not error.found or options.is_number_asked or forward.order.num_ranks == 1:
            raise
        in_one = replace(options, mixing=error.found, microbatch_statistics=None)
        return compile_call(model, mesh, args, kwargs, in_one, placements, from_first, known)
    return _compiled(history, options, model)


def _compiled(history: History, options: Options, model: nn.Module) -> Compiled:
    """What the passes left behind."""
    program, schedule = history.last(Form.GLOBAL), history.schedule_before(WriteUpdates)
    updating = history.schedule(WriteVersions)
    assert history.schedule_steps[-1].program is updating, "no step runs what is made behind WriteVersions: stand behind FreeBuffers"
    # Not after the passes before them by name: others may stand between.
    local, separated = history.before(SeparateMicrobatches), history.before(CopyToStages)
    decision, stages = history.decision(ChooseShardings), history.decision(PlaceStages)
    kernels = next((step.decision.kernels for step in history.graph_steps if isinstance(step.decision, KernelDecision)), {})
    buckets = {**history.decision(GatherAhead).bytes, **history.decision(BucketCollectives).bytes}
    chunks = history.decision(ChunkCollectives).numbers
    return Compiled.of(
        forward=history.last(Form.FORWARD),
        program=program,
        local=local,
        separated=separated if has_estimates(local) else None,
        schedule=schedule,
        plan=replace(
            _plan(history),
            kernels=kernels,
            buckets=buckets,
            chunks=chunks,
            offloaded=_offloaded(history, options),
            stored=options.offload and options.offload.parameters,
        ),
        steps=history.graph_steps,
        schedule_steps=history.schedule_steps,
        search=decision,
        cost=CostModel(options.cluster, local.mesh, options.budget.optimizer),
        decide_again=lambda pins: _decide_again(history.before(MarkPinned), options, without_styles(pins, model)),
        keyed=key_captured,
        stages=stages,
        updating=updating if updating is not schedule else None,
        budget=options.budget,
        offload=options.offload,
    )


def _plan(history: History) -> Plan:
    """What was decided about the GLOBAL program: a plan is read on a graph that computes nothing again."""
    before, after = history.before(Recompute), history.program(Recompute)
    plan = Plan.of(before, history.decision(ChooseShardings), history.decision(PlaceStages))
    return replace(plan, recomputed=recomputed_keys(before, after))


def _offloaded(history: History, options: Options) -> Offloaded | None:
    if not options.moves_activations:
        return None
    decision = history.decision(OffloadActivations)
    return Offloaded(decision.memory, tuple(tuple(name for trip in each for name in trip.names) for each in decision.places))


def _decide_again(program: Program, options: Options, pins: Pins | Plan | None) -> tuple[Program, Plan]:
    """Decide anew about `program`, as it was before pins were applied, with `pins` and no plan: with its reshards and stages, if any."""
    freedom = freedom_of(pins, None, program.mesh, options.budget.capacity_bytes < math.inf, options.freedom.zero)
    passes = default_passes(replace(options, plan=None, pins=without_batch(pins)), training=True)
    first, last = (next(i for i, each in enumerate(passes) if isinstance(each, kind)) for kind in (MarkPinned, Lower))
    history = History()
    with outside_fake_modes(), autocast_off():
        found = run_passes(program.copy(freedom=freedom), passes[first:last], (history,))
    assert isinstance(found, Program)
    return found, _plan(history)


def _device_type(model: nn.Module) -> str:
    kind = next((parameter.device.type for parameter in model.parameters()), "cpu")
    return "cpu" if kind == "meta" else kind
