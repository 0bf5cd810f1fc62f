"""The text of `why`: the sharding of one op or parameter, its costs, the reshards around it, and the alternatives with their prices.

model.layers.*.mlp.down_proj forward aten.mm [(8@dp, 512), 64@tp] × [64@tp, 32] → [(8@dp, 512), 32] sum@tp   dp:m.0 tp:k   × 2
    takes 31 µs: compute 28 µs, memory traffic and launch 3 µs; split over 4 of 4 ranks
    result: reduce_scatter over tp, 131.1 kB, 4.2 µs
    saved for the backward: 16.4 kB
    instead: dp:m.0 tp:n +12 µs a step
    9 strategies considered, 2 of them dominated by others
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from torch.fx import Node

from autopar.cost.model import CostModel, is_view
from autopar.driver.compiled import Compiled
from autopar.errors import AutoparError
from autopar.ir.collectives import reshard
from autopar.ir.keys import DIMS, PHASE, SHARDING, SOURCE, STAGE, STRATEGY
from autopar.ir.markers import pinned, save
from autopar.ir.mesh import MICROBATCHES
from autopar.ir.pattern import is_meant, near_names
from autopar.ir.printing import op_name
from autopar.ir.program import Input, Program, operands, results_of
from autopar.ir.sharding import REDUCTION_KINDS
from autopar.ir.units import in_bytes, in_seconds
from autopar.partition.solver.assignment import Candidate
from autopar.pipeline.stage_work import Work
from autopar.reports.communication import transfers_of
from autopar.reports.explain import Row, alternative, contraction_rows, described, fold_rows, parameter_rows
from autopar.reports.search import search_lines
from autopar.reports.summary import calls, contractions, cost_of, flops_of, rule_kind, seconds_of


def why(compiled: Compiled, pattern: str) -> str:
    """What was decided for the parameters, modules and ops that `pattern` matches, and why.

    A pattern is a part of a name or module path, or has wildcards (`*.mlp.*`); an op goes by `aten.mm`, too. Views are left out.
    Raises `AutoparError` when nothing matches, naming what is near.
    """
    program, cost = compiled.program, cost_of(compiled)
    found = [*_parameters(compiled, pattern, cost), *_calls(compiled, pattern, cost)]
    written = [item.name for item in program.signature.written_parameters if is_meant(item.name, pattern)]
    if not found and written:
        raise AutoparError(f"{written[0]!r} is written by forward, and lies whole on each rank: nothing was decided for it")
    if not found:
        names = [item.name for item in program.signature.inputs_of("parameter")]
        modules = [SOURCE[node].module for node in calls(program) if node in SOURCE and SOURCE[node].module]
        raise AutoparError(
            f"{pattern!r} matches no parameter, and no module or op that computes; "
            f"there are {near_names(pattern, names)}; and {near_names(pattern, modules)}"
        )
    totals = _totals([node for _, node in found if node is not None], program, cost)
    number = program.mesh.num_microbatches
    per = [f"seconds and bytes are of one microbatch of {number}, those of gradients and updates of a step"] if number > 1 else []
    return "\n".join((*fold_rows(row for row, _ in found), *totals, *per, *(f"search: {line}" for line in search_lines(compiled.search))))


def _parameters(compiled: Compiled, pattern: str, cost: CostModel) -> Iterator[tuple[Row, None]]:
    program = compiled.program
    gradients = {item.name: node for item, node in program.named_outputs() if item.kind == "gradient"}
    inputs = {item.name: (item, node) for item, node in program.named_inputs() if item.kind == "parameter"}
    work = Work(program)
    for row in parameter_rows(compiled):
        if is_meant(row.name, pattern):
            stages = _stages("held by", work.reading(inputs[row.name][1]) or {0}, compiled)
            notes = (*stages, *_holds(*inputs[row.name], compiled, cost), *_gradient(gradients.get(row.name), program, cost))
            yield Row(row.name, row.text, (*notes, *row.notes)), None


def _holds(item: Input, node: Node, compiled: Compiled, cost: CostModel) -> Iterator[str]:
    """Bytes of a parameter on a rank, and the time of its update."""
    dims, sharding = DIMS[node][0], SHARDING[node][0]
    local = cost.local_bytes(dims, item.dtype, sharding)
    if not item.requires_grad:
        yield f"holds {in_bytes(local)} a rank"
        return
    candidate = _candidate(node, compiled)
    # The search counts what lies whole as a copy's.
    held_bytes = cost.optimizer.held_bytes(item, local)
    together = f", {in_bytes(held_bytes)} with its gradient and optimizer state" if candidate is not None else ""
    update = in_seconds(cost.parameter(dims, item.dtype, sharding).seconds)
    yield f"holds {in_bytes(local)} a rank{together}; its update takes {update}"


def _gradient(gradient: Node | None, program: Program, cost: CostModel) -> Iterator[str]:
    if gradient is not None:
        yield from (f"gradient: {way}" for way in _ways(_changes_before(gradient), program, cost))


def _calls(compiled: Compiled, pattern: str, cost: CostModel) -> Iterator[tuple[Row, Node]]:
    """Contractions, each with all that is to be said of it; then pinned outputs, and what is neither contraction nor view."""
    products, work = list(contractions(compiled.program)), Work(compiled.program)
    for row, node in zip(contraction_rows(compiled), products, strict=True):
        if is_meant(row.name, pattern) or op_name(node.target) == pattern:
            stages = _stages("runs on", work.stages[node], compiled)
            notes = (*stages, _takes(node, compiled.program, cost), *_flow(node, compiled.program, cost), *_considered(node, compiled))
            yield Row(row.name, row.text, (*notes, *row.notes)), node
    for node in calls(compiled.program):
        module = SOURCE[node].module if node in SOURCE else ""
        is_other = flops_of(node) == 0 and (node.target is pinned or not is_view(node))
        if is_other and (is_meant(module, pattern) or op_name(node.target) == pattern):
            stages = _stages("runs on", work.stages[node], compiled)
            notes = (*stages, *_flow(node, compiled.program, cost), *_instead(node, compiled))
            yield Row(module or "(no module)", _other(node, cost), notes), node


def _other(node: Node, cost: CostModel) -> str:
    time = "" if node.target is pinned else f", {in_seconds(sum(seconds_of(node, cost)))}"
    return f"{PHASE.get(node) or 'forward'} {op_name(node.target)} → {described(node)}   {STRATEGY[node]}{time}"


def _instead(node: Node, compiled: Compiled) -> Iterator[str]:
    """The runner-up, unless nobody had a choice."""
    if node.target is pinned:
        yield "pinned by the user"
    elif rule_kind(node) == "none":
        yield "no rule: the same on every rank"
    else:
        yield from ([f"its rule was {rule_kind(node)}"] if rule_kind(node) != "written" else [])
        yield from alternative(compiled, node)


def _takes(node: Node, program: Program, cost: CostModel) -> str:
    compute, traffic = seconds_of(node, cost)
    parts = f"compute {in_seconds(compute)}, memory traffic and launch {in_seconds(traffic)}"
    return f"takes {in_seconds(compute + traffic)}: {parts}; {_shares(node, program)}"


def _shares(node: Node, program: Program) -> str:
    """Over how many of the ranks that compute a node the work is split; a split over the microbatches is one in time."""
    mesh = program.mesh
    number = mesh.size_of([axis for axis, factor in STRATEGY[node].factors if factor not in REDUCTION_KINDS and axis == MICROBATCHES])
    ranks = mesh.without("pp", MICROBATCHES) if node in STAGE else mesh.without(MICROBATCHES)
    each = f", in {number} microbatches" if number > 1 else ""
    return f"split over {STRATEGY[node].num_shards // number} of {ranks.size} ranks{each}"


def _stages(verb: str, stages: Collection[int], compiled: Compiled) -> Iterator[str]:
    """`runs on stage 1`; nothing without a pipeline."""
    if compiled.order.num_stages > 1:
        named = ", ".join(map(str, sorted(stages)))
        yield f"{verb} stage {named}" if len(stages) == 1 else f"{verb} stages {named}, each for itself"


def _flow(node: Node, program: Program, cost: CostModel) -> Iterator[str]:
    """How operands come, how the result goes on, and what is kept of it."""
    for index, operand in enumerate(operands(node)):
        yield from (f"operand {index}: {way}" for way in _ways(_changes_before(operand), program, cost))
    yield from (f"result: {way}" for way in _ways(_changes_after(node), program, cost))
    held = sum(_held(node, cost))
    if held:
        yield f"saved for the backward: {in_bytes(held)}"


def _totals(nodes: list[Node], program: Program, cost: CostModel) -> Iterator[str]:
    """One line on all ops that matched; a change of sharding between two of them counts once."""
    if len(nodes) < 2:
        return
    compute, traffic = (sum(times) for times in zip(*(seconds_of(node, cost) for node in nodes), strict=True))
    around = {change for node in nodes for value in operands(node) for change in _changes_before(value)}
    around |= {change for node in nodes for change in _changes_after(node)}
    sent = sum(transfer.seconds for change in around for transfer in transfers_of(change, program.mesh, cost))
    held = sum(sum(_held(node, cost)) for node in nodes)
    yield (
        f"{len(nodes)} ops: compute {in_seconds(compute)}, memory traffic and launches {in_seconds(traffic)}, "
        f"communication in and out {in_seconds(sent)}; saved for the backward {in_bytes(held)}"
    )


def _changes_before(node: Node) -> list[Node]:
    """The reshards between the op that made a value and this place, through views; what is saved is a value of its own."""
    found: list[Node] = []
    while node.op == "call_function" and (node.target is reshard or (is_view(node) and node.target is not save)):
        found = [node, *found] if node.target is reshard else found
        node = operands(node)[0]
    return found


def _changes_after(node: Node) -> Iterator[Node]:
    """The reshards that a result goes through on its way to the ops that read it."""
    for user in node.users:
        if user.op != "call_function":
            continue
        if user.target is reshard:
            yield user
        if user.target is reshard or (is_view(user) and user.target is not save):
            yield from _changes_after(user)


def _held(node: Node, cost: CostModel) -> Iterator[float]:
    """Bytes of what is saved of a result, as it is or through views."""
    for user in node.users:
        if user.op != "call_function":
            continue
        value = results_of(user)[0]
        if user.target is save and value is not None:
            yield cost.local_bytes(DIMS[user][0], value.dtype, SHARDING[user][0])
        elif user.target is reshard or is_view(user):
            yield from _held(user, cost)


def _ways(changes: Iterable[Node], program: Program, cost: CostModel) -> Iterator[str]:
    """Each change of sharding as its collectives with the bytes that a rank sends, equal ones once; slices are free and left out."""
    found: dict[str, None] = {}
    for node in changes:
        sent = list(transfers_of(node, program.mesh, cost))
        text = ", then ".join(f"{each.collective} over {each.axes}, {in_bytes(each.bytes)}, {in_seconds(each.seconds)}" for each in sent)
        if text:
            found[f"{text} ({PHASE.get(node) or 'forward'})"] = None
    yield from found


def _candidate(node: Node, compiled: Compiled) -> Candidate | None:
    """What the search knew of the strategy that `node` has."""
    decision = compiled.search
    if decision is None:
        return None
    index = decision.sharding_problem.index[node.name]
    return decision.sharding_problem.problem.nodes[index].candidates[decision.solution.picks[index]]


def _considered(node: Node, compiled: Compiled) -> Iterator[str]:
    """How many ways of running an op there were, and which part of them was not worth looking at."""
    decision = compiled.search
    if decision is None:
        return
    solution = decision.solution
    group = solution.contracted.group_of[decision.sharding_problem.index[node.name]]
    num_views = len(solution.contracted.members[group]) - 1
    num_all, num_kept = len(solution.contracted.problem.nodes[group].candidates), len(solution.kept[group])
    together = f", decided with {num_views} view{'s' if num_views > 1 else ''} of its values" if num_views else ""
    dropped = f", {num_all - num_kept} of them dominated by others" if num_all > num_kept else ""
    yield f"{num_all} strateg{'ies' if num_all > 1 else 'y'} considered{dropped}{together}"
