"""What each axis of the mesh does, one line each, and of one that does nothing, why.

dp=2  splits the batch, 8 of 16 samples a rank; sends 0.5 MB a step to add up gradients
tp=2  not used: split over tp, h.*.mlp.c_fc would compute 12 µs less and wait 61 µs longer for the other ranks
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch.fx import Node

from autopar.cost.model import CostModel
from autopar.driver.compiled import Compiled
from autopar.ir.actions import PipelineSchedule
from autopar.ir.keys import DIMS, PHASE, SHARDING, SOURCE, STRATEGY
from autopar.ir.mesh import MICROBATCHES, parent
from autopar.ir.pattern import pattern_of
from autopar.ir.printing import op_name
from autopar.ir.program import Program, operands
from autopar.ir.sharding import REDUCTION_KINDS, Strategy
from autopar.ir.units import in_bytes, in_seconds
from autopar.ops.lookup import rule_of
from autopar.partition.guessed_batch import may_be_other, what_was_taken
from autopar.pipeline.order import batch_sizes
from autopar.plans.decisions import StageDecision
from autopar.reports.communication import num_launches, sent
from autopar.reports.explain import contraction_of, indivisible, is_among
from autopar.reports.summary import contractions, flops_of, places_of, split_axes

_WHOLE = 0.995


def axis_lines(compiled: Compiled, cost: CostModel) -> Iterator[str]:
    """One line for each axis of the user's mesh, and one for the microbatches."""
    program = compiled.program
    names = list(dict.fromkeys(map(parent, program.mesh.ranks.names)))
    width = max((len(_sized(program, axis)) for axis in names), default=0)
    for axis in names:
        yield f"{_sized(program, axis):<{width}}  {_does(compiled, cost, axis)}"
    if program.mesh.num_microbatches > 1:
        yield f"{program.mesh.num_microbatches} microbatches, one after another: a rank's share of the batch runs in so many parts"


def _sized(program: Program, axis: str) -> str:
    return f"{axis}={program.mesh.size_of(program.mesh.parts(axis))}"


def _does(compiled: Compiled, cost: CostModel, axis: str) -> str:
    program = compiled.program
    size = program.mesh.size_of(program.mesh.parts(axis))
    if size == 1:
        return "one rank: nothing to split"
    if axis == "pp":
        return _stages(compiled)
    parts = [text for text in (_batch(program, axis), _work(program, axis), _parameters(program, axis)) if text]
    if not parts or not work_share(program, axis):
        return f"not used: {_why_not(compiled, axis)}"
    return f"splits {', '.join(parts)}{_sends(compiled, cost, axis)}"


def _stages(compiled: Compiled) -> str:
    order: PipelineSchedule = compiled.order
    decision = compiled.stages
    if order.num_stages < 2 or decision is None:
        return "not used: all runs on one stage"
    begins = ", ".join(stage.first_name.split(" ")[0] for stage in decision.placement.stages[1:4])
    more = ", …" if order.num_stages > 4 else ""
    return f"{order.num_stages} stages, cut before {begins}{more} ({_cut_reason(decision)}); in the order {order.name}"


def _cut_reason(decision: StageDecision) -> str:
    if decision.reason:
        return decision.reason
    other = decision.next_best
    if other is None or not decision.placement.slowest_seconds:
        return "by cost"
    slower = other.slowest_seconds / decision.placement.slowest_seconds - 1.0
    nearest = f"one op further the slowest stage takes {100 * slower:.2g} % longer" if slower >= 0.0005 else "one op further is as good"
    return f"by cost: {nearest}"


def _batch(program: Program, axis: str) -> str:
    """`the batch, 8 of 16 samples a rank`; nothing where it does not split it."""
    for item, node in program.named_inputs():
        if item.kind == "batch" and any(parent(each) == axis for split in SHARDING[node][0].splits for each in split):
            splits, size = iter(SHARDING[node][0].splits), program.mesh.size_of(program.mesh.parts(axis))
            for index, dim in enumerate(DIMS[node][0]):
                axes = {parent(each) for _ in dim for each in next(splits)}
                if axis in axes:
                    return f"the batch in {size} parts" + (
                        f" of {item.shape[index] // size} samples" if axes <= {axis, MICROBATCHES} else ""
                    )
    return ""


def work_share(program: Program, axis: str) -> float:
    """The share of the FLOPs of matmuls, convolutions and attention that an axis splits."""
    split = total = 0.0
    for node in contractions(program):
        total += flops_of(node)
        split += flops_of(node) * any(parent(each) == axis for each in split_axes(STRATEGY[node]))
    return split / total if total else 0.0


def _work(program: Program, axis: str) -> str:
    share = work_share(program, axis)
    if _batch(program, axis):
        return "" if share >= _WHOLE else f"with it {100 * share:.0f} % of the arithmetic"
    text = "all arithmetic" if share >= _WHOLE else f"{100 * share:.0f} % of the arithmetic"
    by_weights = _weight_share(program, axis)
    if by_weights >= _WHOLE:
        return text
    how_much = f"{100 * by_weights:.0f} %" if by_weights >= 1 - _WHOLE else "none"
    return f"{text} ({how_much} by weights, else by positions)"


def _weight_share(program: Program, axis: str) -> float:
    """Of the forward FLOPs with parameters that an axis splits, the share for which it splits the parameter; 1 where it splits none."""
    by_weights = split = 0.0
    for item, node in program.named_inputs():
        found = contraction_of(node) if item.kind == "parameter" else None
        if found is None:
            continue
        consumer, operand = found
        rule, strategy = rule_of(consumer), STRATEGY[consumer]
        factors = [factor for each, factor in strategy.factors if parent(each) == axis and factor not in REDUCTION_KINDS]
        if rule is not None and factors:
            split += flops_of(consumer)
            labels = rule.operands[operands(consumer).index(operand)]
            by_weights += flops_of(consumer) * any(is_among(labels, factor) for factor in factors)
    return by_weights / split if split else 1.0


def _parameters(program: Program, axis: str) -> str:
    found = [
        (math.prod(item.shape), axis in map(parent, SHARDING[node][0].split_axes))
        for item, node in program.named_inputs()
        if item.kind == "parameter"
    ]
    number, total = sum(is_split for _, is_split in found), sum(size for size, _ in found)
    share = sum(size for size, is_split in found if is_split) / total if total else 0.0
    return f"{number} of {len(found)} parameters ({100 * share:.0f} % of elements)" if number else ""


def _sends(compiled: Compiled, cost: CostModel, axis: str) -> str:
    """`; a rank sends 0.5 MB a step over it`."""
    rows = [row for (axes, _, _), row in sent(compiled.program, cost, places_of(compiled)).items() if axis in axes.split("·")]
    size, runs = sum(row.bytes for row in rows), num_launches(compiled.schedules, axis)
    times = "once" if runs == 1 else f"in {runs} collectives"
    return f"; a rank sends {in_bytes(size)} a step {times}" if rows and runs else "; nothing is sent over it"


def _why_not(compiled: Compiled, axis: str) -> str:
    """The dearest op that an axis does not split: what keeps it from it."""
    program = compiled.program
    found = sorted((node for node in contractions(program) if PHASE.get(node) != "backward"), key=lambda node: -flops_of(node))
    if not found:
        return "there is no matmul, convolution or attention to split"
    for node in found:
        priced = _price_of_splitting(compiled, node, axis)
        if priced:
            return priced
    if reason := next(_indivisible(program, axis), ""):
        return reason
    is_given = compiled.search is None or all(node.name in compiled.search.fixed for node in found)
    if program.freedom.is_batch(axis):
        return _no_samples(program, axis, "is" if is_given else "can be")
    return "the plan that was given splits no op over it" if is_given else "no op can be split over it"


def _no_samples(program: Program, axis: str, verb: str) -> str:
    """Why an axis of the batch does not split it, and what was taken for the batch, where nobody said it."""
    sizes, size = batch_sizes(program), program.mesh.size_of(program.mesh.parts(axis))
    if not sizes:
        return "no input has a batch dim, see batch_dims="
    taken = what_was_taken(program) if may_be_other(program) else ""
    batch = f"{taken}, taken for the batch: batch_dims= says if another is" if taken else "the batch"
    if max(sizes) == 1:
        return f"there is one sample in {batch}"
    if any(each % size for each in sizes):
        return f"{axis} = {size} does not divide, and nothing pads, {batch}"
    return f"no matmul, convolution or attention {verb} split over {batch}"


def _price_of_splitting(compiled: Compiled, node: Node, axis: str) -> str:
    """What it saves and costs to split `node` and its like over an axis; nothing where there is no way."""
    search, cost = compiled.search, compiled.cost
    if search is None or cost is None or node.name in search.fixed:
        return ""
    other = search.cheapest(node.name, lambda strategy: _uses(strategy, axis))
    if other is None:
        return ""
    name = (pattern_of(SOURCE[node].module) if node in SOURCE else "") or op_name(node.target)
    saved = other.num_nodes * (cost.node(node, STRATEGY[node]).seconds - cost.node(node, other.strategy).seconds)
    lost = other.extra_seconds + saved
    if saved <= 0:
        return f"split over {axis}, {name} would be no quicker"
    per = f" {search.per}" if search.num_microbatches > 1 else ""
    return f"split over it, {name} would take {in_seconds(saved)} less{per}, and sending what it then lacks {in_seconds(lost)} more"


def _uses(strategy: Strategy, axis: str) -> bool:
    return any(parent(each) == axis for each in split_axes(strategy))


def _indivisible(program: Program, axis: str) -> Iterator[str]:
    """Why the largest parameters are not split: `fc.weight, dim 0: 7 does not divide by tp = 2`."""
    parameters = [(item, node) for item, node in program.named_inputs() if item.kind == "parameter" and len(item.shape) > 1]
    for item, node in sorted(parameters, key=lambda each: -math.prod(each[0].shape)):
        reasons = [each for each in indivisible(DIMS[node][0], SHARDING[node][0], program.mesh) if f" by {axis}" in each]
        if reasons:
            yield f"{item.name}, {'; '.join(reasons)}"
