"""The whole of what `explain` can say, by section: what is split and how, what else was possible, and what each costs.

parameters on dp=2 × tp=2
  transformer.h.*.mlp.c_fc.weight [1024, 4096@tp]   split dim 1 over tp (column)   × 24
      instead: [1024@tp, 4096] +1.2 ms a step
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sympy import factorint
from torch.fx import Node

from autopar.cost.model import CostModel, is_view
from autopar.driver.compiled import Compiled
from autopar.errors import AutoparError
from autopar.ir.collectives import reshard
from autopar.ir.fusion import FusionDecision, KernelDecision
from autopar.ir.keys import DIMS, PHASE, RECOMPUTED, SHARDING, SOURCE, STRATEGY
from autopar.ir.markers import pinned
from autopar.ir.mesh import MICROBATCHES, Mesh, parent
from autopar.ir.pattern import folded, is_meant, near_names, pattern_of
from autopar.ir.printing import op_name
from autopar.ir.program import Input, Program, operands
from autopar.ir.sharding import REDUCTION_KINDS, Dims, Sharding
from autopar.ir.units import in_bytes, in_seconds
from autopar.ops.lookup import rule_of
from autopar.ops.rule import Label
from autopar.ops.traits import CASTS
from autopar.partition.whole_batch import MicrobatchDecision
from autopar.pipeline.report import pipeline_lines
from autopar.plans.decisions import Chunks
from autopar.reports.buckets import bucket_lines
from autopar.reports.communication import sent
from autopar.reports.offloaded import offload_lines
from autopar.reports.recomputed import recompute_lines
from autopar.reports.search import search_lines
from autopar.reports.summary import contractions, cost_of, flops, inferred, memory, places_of, replicated, seconds
from autopar.reports.zero import zero_lines

# Of a parameter in parts that whoever computes with it gathers before.
GATHERED = "gathered before use"


@dataclass(frozen=True)
class Row:
    """One line of a section before folding: rows of equal text whose names have one pattern become one."""

    name: str
    text: str
    notes: tuple[str, ...] = ()


class Section(NamedTuple):
    """A part of the whole report. `name` is what `explain(detail=…)` calls it."""

    name: str
    title: str
    lines: Iterable[str]


def sections(compiled: Compiled) -> Iterator[Section]:
    """All that is known of what was decided, its reasons and its costs, part by part; repeated layers as one line."""
    program, cost = compiled.program, cost_of(compiled)
    yield Section("search", _heading(compiled, cost), search_lines(compiled.search))
    yield Section("precision", "precision", _precision(compiled.forward))
    yield Section("pipeline", "pipeline", () if compiled.stages is None else pipeline_lines(compiled, cost))
    yield Section("microbatches", "microbatches", _microbatches(compiled))
    yield Section("zero", "parameters over dp", zero_lines(program))
    yield Section("parameters", "parameters", fold_rows(parameter_rows(compiled)))
    yield Section(
        "contractions",
        "contractions (tp:n: axis tp splits factor n; a split of one that the result lacks, k, leaves partial sums)",
        fold_rows(contraction_rows(compiled)),
    )
    yield Section("pins", "what modules return, pinned by the user", fold_rows(pinned_rows(program)))
    yield Section("kernels", "ops of our own, and where they were not written", _fusions(compiled))
    yield Section("attention", "whose kernel runs attention", _kernels(compiled))
    checks = _counted(" ".join(text.split()) for text in program.signature.checks)
    yield Section("checks", "asserted of values in every call", checks)
    yield Section("not split", "not split", _unsplit(program, cost, places_of(compiled)))
    yield Section("probed", "rules inferred by probing, not written by hand", _inferred(program))
    yield Section("communication", "communication, bytes a rank sends in a step", _sent(compiled, cost))
    yield Section("recompute", "computed again in the backward", recompute_lines(compiled, cost))
    yield Section("offload", "away from the device between its uses", offload_lines(compiled, cost))
    yield Section("chunks", "collectives and the products beside them, whole or in pieces", _chunks(compiled))
    yield Section("buckets", "collectives that go together", bucket_lines(compiled))
    yield Section("predicted", "predicted", _totals(compiled, cost))


def details(compiled: Compiled, wanted: str = "all") -> str:
    """The whole report, or the one section of it that is `wanted`. Raises `AutoparError` for one that there is not."""
    written = [(each.name, [each.title, *(f"  {line}" for line in each.lines)]) for each in sections(compiled)]
    if wanted != "all" and wanted not in dict(written):
        known = ", ".join(repr(name) for name, _ in written)
        raise AutoparError(f"detail={wanted!r} is no section of explain(); there are {known}, and 'all'")
    chosen = [lines for name, lines in written if wanted in (name, "all") and (len(lines) > 1 or name == "search")]
    return "\n\n".join("\n".join(lines) for lines in chosen) or f"{wanted}: nothing to say"


def details_of(compiled: Compiled, pattern: str) -> str:
    """Parameters, contractions and pinned modules whose names match. Raises `AutoparError` where none does, naming what is near."""
    rows = {
        "parameters": list(parameter_rows(compiled)),
        "contractions": list(contraction_rows(compiled)),
        "what modules return, pinned by the user": list(pinned_rows(compiled.program)),
    }
    chosen = {title: [row for row in each if is_meant(row.name, pattern)] for title, each in rows.items()}
    if not any(chosen.values()):
        names = {title: near_names(pattern, [row.name for row in each]) for title, each in rows.items() if each}
        raise AutoparError(f"{pattern!r} matches nothing; " + "; ".join(f"{title}: {near}" for title, near in names.items()))
    written = ("\n".join((title, *(f"  {line}" for line in fold_rows(each)))) for title, each in chosen.items() if each)
    return "\n\n".join((*written, f"what each costs, and the reshards around it: parallel.why({pattern!r})"))


def _heading(compiled: Compiled, cost: CostModel) -> str:
    original, executed = flops(compiled.program)
    share = original / executed if executed else 1.0
    where = f"{_where(compiled.program.mesh)}, cluster {cost.cluster.name}: {compiled.program.num_nodes} ops"
    return f"{where}, {share:.1%} of the model's FLOPs computed once" + (f"\nsearch: {compiled.search}" if compiled.search else "")


def _microbatches(compiled: Compiled) -> Iterator[str]:
    """Why there are fewer of them than usual, or what each takes for itself."""
    for step in compiled.steps:
        if isinstance(step.decision, MicrobatchDecision):
            yield from step.decision.lines()


def _chunks(compiled: Compiled) -> Iterator[str]:
    """In how many pieces each goes, and why; repeated layers as one line."""
    for step in compiled.steps:
        if isinstance(step.decision, Chunks):
            yield from [step.decision.reason] if step.decision.reason else []
            yield from fold_rows(Row(name, text) for name, text in step.decision.reasons.items())


def _fusions(compiled: Compiled) -> Iterator[str]:
    """What the passes that write our own ops found; equal lines, of repeated layers, once."""
    return _counted(each for step in compiled.steps if isinstance(step.decision, FusionDecision) for each in step.decision.found)


def _kernels(compiled: Compiled) -> Iterator[str]:
    return _counted(each for step in compiled.steps if isinstance(step.decision, KernelDecision) for each in step.decision.choices)


def _counted(items: Iterable[object]) -> Iterator[str]:
    for line, number in Counter(map(str, items)).items():
        yield line if number == 1 else f"{line}   × {number}"


def _where(mesh: Mesh) -> str:
    """`pp=2 × dp=2, 4 microbatches`."""
    number = mesh.num_microbatches
    return f"{mesh.ranks}, {number} microbatches" if number > 1 else str(mesh)


def _precision(forward: Program) -> Iterator[str]:
    if forward.precision is not None:
        yield str(forward.precision)
    if forward.needs_scale:
        whose = "" if forward.precision is not None else "the model's torch.autocast computes in float16: "
        yield f"{whose}gradients vanish in float16: train_step scales the loss (LossScale), a plain loop has to, by parallel.scaler()"


def fold_rows(rows: Iterable[Row]) -> Iterator[str]:
    """Rows as text, those that differ in layer numbers alone as one, with how many they are."""
    all_rows = list(rows)
    names = [row.name for row in all_rows]
    groups: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for row in all_rows:
        groups.setdefault((pattern_of(row.name), row.text, row.notes), []).append(row.name)
    for (_, text, notes), members in groups.items():
        distinct = list(dict.fromkeys(members))
        count = f"   × {len(members)}" if len(members) > 1 else ""
        yield f"{folded(distinct, names)} {text}{count}".lstrip()
        yield from (f"    {note}" for note in notes)


def parameter_rows(compiled: Compiled) -> Iterator[Row]:
    """One row a parameter: its sharding, the word for it, who pinned it or its next-best, and what does not divide."""
    program = compiled.program
    for item, node in program.named_inputs():
        if item.kind != "parameter":
            continue
        dims, sharding = DIMS[node][0], SHARDING[node][0]
        reason = pinned_by(compiled, item.name, node)
        notes = [*([reason] if reason else alternative(compiled, node)), *indivisible(dims, sharding, program.mesh)]
        yield Row(item.name, f"{sharding.describe(dims)}   {_split(item, node)}", tuple(notes))


def pinned_by(compiled: Compiled, name: str, node: Node) -> str:
    """Why a parameter was not for this rank's search to decide (of rank 0's, what that says); empty when it was."""
    reason = compiled.plan.reasons.get(name, "") if compiled.plan is not None else ""
    is_searched = reason.startswith(("next best", "no other")) and not _is_fixed(compiled, node)
    return "" if is_searched else reason


def _is_fixed(compiled: Compiled, node: Node) -> bool:
    return compiled.search is not None and node.name in compiled.search.fixed


def _split(item: Input, node: Node) -> str:
    """`split dim 1 over tp (column)`, or that every rank has it whole."""
    parts = [f"split dim {dim} over {axes}{f' ({word})' if word else ''}" for dim, axes, word in split_words(node)]
    return ", ".join(parts) or f"on every rank{'' if item.requires_grad else ', frozen'}"


def split_words(parameter: Node) -> list[tuple[int, str, str]]:
    """The dims that are split, over which axes, and the word for it: `(1, "tp", "column")`."""
    splits, found = iter(SHARDING[parameter][0].splits), list[tuple[int, str, str]]()
    for index, dim in enumerate(DIMS[parameter][0]):
        axes = tuple(axis for _ in dim for axis in next(splits))
        if axes:
            found.append((index, "·".join(dict.fromkeys(parent(axis) for axis in axes)), _word(parameter, axes[0])))
    return found


def _word(parameter: Node, axis: str) -> str:
    """Megatron's word: a column split divides the result of the layer, a row split leaves partial sums of it.

    Where what is contracted with is not in parts, `GATHERED`: the ranks along the axis have other tokens or samples.
    """
    found = contraction_of(parameter)
    if found is None:
        return ""
    consumer, operand = found
    factor = dict(STRATEGY[consumer].factors).get(axis)
    rule = rule_of(consumer)
    if rule is None or factor in REDUCTION_KINDS:
        return ""
    if factor is None or not is_among(rule.operands[operands(consumer).index(operand)], factor):
        return GATHERED
    kept = any(is_among(labels, factor) for labels in rule.results)
    if op_name(consumer.target) == "aten.embedding":
        return "columns of the table" if kept else "rows of the table: partial sums"
    return "column" if kept else "row: partial sums"


def is_among(labels: Iterable[Label], factor: str) -> bool:
    """Whether a factor (`m`, or atom `m.1` of it) is among the labels of a tensor."""
    names = {name for label in labels if label for name in (label if isinstance(label, tuple) else (label,))}
    return factor in names or factor.rsplit(".", 1)[0] in names


def contraction_of(node: Node) -> tuple[Node, Node] | None:
    """The first forward op that reads `node`, through views, casts and reshards, and contracts with it or looks up in it, and as what."""
    for user in node.users:
        if user.op != "call_function" or PHASE.get(user) == "backward":
            continue
        rule = rule_of(user)
        if (rule is not None and rule.flops > 0) or op_name(user.target) == "aten.embedding":
            return user, node
        if is_view(user) or user.target is reshard or user.target in CASTS:
            found = contraction_of(user)
            if found is not None:
                return found
    return None


def alternative(compiled: Compiled, node: Node) -> Iterator[str]:
    """What the node could do instead and what that adds to a step, as far as a search knows."""
    if compiled.search is None:
        return
    other = compiled.search.runner_up(node.name)
    if other is None:
        yield "fixed by the plan" if _is_fixed(compiled, node) else "instead: nothing else is legal"
        return
    written = other.strategy.results[0].describe(DIMS[node][0]) if node.op == "placeholder" else str(other.strategy)
    alike = f" (all {other.num_nodes} alike)" if other.num_nodes > 1 else ""
    yield f"instead: {written} {in_seconds(other.extra_seconds, sign=True)} {compiled.search.per}{alike}"


def indivisible(dims: Dims, sharding: Sharding, mesh: Mesh) -> Iterator[str]:
    """Dims that an axis cannot split at all, with their prime factors: `dim 0: 50257 = 29·1733 does not divide by tp = 2`.

    The batch axis is left out: it splits no parameters.
    """
    splits = iter(sharding.splits)
    for index, dim in enumerate(dims):
        used = {axis for _ in dim for axis in next(splits)}
        for axis, size in mesh.axes:
            if axis not in used and parent(axis) not in ("dp", "pp", MICROBATCHES) and dim and all(atom % size for atom in dim):
                written = " × ".join(f"{atom}{_factored(atom)}" for atom in dim)
                yield f"dim {index}: {written} does not divide by {axis} = {size}"


def _factored(number: int) -> str:
    factors = factorint(number)
    if sum(factors.values()) < 2:
        return ""
    return " = " + "·".join(str(prime) if power == 1 else f"{prime}^{power}" for prime, power in factors.items())


def contraction_rows(compiled: Compiled) -> Iterator[Row]:
    """One row a matmul, convolution or attention: its operands' shardings and which factor each axis splits."""
    for node in contractions(compiled.program):
        if node in RECOMPUTED:
            continue
        module = SOURCE[node].module if node in SOURCE else ""
        read = [described(operand) for operand in operands(node)]
        shapes = " × ".join(read[:3]) + (" × …" if len(read) > 3 else "")
        notes = tuple(alternative(compiled, node))
        text = f"{PHASE.get(node) or 'forward'} {op_name(node.target)} {shapes} → {described(node)}   {STRATEGY[node]}"
        yield Row(module or "(no module)", text, notes)


def described(node: Node) -> str:
    return SHARDING[node][0].describe(DIMS[node][0])


def _unsplit(program: Program, cost: CostModel, places: Sequence[int]) -> Iterator[str]:
    """Ops that an axis does not split, dearest first, as far as they take a hundredth of the whole."""
    entries = replicated(program, cost)
    total = seconds(program, cost, places)["total"]
    shown = [entry for entry in entries if entry["seconds"] >= 0.01 * total or entry["flops"] > 0]
    for entry in shown:
        where = f" in {entry['module']}" if entry["module"] else ""
        yield (
            f"{entry['phase']} {entry['op']}{where} × {entry['count']}: {_repeated(entry['axes'])}, "
            f"{in_seconds(entry['seconds'])}, {in_bytes(entry['bytes'])}{_whose(entry['rule'])}"
        )
    rest = [entry for entry in entries if entry not in shown]
    if rest:
        yield f"{sum(entry['count'] for entry in rest)} small ops: {in_seconds(sum(entry['seconds'] for entry in rest))}"


def _repeated(axes: list[str]) -> str:
    """`the same on every rank along dp, tp`."""
    ranks = [axis for axis in axes if axis != MICROBATCHES]
    parts = [f"on every rank along {', '.join(ranks)}"] if ranks else []
    return f"the same {' and '.join([*parts, *(['in every microbatch'] if MICROBATCHES in axes else [])])}"


def _whose(rule: str) -> str:
    """What is worth saying of an op's rule."""
    return {"written": "", "none": ", no rule for it"}.get(rule, f", its rule {rule}")


def _inferred(program: Program) -> Iterator[str]:
    for entry in inferred(program):
        yield f"{entry['op']}{f' in {module}' if (module := entry['module']) else ''} × {entry['count']}"


def pinned_rows(program: Program) -> Iterator[Row]:
    """One row for each call of a module whose output is pinned."""
    return (Row(SOURCE[node].module, described(node)) for node in program.graph.nodes if node.target is pinned)


def _sent(compiled: Compiled, cost: CostModel) -> Iterator[str]:
    for (axes, phase, collective), row in sorted(sent(compiled.program, cost, places_of(compiled)).items()):
        yield f"{axes:<6} {phase:<8} {collective:<14} {row.runs:4} ×  {in_bytes(row.bytes):>10}  {in_seconds(row.seconds):>9}"


def _totals(compiled: Compiled, cost: CostModel) -> Iterator[str]:
    program, places = compiled.program, places_of(compiled)
    time = seconds(program, cost, places)
    parts = [f"compute {in_seconds(time['compute'])}", f"memory traffic {in_seconds(time['memory'])}"]
    parts += [f"communication {axes} {in_seconds(value)}" for axes, value in time["communication"].items()]
    whose = f" of the slowest rank, at pp {time['rank']}," if "rank" in time else ""
    yield f"step{whose} {in_seconds(time['total'])} = {' + '.join(parts)}, nothing overlapped"
    held = memory(program, cost, compiled.order)
    most = " that holds most" if len(set(places)) > 1 else ""
    yield f"bytes a rank{most}: " + ", ".join(f"{name.replace('_', ' ')} {in_bytes(value)}" for name, value in held.items() if value)
