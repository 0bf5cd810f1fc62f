"""`autopar estimate-memory`: what ranks would hold in a step, whether that fits, why not, and what to change first."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import autopar
from autopar.cli.answer import Answer
from autopar.cli.models import Example, load_model
from autopar.cli.places import mesh_of, size_of
from autopar.cli.plans import Values, microbatches_text
from autopar.cli.simulation import memory_values
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.memory import bytes_of
from autopar.doors.measure_work import tokens_per_sample, with_samples, works_of
from autopar.doors.predict import AXES, step_of
from autopar.driver.options import refuse_no_number
from autopar.driver.progress import progress
from autopar.errors import InputError, MeshError
from autopar.foresight.changes import Change, until_saved
from autopar.foresight.ranking import plan_values
from autopar.foresight.step import Step, StepPlan
from autopar.foresight.work import ModelWork
from autopar.ir.units import in_bytes, in_seconds
from autopar.pipeline.schedules import generate
from autopar.reports.formulas import Formulas
from autopar.reports.memory import Memory

_PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "float32": None}
_ITEMS = 20


@dataclass(frozen=True)
class _Asked:
    """`sizes` are of the mesh; without a `cluster` nothing is priced."""

    cluster: Cluster | None
    sizes: dict[str, int]
    plan: StepPlan


def run(options: argparse.Namespace) -> Answer:
    if options.batch < 1:
        raise InputError(f"--batch {options.batch}: a step has one sample or more")
    if options.mesh is None and options.cluster is None:
        raise MeshError("on which ranks? Pass --mesh dp=2,tp=4, or --cluster h100:8 for the best mesh of these devices")
    cluster, number = Cluster.with_number(options.cluster) if options.cluster is not None else (None, None)
    sizes = mesh_of(options.mesh, number) if options.mesh is not None else None
    if sizes is None and number is None:
        raise MeshError(f"--cluster {options.cluster}: how many devices? Write {options.cluster}:8, or pass --mesh dp=2,tp=4")
    model, batch = load_model(options.model, options.seq_len)
    with progress("estimating memory") as show:
        asked = _on_mesh(options, cluster, sizes) if sizes is not None else _on_best(options, model, batch, cluster, number)
        show(f"compiling for {size_of(asked.sizes)} ranks")
        memory, formulas = _estimated(options, model, batch, asked)
        step, changes = None, list[Change]()
        if asked.cluster is not None:
            show("pricing")
            works = _works(options, model, batch, asked)
            step = _step(options, works[asked.sizes.get("tp", 1)], asked)
            changes = until_saved(step, works, -memory.margin_bytes)
    reasons = [_verdict(memory), *_advice(memory, changes)]
    values = _values(asked, memory, step, options.batch * tokens_per_sample(batch, options.batch_dims), reasons)
    return Answer("\n".join(_lines(asked, memory, step, formulas, changes)), {"plans": [values | {"formulas": _formula_values(formulas)}]})


def _on_mesh(options: argparse.Namespace, cluster: Cluster | None, sizes: dict[str, int]) -> _Asked:
    """What was asked for; microbatches as `autopar.compile` has them, 4 · pp in a pipeline."""
    dp, pp = sizes.get("dp", 1), sizes.get("pp", 1)
    if options.batch % dp:
        below = options.batch // dp * dp
        raise InputError(f"--batch {options.batch} does not divide over dp={dp}: take {f'{below} or ' if below else ''}{below + dp}")
    refuse_no_number(options.num_microbatches)
    share = options.batch // dp
    usual = max(each for each in range(1, min(share, 4 * pp if pp > 1 else 1) + 1) if share % each == 0)
    number = options.num_microbatches or usual
    if share % number:
        fitting = ", ".join(str(each) for each in range(1, share + 1) if share % each == 0)
        raise InputError(f"--num-microbatches {number} does not divide the {share} samples of a replica: take one of {fitting}")
    plan = StepPlan(share // number, number, dp, pp, options.schedule or "1f1b", 1, options.recompute or "none", options.zero or 0)
    return _Asked(cluster, sizes, plan)


def _on_best(options: argparse.Namespace, model: Any, batch: Example, cluster: Cluster | None, number: int | None) -> _Asked:
    """The mesh that `autopar.rank_plans` finds, with what runs on it."""
    assert cluster is not None and number is not None
    found = autopar.rank_plans(
        model,
        cluster=cluster,
        num_devices=number,
        global_batch=options.batch,
        example_inputs=batch,
        memory=options.memory,
        precision=options.precision,
        num_microbatches=options.num_microbatches,
        schedule=options.schedule,
        recompute=options.recompute or ("none", "full"),
        zero=options.zero,
        offload=None,
        batch_dims=options.batch_dims,
        kernels=options.kernels,
        optimizer=options.optimizer,
    )
    if not found.plans:
        raise MeshError(
            f"no mesh of {number} devices fits: {'; '.join(found.advice) or found.missing[0][1]}. --mesh dp=…,tp=… says of one why"
        )
    best = found.plans[0]
    return _Asked(cluster, {axis: size for axis, size in best.axes if size > 1} or {"dp": 1}, best.plan)


def _estimated(options: argparse.Namespace, model: Any, batch: Example, asked: _Asked) -> tuple[Memory, Formulas]:
    """What `autopar.estimate_memory` says, and the formulas of the same program."""
    plan = asked.plan
    order = generate(str(plan.schedule), plan.pp, plan.num_microbatches, plan.num_chunks) if plan.pp > 1 else None
    parallel = autopar.compile(
        model,
        autopar.virtual_mesh(**asked.sizes),
        example_inputs=with_samples(model, batch, options.batch, options.batch_dims),
        batch_dims=options.batch_dims,
        kernels=options.kernels,
        backend="eager",
        cluster=asked.cluster,
        optimizer=options.optimizer,
        precision=_PRECISIONS[options.precision],
        zero=plan.zero or None,
        recompute=plan.recompute,
        num_microbatches=plan.num_microbatches if plan.num_microbatches > 1 or plan.pp > 1 else None,
        schedule=order,
    )
    memory = parallel.memory()
    if options.memory is not None:
        capacity = bytes_of(options.memory, "--memory")
        memory = replace(memory, capacity_bytes=capacity, limit=f"--memory {in_bytes(capacity)}")
    return memory, parallel.formulas()


def _works(options: argparse.Namespace, model: Any, batch: Example, asked: _Asked) -> dict[int, ModelWork]:
    """On tp as it is, and on twice as much where a node has as many devices."""
    assert asked.cluster is not None
    tp = asked.sizes.get("tp", 1)
    wider = [2 * tp] if asked.plan.dp % 2 == 0 and asked.cluster.ranks_per_node % (2 * tp) == 0 else []
    read = works_of(model, batch, asked.cluster, precision=options.precision, kernels=options.kernels, batch_dims=options.batch_dims)
    return {size: read(size) for size in (tp, *wider)}


def _step(options: argparse.Namespace, work: ModelWork, asked: _Asked) -> Step:
    assert asked.cluster is not None
    plan = asked.plan
    return step_of(
        work, asked.cluster, asked.sizes, options.batch, microbatch=plan.microbatch, schedule=plan.schedule, num_chunks=plan.num_chunks,
        recompute=plan.recompute, zero=plan.zero, optimizer=options.optimizer,
    )  # fmt: skip


# ---- what is said


def _lines(asked: _Asked, memory: Memory, step: Step | None, formulas: Formulas, changes: list[Change]) -> Iterator[str]:
    plan = asked.plan
    axes = " × ".join(f"{axis}{size}" for axis, size in asked.sizes.items())
    order = f"{plan.schedule}, " if plan.pp > 1 else ""
    microbatches = microbatches_text(plan.num_microbatches, plan.microbatch)
    yield f"{axes}: {order}{microbatches}, recompute {plan.recompute}, zero {plan.zero}"
    yield str(memory)
    if step is not None:
        yield f"  predicted: {in_seconds(step.prediction().step_seconds)} a step"
    yield f"  of activations a microbatch keeps, in bytes of a rank: {formulas.saved_bytes}"
    used = formulas.saved_bytes.free_symbols
    yield "    " + ", ".join(f"{symbol} = {size}" for symbol, size in formulas.sizes.items() if symbol in used)
    yield from (f"  {line}" for line in _advice(memory, changes))


def _verdict(memory: Memory) -> str:
    if math.isinf(memory.capacity_bytes):
        return f"holds {in_bytes(memory.peak_bytes)}"
    margin = memory.margin_bytes
    return f"fits into {memory.limit}, {in_bytes(margin)} to spare" if memory.fits else f"{in_bytes(-margin)} more than {memory.limit}"


def _advice(memory: Memory, changes: list[Change]) -> list[str]:
    if memory.fits:
        return []
    lines = [f"{'change first' if number == 0 else 'and then'}: {change}" for number, change in enumerate(changes)]
    if sum(change.saved_bytes for change in changes) < -memory.margin_bytes:
        lines.append("that is not enough: take more devices, or larger ones (autopar plan says how many)")
    return lines


def _values(asked: _Asked, memory: Memory, step: Step | None, tokens: int, reasons: list[str]) -> Values:
    """As a plan has them; without a cluster nothing has a price."""
    plan, prediction = asked.plan, step.prediction() if step is not None else None
    seconds = prediction.step_seconds if prediction is not None else math.inf
    if prediction is not None:
        values = plan_values(plan, prediction, tokens / seconds / size_of(asked.sizes), reasons)
    else:
        names = ("step_seconds", "mfu", "samples_per_second", "tokens_per_second_per_device")
        values: Values = {"seconds": {}, "stages": [], **dict.fromkeys(names)}
    return values | {
        "mesh": {axis: asked.sizes.get(axis, 1) for axis in AXES},
        "schedule": str(plan.schedule),
        "num_chunks": plan.num_chunks,
        "num_microbatches": plan.num_microbatches,
        "microbatch": plan.microbatch,
        "zero": plan.zero,
        "recompute": plan.recompute,
        "offload": {},
        "host_bytes": 0.0,
        "memory_bytes": [memory_values(place.kinds, place.peak_bytes) for place in memory.places],
        "capacity_bytes": memory.capacity_bytes if math.isfinite(memory.capacity_bytes) else None,
        "fits": memory.fits,
        "largest": [
            {
                "kind": item.kind,
                "what": item.what,
                "file": item.source.file,
                "line": item.source.line,
                "number": item.number,
                "bytes": item.bytes,
            }
            for item in memory.fullest.items[:_ITEMS]
        ],
        "reasons": reasons,
    }


def _formula_values(formulas: Formulas) -> Values:
    return {
        "saved_bytes": str(formulas.saved_bytes),
        "parameter_bytes": str(formulas.parameter_bytes),
        "flops": str(formulas.flops),
        "sizes": {str(symbol): size for symbol, size in formulas.sizes.items()},
    }
