"""`autopar simulate`: the step of a plan, clocked, with a timeline that browsers draw."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import autopar
from autopar.cli.answer import Answer
from autopar.cli.models import load_model
from autopar.cli.places import size_of
from autopar.cli.plans import Values, file_and_number, is_saved_plan, read_file, read_plan, title
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.model import CostModel
from autopar.doors.measure_work import tokens_per_sample, with_samples
from autopar.doors.predict import AXES
from autopar.driver.compiled import Compiled
from autopar.driver.progress import progress
from autopar.errors import InputError
from autopar.foresight.constants import Constants
from autopar.foresight.prediction import kinds_text
from autopar.ir.actions import chain
from autopar.ir.instructions import Copy, Launch, Wait
from autopar.ir.mesh import MICROBATCHES, parent
from autopar.ir.units import in_bytes, in_seconds
from autopar.pipeline.cost import EdgeCost, PipelineCost, StageCost
from autopar.pipeline.fragment_prices import on_paper
from autopar.pipeline.report import StepOnPaper
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.pipeline.schedules import generate
from autopar.pipeline.simulate import Event, Simulation, simulate
from autopar.pipeline.trace import write_trace
from autopar.plans.plan import Plan
from autopar.reports.summary import flops

# Parts of a predicted step by what they are for; the rest is the bubble.
_CLASSES = {
    "compute": ("products", "memory", "launches", "host", "handover", "update"),
    "exposed_communication": ("tensor_parallel", "gradients", "collectives", "copies"),
    "bubble": ("bubble", "nodes"),
}
# What is there once a step: its stream, its name, and the part of the prediction.
_ONCE = (("dp", "sum of gradients", "gradients"), ("compute", "update", "update"), ("dp", "slowest node", "nodes"))
_SHOWN = 8
# Sums of seconds that differ by less are equal.
_ROUNDING = 1e-9


def run(options: argparse.Namespace) -> Answer:
    """Of a file of plans, or of one that `Plan.save` wrote, whose model and cluster must be named."""
    if options.trace is not None and not Path(options.trace).absolute().parent.is_dir():
        raise InputError(f"--trace {options.trace}: there is no folder {Path(options.trace).absolute().parent}")
    name, _ = file_and_number(options.plan)
    with progress("simulating") as show:
        content = read_file(name)
        if is_saved_plan(content):
            values, simulation = _of_saved(content, options)
        else:
            values = read_plan(options.plan)
            simulation = clocked(values)
            values = values | {"simulation": _told(simulation, shares(values["seconds"]))}
        if options.trace is not None:
            show("writing the trace")
            write_trace(options.trace, {"predicted": simulation})
    return Answer(_text(values, options.trace), {"plans": [values]})


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Of the step, by class."""
    total = sum(seconds.values())
    return {kind: sum(seconds.get(part, 0.0) for part in parts) / total if total else 0.0 for kind, parts in _CLASSES.items()}


def clocked(plan: Values) -> Simulation:
    """The pipeline of a plan from a standing start, then the sums of gradients that nothing hides, and the update, on every rank."""
    pp = plan["mesh"].get("pp", 1)
    schedule = generate(plan["schedule"], pp, plan["num_microbatches"], plan["num_chunks"])
    held = [each["parameters"] + each["gradients"] + each["optimizer_state"] for each in plan["memory_bytes"]]
    stages = [
        StageCost(
            stage["forward"],
            stage["input_gradient"],
            stage["weight_gradient"],
            backward_seconds=stage.get("backward"),
            saved_bytes=stage["saved_bytes"],
            weight_saved_bytes=0.5 * stage["saved_bytes"],
            held_bytes=held[stage["rank"]] if number < pp else 0.0,
            working_bytes=plan["memory_bytes"][stage["rank"]]["working"],
        )
        for number, stage in enumerate(plan["stages"])
    ]
    sends = {edge: EdgeCost(plan["stages"][edge.source]["send"]) for edge in chain(len(stages))}
    found = simulate(schedule, PipelineCost(tuple(stages), sends))
    return replace(found, events=(*found.events, *_after(found, plan["seconds"])))


def _after(found: Simulation, seconds: Mapping[str, float]) -> list[Event]:
    events: list[Event] = []
    for rank in range(len(found.memory)):
        begin = max((event.end_seconds for event in found.events if event.rank == rank), default=0.0)
        for stream, name, part in _ONCE:
            end = begin + seconds.get(part, 0.0)
            events += [Event(rank, stream, name, begin, end)] if end > begin else []
            begin = end
    return events


def _told(found: Simulation, by_class: Mapping[str, float]) -> dict[str, Any]:
    ranks = [
        {"rank": rank, "busy_seconds": found.busy_seconds[rank], "peak_bytes": memory.peak_bytes}
        for rank, memory in enumerate(found.memory)
    ]
    return {"from_standing_start_seconds": found.step_seconds, "shares": dict(by_class), "ranks": ranks}


def _text(values: Values, trace: str | None) -> str:
    found = values["simulation"]
    by_class = ", ".join(f"{name.replace('_', ' ')} {100 * share:.1f} %" for name, share in found["shares"].items())
    lines = [title(values), f"  {in_seconds(values['step_seconds'])} a step: {by_class}"]
    start = found["from_standing_start_seconds"]
    if start > 1.001 * values["step_seconds"]:
        lines.append(f"  from a standing start {in_seconds(start)}: the pipeline has to fill; later steps do not wait for all ranks to end")
    for rank, (row, memory) in enumerate(zip(found["ranks"], values["memory_bytes"], strict=True)):
        if rank == _SHOWN and len(found["ranks"]) > _SHOWN + 1:
            lines.append(f"  … and {len(found['ranks']) - _SHOWN} more stages: --json has them")
            break
        kinds = kinds_text(memory)
        lines.append(f"  pp {rank}: computes {in_seconds(row['busy_seconds'])}, holds {in_bytes(memory['total'])}: {kinds}")
    lines += [f"  the timeline of a rank of each stage is in {trace}: open it in ui.perfetto.dev or chrome://tracing"] if trace else []
    return "\n".join(lines)


# ---- a plan that `Plan.save` wrote


def _of_saved(content: Any, options: argparse.Namespace) -> tuple[Values, Simulation]:
    plan = Plan.of_content(content)
    missing = [name for name in ("model", "cluster", "global_batch") if getattr(options, name) is None]
    if missing:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise InputError(f"{options.plan} is a plan that Plan.save wrote: it needs the model and the cluster it is for; pass {names}, too")
    cluster, _ = Cluster.with_number(options.cluster)
    model, batch = load_model(options.model, options.seq_len)
    sizes: dict[str, int] = {}
    for axis, size in plan.mesh.axes:
        if axis != MICROBATCHES:
            sizes[parent(axis)] = sizes.get(parent(axis), 1) * size
    inputs = with_samples(model, batch, options.global_batch, options.batch_dims)
    parallel = autopar.compile(
        model,
        autopar.virtual_mesh(**sizes),
        example_inputs=inputs,
        batch_dims=options.batch_dims,
        plan=plan,
        cluster=cluster,
        backend="eager",
        precision=plan.precision,
        num_microbatches=plan.schedule.num_microbatches if plan.schedule is not None else None,
    )
    compiled = parallel.compiled
    cost = CostModel(cluster, compiled.local.mesh, compiled.budget.optimizer)
    simulation = on_paper(compiled.schedule, cost)
    paper = StepOnPaper(compiled.program, cost, compiled.order)
    handover = {"handover": paper.handover_seconds} if paper.handover_seconds else {}
    seconds = _seconds(compiled.schedule, simulation) | handover | {"update": paper.update_seconds}
    held = [memory_values(each.kinds, each.peak_bytes) for each in parallel.memory().places]
    values: Values = {
        **_what_runs(compiled, sizes, options.global_batch),
        **_rates(sum(seconds.values()), options.global_batch, tokens_per_sample(batch, options.batch_dims), size_of(sizes)),
        "mfu": flops(compiled.program)[0] / sum(seconds.values()) / (size_of(sizes) * Constants.of(cluster).peak_flops),
        "seconds": seconds,
        "memory_bytes": held,
        "capacity_bytes": cluster.device.memory_bytes,
        "fits": max(each["total"] for each in held) <= cluster.device.memory_bytes,
        "stages": [],
        "reasons": [],
        "simulation": _told(simulation, shares(seconds)),
    }
    return values, simulation


def _rates(seconds: float, batch: int, tokens: int, num_devices: int) -> Values:
    return {
        "step_seconds": seconds,
        "samples_per_second": batch / seconds,
        "tokens_per_second_per_device": batch * tokens / seconds / num_devices,
    }


def _what_runs(compiled: Compiled, sizes: Mapping[str, int], batch: int) -> Values:
    order, zero = compiled.order, compiled.program.freedom.zero
    return {
        "mesh": {axis: sizes.get(axis, 1) for axis in AXES} | dict(sizes),
        "schedule": order.name,
        "num_chunks": order.num_stages // order.num_ranks if order.name == "interleaved" else 1,
        "num_microbatches": order.num_microbatches,
        "microbatch": -(-batch // (sizes.get("dp", 1) * order.num_microbatches)),
        "zero": zero.level if zero is not None else 0,
        "offload": {},
        "host_bytes": 0.0,
        "recompute": "as saved" if compiled.plan is not None and compiled.plan.recomputed else "none",
    }


def _seconds(program: ScheduleProgram, found: Simulation) -> dict[str, float]:
    """Of the rank that is over last: what it computes, waits for of collectives, and waits for of other stages."""
    last = max(range(len(program.places)), key=lambda rank: found.instruction_seconds[rank][-1:] or (0.0,))
    instructions = program.places[last].instructions
    waited = {each.name: "collectives" for each in instructions if isinstance(each, Launch)}
    waited |= {each.name: "memory" for each in instructions if isinstance(each, Copy)}
    seconds, before = {"products": found.busy_seconds[last], "collectives": 0.0, "memory": 0.0, "bubble": 0.0}, 0.0
    for instruction, end in zip(instructions, found.instruction_seconds[last], strict=True):
        if isinstance(instruction, Wait):
            seconds[waited.get(instruction.target, "bubble")] += end - before
        before = end
    left = before - sum(seconds.values())
    return seconds | ({"host": left} if left > _ROUNDING * before else {})


_KINDS = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer_state", "activations": "activations"}


def memory_values(kinds: Mapping[Any, float], total: float) -> dict[str, float]:
    """Bytes by the kinds that plans have: all that is none of the first four is `working`."""
    found = dict.fromkeys((*_KINDS.values(), "working"), 0.0)
    for kind, size in kinds.items():
        found[_KINDS.get(kind, "working")] += size
    return found | {"total": total}
