"""The compiler: one function that takes a model and a batch to the schedule that every rank runs, by one list of passes."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopar._torch import outside_fake_modes
from autopar.captured import Captures, captured
from autopar.checks.checker import Checker
from autopar.cost.model import CostModel
from autopar.driver.compiled import Compiled
from autopar.driver.decide_once import FromFirst
from autopar.driver.garbage import collection_paused
from autopar.driver.manager import History, Log, Next, run_passes
from autopar.driver.options import Options
from autopar.driver.progress import progress
from autopar.errors import MicrobatchError
from autopar.graph.autocast import autocast_off
from autopar.graph.microbatches import has_estimates
from autopar.ir.fusion import KernelDecision
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placement
from autopar.ir.program import Form, Program
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
from autopar.plans.pins import freedom_of, without_batch
from autopar.plans.plan import Offloaded, Pins, Plan
from autopar.plans.styles import without_styles
from autopar.runtime.module.inputs import CallInputs


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
