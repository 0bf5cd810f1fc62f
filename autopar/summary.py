"""What a compiled program costs, as a dict that goes to JSON: FLOPs, replicated work, communication, memory, seconds.

Everything is read off the GLOBAL program: strategies say how work is split, reshard nodes what is sent.
Bytes are those that one rank holds or sends; seconds are the cost model's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from autopar.collectives import reshard
from autopar.compiled import Compiled
from autopar.cost import CostModel, is_view
from autopar.hardware.cluster import Cluster
from autopar.keys import DIMS, PHASE, SHARDING, SOURCE, STRATEGY
from autopar.markers import save
from autopar.mesh import Mesh, parent
from autopar.pattern import pattern_of
from autopar.printing import op_name
from autopar.program import Program, operands, results_of
from autopar.reshard import steps
from autopar.rule import rule_of
from autopar.schedule import Collective
from autopar.search_report import search_summary
from autopar.sharding import Strategy

INFERRED = "inferred by probing"


def summary(compiled: Compiled) -> dict[str, Any]:
    """The costs of `compiled`.

    flops_split    the model's matmul, convolution and attention FLOPs over the sum of those that all ranks execute
    flops          both sums
    replicated     ops that some axis does not split: what, over which axes, how many, seconds and bytes on a rank, and whose rule they
                   have ("written", "inferred by probing", "none"); dearest first
    inferred       ops that are split by a rule inferred by probing: what, where, how many
    communication  axis → collective → {"forward", "backward", "count"}: bytes that a rank sends in a step
    memory         bytes of a rank: parameters, gradients, optimizer state, buffers, saved activations
    seconds        of a step: compute, memory traffic, communication by axis, total
    search         how the plan was found, see `search_report`; None where nothing was searched
    """
    program, cost = compiled.program, cost_of(compiled)
    original, executed = flops(program)
    return {
        "mesh": dict(program.mesh.axes),
        "flops_split": original / executed if executed else 1.0,
        "flops": {"original": original, "executed": executed},
        "replicated": replicated(program, cost),
        "inferred": inferred(program),
        "communication": _communication(program, cost),
        "memory": memory(program, cost),
        "seconds": seconds(program, cost),
        "search": search_summary(compiled.search),
    }


def cost_of(compiled: Compiled) -> CostModel:
    """The model that priced the plan; that of an ideal cluster where nothing was priced."""
    return compiled.cost or CostModel(Cluster.ideal(), compiled.program.mesh)


def flops(program: Program) -> tuple[float, float]:
    """FLOPs of all contractions: the model's, and the sum over all ranks, padding included."""
    original = executed = 0.0
    for node in contractions(program):
        count = flops_of(node)
        original += count * program.logical_share
        executed += count / STRATEGY[node].num_shards * program.mesh.size
    return original, executed


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
    return tuple(axis for axis, factor in strategy.factors if factor != "sum")


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


def replicated(program: Program, cost: CostModel) -> list[dict[str, Any]]:
    """Ops whose work some axis does not split, equal ones of repeated layers as one entry."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for node in calls(program):
        used = split_axes(STRATEGY[node])
        axes = [axis for axis, size in program.mesh.axes if size > 1 and axis not in used]
        if not axes or is_view(node):
            continue
        module = pattern_of(SOURCE[node].module) if node in SOURCE else ""
        key = (op_name(node.target), module, PHASE.get(node), rule_kind(node), *axes)
        entry = found.setdefault(
            key,
            {"op": key[0], "module": module, "phase": key[2], "rule": key[3], "axes": axes, "count": 0}
            | {"seconds": 0.0, "bytes": 0.0, "flops": 0.0},
        )
        entry["count"] += 1
        entry["seconds"] += cost.node(node, STRATEGY[node]).seconds
        entry["bytes"] += num_bytes(node, cost)
        entry["flops"] += flops_of(node) / STRATEGY[node].num_shards
    return sorted(found.values(), key=lambda entry: -entry["seconds"])


def rule_kind(node: Node) -> str:
    """Where the rule of an op comes from."""
    rule = rule_of(node)
    return "none" if rule is None else INFERRED if rule.inferred else "written"


def inferred(program: Program) -> list[dict[str, Any]]:
    """Ops whose rules were found by running them, equal ones of repeated layers as one entry."""
    found: dict[tuple[str, str], int] = {}
    for node in calls(program):
        if rule_kind(node) == INFERRED:
            key = op_name(node.target), pattern_of(SOURCE[node].module) if node in SOURCE else ""
            found[key] = found.get(key, 0) + 1
    return [{"op": op, "module": module, "count": count} for (op, module), count in found.items()]


@dataclass(frozen=True)
class Transfer:
    """One collective of a step: the reshard it belongs to, the user's axes, the bytes a rank sends, the seconds."""

    node: Node
    axes: str
    collective: Collective
    phase: str
    bytes: float
    seconds: float


def transfers(program: Program, cost: CostModel) -> Iterator[Transfer]:
    """Every collective of the program, in order."""
    for node in program.graph.nodes:
        yield from transfers_of(node, program.mesh, cost)


def transfers_of(node: Node, mesh: Mesh, cost: CostModel) -> Iterator[Transfer]:
    """The collectives of a reshard; none of any other node."""
    value = results_of(node)[0]
    if node.target is not reshard or value is None:
        return
    source = operands(node)[0]
    for step in steps(DIMS[node][0], SHARDING[source][0], SHARDING[node][0], mesh):
        if step.collective != "slice":
            price = cost.step(step, value.dtype.itemsize)
            axes = "·".join(dict.fromkeys(parent(axis) for axis in step.axes))
            yield Transfer(node, axes, step.collective, PHASE.get(node) or "forward", price.bytes, price.seconds)


def _communication(program: Program, cost: CostModel) -> dict[str, dict[str, dict[str, float]]]:
    found: dict[str, dict[str, dict[str, float]]] = {}
    for transfer in transfers(program, cost):
        entry = found.setdefault(transfer.axes, {}).setdefault(transfer.collective, {"forward": 0.0, "backward": 0.0, "count": 0})
        entry[transfer.phase] += transfer.bytes
        entry["count"] += 1
    return found


def memory(program: Program, cost: CostModel) -> dict[str, float]:
    """Bytes of one rank. Saved activations are what the forward keeps for the backward, each value once."""
    found = {"parameters": 0.0, "buffers": 0.0, "gradients": 0.0, "optimizer_state": 0.0, "saved_activations": 0.0}
    for item, node in program.named_inputs():
        if item.kind in ("parameter", "buffer"):
            held = sum(_result_bytes(node, cost))
            found[f"{item.kind}s"] += held
            found["optimizer_state"] += cost.optimizer.state_bytes(item, held)
    for item, node in program.named_outputs():
        if item.kind == "gradient":
            found["gradients"] += sum(_result_bytes(node, cost))
    found["saved_activations"] = sum(sum(_result_bytes(node, cost)) for node in program.graph.nodes if node.target is save)
    return found


def seconds_of(node: Node, cost: CostModel) -> tuple[float, float]:
    """What a rank takes for `node`: to compute, and for memory traffic and the launch."""
    value = results_of(node)[0]
    price = cost.node(node, STRATEGY[node]).seconds
    rate = cost.compute_seconds(flops_of(node) / STRATEGY[node].num_shards, value.dtype) if value is not None else 0.0
    return min(rate, price), price - min(rate, price)


def seconds(program: Program, cost: CostModel) -> dict[str, Any]:
    """Of one step on one rank, nothing overlapped: compute, memory traffic and launches, collectives by axis, their total."""
    compute = traffic = 0.0
    for node in calls(program):
        own, rest = seconds_of(node, cost)
        compute += own
        traffic += rest
    sent: dict[str, float] = {}
    for transfer in transfers(program, cost):
        sent[transfer.axes] = sent.get(transfer.axes, 0.0) + transfer.seconds
    return {"compute": compute, "memory": traffic, "communication": sent, "total": compute + traffic + sum(sent.values())}
