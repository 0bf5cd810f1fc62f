"""What a compiled program costs, as a dict that goes to JSON: FLOPs, replicated work, communication, memory, seconds.

Everything is read off the GLOBAL program: strategies say how work is split, reshard nodes what is sent.
Bytes are those that one rank holds or sends; seconds are the cost model's. Both are of a whole step: what a microbatch takes
counts as often as there are microbatches. Of a pipeline they are the rank's that holds, sends or takes most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from autopar.cost.hardware.cluster import Cluster
from autopar.cost.model import CostModel, is_view
from autopar.driver.compiled import Compiled
from autopar.ir.actions import SINGLE, PipelineSchedule
from autopar.ir.keys import DIMS, PHASE, RECOMPUTED, SHARDING, SOURCE, STRATEGY
from autopar.ir.mesh import MICROBATCHES
from autopar.ir.pattern import pattern_of
from autopar.ir.printing import op_name
from autopar.ir.program import Program, operands, results_of
from autopar.ir.sharding import REDUCTION_KINDS, Strategy
from autopar.ops.lookup import rule_of
from autopar.pipeline.order import live_microbatches
from autopar.pipeline.priced import copies_bytes, saved_values, value_bytes
from autopar.pipeline.report import pipeline_summary
from autopar.pipeline.stage_work import Work
from autopar.reports.communication import Traffic, sent, transfers
from autopar.reports.entries import Inferred, Replicated, StepSeconds, Summary
from autopar.reports.recomputed import recompute_summary
from autopar.reports.search import search_summary

INFERRED = "inferred by probing"


def summary(compiled: Compiled) -> Summary:
    program, cost, places = compiled.program, cost_of(compiled), places_of(compiled)
    original, executed = flops(program)
    return {
        "mesh": dict(program.mesh.axes),
        "flops_split": original / executed if executed else 1.0,
        "flops": {"original": original, "executed": executed},
        "replicated": replicated(program, cost),
        "inferred": inferred(program),
        "communication": _communication(program, cost, places),
        "memory": memory(program, cost, compiled.order),
        "seconds": seconds(program, cost, places),
        "pipeline": None if compiled.stages is None else pipeline_summary(compiled, cost),
        "search": None if compiled.search is None else search_summary(compiled.search),
        "recompute": recompute_summary(compiled, cost),
    }


def cost_of(compiled: Compiled) -> CostModel:
    """The model that priced the plan; that of an ideal cluster where nothing was priced."""
    return compiled.cost or CostModel(Cluster.ideal(), compiled.program.mesh)


def places_of(compiled: Compiled) -> tuple[int, ...]:
    """The rank along `pp` that each stage lies on."""
    return compiled.order.stages


def flops(program: Program) -> tuple[float, float]:
    """FLOPs of all contractions: the model's, and the sum over all ranks and microbatches, padding included, recomputation aside."""
    original = executed = 0.0
    work, num_ranks = Work(program), program.mesh.without("pp", MICROBATCHES).size
    for node in contractions(program):
        if node in RECOMPUTED:
            continue
        count = flops_of(node)
        original += count * program.logical_share
        executed += count / STRATEGY[node].num_shards * num_ranks * work.runs(node) * len(work.stages[node])
    return original, executed


def computed_in(program: Program) -> str:
    """The dtypes that a tenth of the contractions' arithmetic or more is in, the most first: "bfloat16 and float32"; "" without any."""
    by_dtype: dict[str, float] = {}
    for node in contractions(program):
        dtype = next((str(value.dtype).removeprefix("torch.") for value in results_of(node) if value is not None), "")
        by_dtype[dtype] = by_dtype.get(dtype, 0.0) + flops_of(node)
    total = sum(by_dtype.values())
    return " and ".join(sorted((name for name, each in by_dtype.items() if each >= 0.1 * total), key=lambda name: -by_dtype[name]))


def flops_of(node: Node) -> float:
    """FLOPs of `node` on its logical shapes; 0 for what is no contraction."""
    rule = rule_of(node)
    return rule.flops if rule is not None else 0.0


def calls(program: Program) -> Iterator[Node]:
    """The calls that compute: neither reshards nor placeholders."""
    return (node for node in program.graph.nodes if node.op == "call_function" and node in STRATEGY)


def contractions(program: Program) -> Iterator[Node]:
    return (node for node in calls(program) if flops_of(node) > 0)


def split_axes(strategy: Strategy) -> tuple[str, ...]:
    """The axes that divide the work; passing partial sums through does not."""
    return tuple(axis for axis, factor in strategy.factors if factor not in REDUCTION_KINDS)


def num_bytes(node: Node, cost: CostModel) -> float:
    """Bytes that a rank reads and writes for `node`."""
    strategy, total = STRATEGY[node], 0.0
    for operand, sharding in dict(zip(operands(node), strategy.operands, strict=False)).items():
        value = results_of(operand)[0]
        if value is not None:
            total += cost.local_bytes(DIMS[operand][0], value.dtype, sharding)
    return total + sum(_result_bytes(node, cost))


def _result_bytes(node: Node, cost: CostModel) -> Iterator[float]:
    for dims, value, sharding in zip(DIMS[node], results_of(node), SHARDING[node], strict=True):
        if value is not None:
            yield cost.local_bytes(dims, value.dtype, sharding)


def replicated(program: Program, cost: CostModel) -> list[Replicated]:
    """Ops whose work some axis does not split, equal ones of repeated layers as one entry, dearest first."""
    found: dict[tuple[str | None, ...], Replicated] = {}
    work = Work(program)
    for node in calls(program):
        axes = _repeating_axes(node, work)
        if not axes or is_view(node):
            continue
        module = pattern_of(SOURCE[node].module) if node in SOURCE else ""
        op, phase, rule = op_name(node.target), PHASE.get(node), rule_kind(node)
        new = Replicated(op=op, module=module, phase=phase, rule=rule, axes=axes, count=0, seconds=0.0, bytes=0.0, flops=0.0)
        entry = found.setdefault((op, module, phase, rule, *axes), new)
        entry["count"] += 1
        entry["seconds"] += cost.node(node, STRATEGY[node]).seconds * work.runs(node)
        entry["bytes"] += num_bytes(node, cost) * work.runs(node)
        entry["flops"] += flops_of(node) / STRATEGY[node].num_shards * work.runs(node)
    return sorted(found.values(), key=lambda entry: -entry["seconds"])


def op_seconds(program: Program, cost: CostModel) -> float:
    """Of all ops of a step on a rank, one after another, collectives aside."""
    work = Work(program)
    return sum(cost.node(node, STRATEGY[node]).seconds * work.runs(node) for node in calls(program) if not is_view(node))


def _repeating_axes(node: Node, work: Work) -> list[str]:
    """The axes along which all compute the same for `node`."""
    used = split_axes(STRATEGY[node])
    is_repeated = {MICROBATCHES: work.runs(node) > 1, "pp": len(work.stages[node]) > 1}
    return [axis for axis, size in work.program.mesh.axes if size > 1 and axis not in used and is_repeated.get(axis, True)]


def rule_kind(node: Node) -> str:
    """Where the rule of an op comes from."""
    rule = rule_of(node)
    return "none" if rule is None else INFERRED if rule.inferred else "written"


def inferred(program: Program) -> list[Inferred]:
    """Ops whose rules were found by running them, equal ones of repeated layers as one entry."""
    found: dict[tuple[str, str], int] = {}
    for node in calls(program):
        if rule_kind(node) == INFERRED:
            key = op_name(node.target), pattern_of(SOURCE[node].module) if node in SOURCE else ""
            found[key] = found.get(key, 0) + 1
    return [Inferred(op=op, module=module, count=count) for (op, module), count in found.items()]


def _communication(program: Program, cost: CostModel, places: Sequence[int]) -> dict[str, dict[str, dict[str, float]]]:
    found: dict[str, dict[str, dict[str, float]]] = {}
    for (axes, phase, collective), row in sent(program, cost, places).items():
        entry = found.setdefault(axes, {}).setdefault(collective, {"forward": 0.0, "backward": 0.0, "count": 0})
        entry[phase] += row.bytes
        entry["count"] += row.runs
    return found


def memory(program: Program, cost: CostModel, order: PipelineSchedule = SINGLE) -> dict[str, float]:
    """Bytes of one rank, in a pipeline of the one that holds most. Saved activations are what the forward keeps for the backward,
    each value once, of all microbatches that are under way at a time."""
    live, work = live_microbatches(order), Work(program)
    found: list[dict[str, float]] = []
    for rank in range(order.num_ranks):
        stages = [stage for stage, place in enumerate(order.stages) if place == rank]
        saved_bytes = sum(live[stage] * value_bytes(node, cost) for stage in stages for node in saved_values(work, stage))
        found.append(_held(program, cost, frozenset(stages)) | {"saved_activations": saved_bytes})
    return max(found, key=lambda each: sum(each.values()))


def _held(program: Program, cost: CostModel, stages: frozenset[int]) -> dict[str, float]:
    """Bytes of what the calls of `stages` read and of what belongs to it."""
    found = {"parameters": 0.0, "buffers": 0.0, "gradients": 0.0, "optimizer_state": 0.0}
    work, gradients = Work(program), dict[str, float]()
    for item, node in program.named_inputs():
        if item.kind in ("parameter", "buffer") and stages.intersection(work.reading(node) or {0}):
            held = sum(_result_bytes(node, cost))
            found[f"{item.kind}s"] += held
            found["optimizer_state"] += cost.optimizer.state_bytes(item, held)
            gradients[item.name] = cost.optimizer.gradient_bytes(item, held)
    found["gradients"] = sum(gradients.get(item.name, 0.0) for item in program.signature.outputs_of("gradient"))
    return found | {"parameter_copies": copies_bytes(work, stages, cost)}


def seconds_of(node: Node, cost: CostModel) -> tuple[float, float]:
    """What a rank takes for `node`: to compute, and for memory traffic and the launch."""
    value = results_of(node)[0]
    price = cost.node(node, STRATEGY[node]).seconds
    rate = cost.compute_seconds(flops_of(node) / STRATEGY[node].num_shards, value.dtype) if value is not None else 0.0
    return min(rate, price), price - min(rate, price)


def seconds(program: Program, cost: CostModel, places: Sequence[int] = (0,)) -> StepSeconds:
    """Of one step on one rank, nothing overlapped: compute, memory traffic and launches, collectives by axis, their total.

    In a pipeline that of the slowest, which is then named: `rank` is its place along `pp`.
    """
    work = Work(program)
    ranks = [_Time() for _ in range(max(places) + 1)]
    for node in calls(program):
        own, rest = seconds_of(node, cost)
        for stage in work.stages[node]:
            ranks[places[stage]].compute += own * work.runs(node)
            ranks[places[stage]].traffic += rest * work.runs(node)
    for transfer in transfers(program, cost, places):
        for stage in transfer.stages:
            ranks[places[stage]].add(transfer)
    slowest = max(ranks, key=lambda each: each.total)
    found = StepSeconds(compute=slowest.compute, memory=slowest.traffic, communication=slowest.sent, total=slowest.total)
    if len(ranks) > 1:
        found["rank"] = ranks.index(slowest)
    return found


@dataclass
class _Time:
    """Seconds of one rank."""

    compute: float = 0.0
    traffic: float = 0.0
    sent: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def total(self) -> float:
        return self.compute + self.traffic + sum(self.sent.values())

    def add(self, transfer: Traffic) -> None:
        self.sent[transfer.axes] = self.sent.get(transfer.axes, 0.0) + transfer.runs * transfer.seconds
