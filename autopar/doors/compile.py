"""The front door: `autopar.compile`, a model on a mesh behind a plain call, and what that would take, `autopar.estimate_memory`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.cache.compiles import Gather, Question
from autopar.captured import Captures
from autopar.compiler import compile_call
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.memory import MemoryBudget
from autopar.doors.flat_mesh import chosen, is_flat
from autopar.driver.compiled import Compiled
from autopar.driver.decide_once import FromFirst
from autopar.driver.optimizers import OptimizerRecipe, gathered_by, refuse_no_host_update, updates_of
from autopar.driver.options import BatchOfFirst, Options, refuse_no_number
from autopar.driver.pad_to import PadTo
from autopar.driver.train_step import TrainStep
from autopar.errors import InputError, MeshError, PlanError
from autopar.frontend.refusals import refuse_no_model, refuse_placed
from autopar.graph.model_device import model_device
from autopar.ir.actions import PipelineSchedule
from autopar.ir.mesh import Mesh, virtual_mesh
from autopar.ir.offload import Offload
from autopar.ir.placement import Placement
from autopar.ir.precision import MixedPrecision
from autopar.ir.shares import UnequalShares
from autopar.ir.zero import ZeRO
from autopar.partition.whole_batch import Statistics
from autopar.plans.pins import freedom_of, offload_of, precision_of, without_batch
from autopar.plans.plan import Plan
from autopar.plans.styles import UserPins, without_styles
from autopar.reports.memory import Memory, capacity_of, memory_of
from autopar.reused import Call, CallCompiler
from autopar.runtime.birth.weights import UserWeights, Weights
from autopar.runtime.execute.fragments import rank_sizes
from autopar.runtime.execute.world import World
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
                    parameters, a class, (class, options), a `functools.partial`, or a function of the parameters: of all, in the
                    model's order, those of other stages without values. A memory budget counts its state; a name ("adamw", "sgd") is
                    for that alone. Adam's by default
    train_step      what `parallel.train_step` does besides, see `TrainStep`: clipping, accumulation, scaling, averages
    batch_dims      the dim that counts samples, of all inputs (1 for [length, batch]) or by name: those that it leaves out have none, as
                    those that it gives None. By default dim 0 of every input as long there as that of forward's first
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
    recipe = OptimizerRecipe.of(optimizer)
    takes_global, dims = is_flat(mesh), BatchOfFirst.of(model) if batch_dims is None else batch_dims
    if takes_global:
        if pins is not None or plan is not None:
            raise PlanError("pins= and plan= speak of axes, and a flat mesh has none yet: pass the mesh that they are for")
        mesh, schedule, num_microbatches, zero, recompute = chosen(
            model,
            mesh,
            example_inputs,
            Cluster.asked_for(cluster, mesh),
            batch_dims=dims,
            memory=memory_budget,
            schedule=schedule,
            num_microbatches=num_microbatches,
            zero=zero,
            recompute=recompute,
            kernels=kernels,
            precision=precision_of(precision, None),
            offload=Offload.of(offload),
            optimizer=recipe.sample if recipe is not None else optimizer,
        )
    axes, pins = Mesh.of(mesh), without_styles(pins, model)
    axes.require_supported(None if isinstance(mesh, Mesh) else torch.distributed.get_world_size())
    dtypes, places = precision_of(precision, plan), offload_of(offload, plan)
    step = (train_step or TrainStep()).scaled_for(dtypes)
    budget = MemoryBudget.of(memory_budget, recipe.sample if recipe is not None else optimizer)
    refuse_no_host_update(places, recipe, step)
    budget = budget.gathering(gathered_by(recipe, step)).with_away(places)
    options = Options(
        cluster=Cluster.asked_for(cluster, mesh),
        outputs=outputs,
        batch_dims=dims,
        plan=plan,
        pins=without_batch(pins),
        search_timeout=search_timeout,
        budget=budget.holding(dtypes.grad) if recipe is not None and dtypes is not None else budget,
        freedom=freedom_of(pins, plan, axes, memory_budget is not None, ZeRO.of(zero)),
        num_microbatches=num_microbatches,
        microbatch_statistics=microbatch_statistics,
        schedule=schedule,
        is_real=not isinstance(mesh, Mesh),
        kernels=kernels,
        updates=updates_of(recipe, step),
        precision=dtypes,
        recompute=recompute,
        versions=step.versions,
        offload=places,
        collective_chunks=collective_chunks,
    )
    maker = _Maker(
        mesh,
        axes,
        options,
        backend,
        recipe=recipe,
        step=step,
        weights=Weights.of(weights),
        pad_to=pad_to,
        timeout=timeout,
        cache=cache,
        takes_global=takes_global,
        has_plan_pins=isinstance(pins, Plan),
    )
    parallel = maker.module(model)
    if isinstance(example_inputs, Mapping):
        parallel.prepare((), dict(example_inputs))
    elif isinstance(example_inputs, (tuple, list)):
        parallel.prepare(tuple(example_inputs), {})
    elif example_inputs is not None:
        raise InputError(
            f"example_inputs is a {type(example_inputs).__name__}; pass a dict of keyword arguments or a tuple of positional ones"
        )
    return parallel


@dataclass(frozen=True)
class _Maker:
    """What was asked of a compile, and makes parallel modules of it: the user's, and those of its deep copies. `mesh` is the user's, `axes`
    what the compiler knows of it; `has_plan_pins` where parameters lie as a plan says that was passed as `pins=`."""

    mesh: Mesh | DeviceMesh
    axes: Mesh
    options: Options
    backend: Backend
    _: KW_ONLY
    recipe: OptimizerRecipe | None
    step: TrainStep
    weights: Weights | None
    pad_to: PadTo | None
    timeout: float | None
    cache: str | os.PathLike[str] | None
    takes_global: bool
    has_plan_pins: bool

    def module(self, model: nn.Module, world: World | None = None) -> ParallelModule:
        """That of `model`, which has captured nothing yet; of a copy in the `world` of the module that it was copied from."""

        def capture(
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            pins: Mapping[str, Placement] | None = None,
            shares: UnequalShares | None = None,
        ) -> Compiled:
            from_first, gathered = (None, None) if isinstance(self.mesh, Mesh) else (parallel.from_first, parallel.gathered)
            return self._compiler_of(model, (args, kwargs), pins, shares, from_first, gathered).compiled(self.cache)

        parallel = ParallelModule(
            model,
            self.axes,
            capture=capture,
            backend=self.backend,
            device_mesh=None if isinstance(self.mesh, Mesh) else self.mesh,
            batch_dims=self.options.batch_dims,
            timeout=self.timeout,
            num_microbatches=self.options.num_microbatches,
            world=world,
            for_copy=self.module,
            trainer=Trainer(self.recipe if world is None else None, self.step, self.options.offload),  # an optimizer is of one module
            weights=self.weights,
            takes_global=self.takes_global,
            pad_to=self.pad_to,
            asked=self.options.asked() | {"pad_to": str(self.pad_to), "cache": "None" if self.cache is None else "a folder"},
        )
        return parallel

    def _compiler_of(
        self,
        model: nn.Module,
        call: Call,
        pins: Mapping[str, Placement] | None,
        shares: UnequalShares | None,
        from_first: FromFirst | None,
        gather: Gather | None,
    ) -> CallCompiler:
        """Of one call, on the device where the model is by now. `pins` are where parameters lie already."""
        device = _device_type(model) if isinstance(self.mesh, Mesh) else self.mesh.device_type
        budget = replace(self.options.budget, over_gloo=self.options.is_real and device == "cpu")
        options = replace(self.options, shares=shares, device=device, budget=budget)
        # What is captured without gradients says where parameters lie in training, too, and nothing of what that takes.
        is_open = options.plan is None and torch.is_grad_enabled()
        by_name = options.by_name(self.axes, self.has_plan_pins or bool(pins)) if is_open else ()

        def memory(compiled: Compiled) -> Memory:
            return memory_of(compiled, rank_sizes(compiled, self.backend, model), *capacity_of(compiled))

        def compile_by(call: Call, options: Options, from_first: FromFirst | None, known: Captures) -> Compiled:
            return compile_call(model, self.axes, *call, options, pins, from_first, known)

        question = Question(model, *call, self.axes, options, pins, self.backend == "eager")
        return CallCompiler(question, compile_by, memory, by_name, from_first, gather)


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
    others of `autopar.compile`, `batch_dims`, `precision`, `zero` and so on. Raises what that raises; `MemoryBudgetError` where nothing
    was found that fits into a `memory_budget`.
    """
    if not isinstance(mesh, (Mesh, Mapping)):
        raise MeshError(f"estimate_memory takes autopar.virtual_mesh(...) or the axes of a mesh, {{'dp': 8}}, not a {type(mesh).__name__}")
    virtual = mesh if isinstance(mesh, Mesh) else virtual_mesh(**mesh)
    asked: dict[str, Any] = {"cluster": cluster, "optimizer": optimizer, "backend": backend, **options}
    return compile(model, virtual, example_inputs=example_inputs, **asked).memory()


def _device_type(model: nn.Module) -> str:
    kind = model_device(model).type
    return "cpu" if kind == "meta" else kind
