"""Invariants of a GLOBAL program whose shardings are decided.

every sharding is legal: a mesh axis used once, atoms divisible
an op's strategy is one of those that its rule allows, and its results are sharded as it says
once reshards are in (the signature then names shardings) every operand arrives as the strategy wants
a reshard reduces or moves, it never makes a value unreduced
a gradient is sharded as its parameter; a buffer's new value as the buffer; the loss is on every rank
what splits the batch splits inputs, outputs and tangents along the dim that counts samples alone
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Sequence
from functools import cache

from torch.fx import Node

from autopar.checks.violation import Violation, at
from autopar.graph.microbatches import summed
from autopar.ir.collectives import reshard
from autopar.ir.freedom import Freedom
from autopar.ir.keys import BATCH, DIMS, SHARDING, STRATEGY
from autopar.ir.mesh import Mesh
from autopar.ir.printing import op_name
from autopar.ir.program import Program, operands
from autopar.ir.reshard import reachable
from autopar.ir.sharding import Dims, Sharding, Strategy, atoms_of_dim, flat
from autopar.ops.atoms import operand_result
from autopar.ops.strategies import Space, signature_of, space_of, strategies_in


def check_shardings(program: Program, spaces: dict[Hashable, Space] | None = None) -> list[Violation]:
    """Every violation of the invariants above; none before shardings are decided.

    `spaces` are those of calls by their signatures, for equal layers and for the next check; what it lacks is added.
    """
    spaces = {} if spaces is None else spaces
    sharded = [node for node in program.graph.nodes if node in SHARDING]
    if not sharded:
        return []
    found = list(_complete(program))
    for node in sharded:
        found += _legal(node, program)
        if node in STRATEGY:
            found += _strategy(node, STRATEGY[node], program, spaces)
        if is_reshard(node):
            found += _reshard(node)
        elif node.target is operator.getitem:
            found += _getitem(node)
    if not is_resharded(program):
        return found
    for node in sharded:
        found += arrivals(node)
    return found + list(_ends(program)) + list(_shares(program))


def is_resharded(program: Program) -> bool:
    """Whether mismatches have become reshard nodes: then, and not before, the signature names shardings."""
    return any(item.sharding is not None for item in program.signature.inputs)


def is_reshard(node: Node) -> bool:
    """Whether the node changes how its operand is sharded and nothing else."""
    return node.op == "call_function" and node.target is reshard


def _complete(program: Program) -> Iterator[Violation]:
    for node in program.graph.nodes:
        if node.op != "output" and node not in SHARDING:
            yield Violation("the node has no sharding, others have", at(node), fix="give every node a sharding, or none")
        elif node.op != "output" and len(DIMS.get(node) or ()) != len(SHARDING[node]):
            expected, got = f"{len(DIMS.get(node) or ())} shardings", str(len(SHARDING[node]))
            yield Violation("not one sharding for each result", at(node), expected, got, "set SHARDING with one entry per result of DIMS")


def _legal(node: Node, program: Program) -> Iterator[Violation]:
    for dims, sharding in zip(DIMS.get(node) or (), SHARDING[node], strict=False):
        for problem in sharding.problems(dims, program.mesh):
            got = describe_sharding(sharding, dims)
            yield Violation(f"illegal sharding: {problem}", at(node), got=got, fix="split another atom, or over fewer ranks")


def describe_sharding(sharding: Sharding, dims: Dims) -> str:
    """`[8@dp, 16] sum@tp`, also for a sharding that does not fit the value."""
    return sharding.describe(dims) if len(flat(dims)) == len(sharding.splits) else str(sharding)


@cache
def _allowed(space: Space, mesh: Mesh, freedom: Freedom) -> frozenset[tuple[tuple[Sharding, ...], tuple[Sharding, ...]]]:
    return frozenset((strategy.operands, strategy.results) for strategy in strategies_in(space, mesh, freedom))


def _is_derivable(node: Node) -> bool:
    """Whether all that strategies are derived from is there."""
    return node.op == "call_function" and all(each in BATCH and each in DIMS for each in (node, *operands(node)))


def _space(node: Node, known: dict[Hashable, Space]) -> Space:
    signature = signature_of(node)
    if signature not in known:
        known[signature] = space_of(node)
    return known[signature]


def _strategy(node: Node, strategy: Strategy, program: Program, spaces: dict[Hashable, Space]) -> Iterator[Violation]:
    ways = (strategy.operands, strategy.results)
    if _is_derivable(node) and ways not in _allowed(_space(node, spaces), program.mesh, program.freedom):
        fix = "choose among strategies_of(node), or correct the op's rule"
        yield Violation("the op's rule does not allow its strategy", at(node), got=str(strategy), fix=fix)
    if strategy.results != SHARDING[node]:
        yield Violation(
            "the results are not sharded as the strategy says",
            at(node),
            _all(strategy.results, DIMS.get(node) or ()),
            _all(SHARDING[node], DIMS.get(node) or ()),
            "set SHARDING to strategy.results",
        )
    arriving = operands(node)
    if len(arriving) != len(strategy.operands):
        expected = f"{len(strategy.operands)} operands"
        yield Violation(
            "the strategy is not for this op", at(node), expected, str(len(arriving)), "derive the strategy anew when arguments change"
        )


def arrivals(node: Node) -> Iterator[Violation]:
    """Operands that arrive other than the node's strategy wants. In LOCAL form rank coordinates may follow them."""
    wanted = STRATEGY[node].operands if node in STRATEGY else ()
    for index, (producer, sharding) in enumerate(zip(operands(node), wanted, strict=False)):
        if producer in SHARDING and arriving_sharding(node, producer) != sharding:
            yield _mismatch(node, index, producer, sharding)


def arriving_sharding(node: Node, producer: Node) -> Sharding:
    """The sharding of that result of `producer` which `node` reads."""
    return SHARDING[producer][operand_result(node, producer)]


def _all(shardings: Sequence[Sharding], dims: Sequence[Dims]) -> str:
    return ", ".join(describe_sharding(*pair) for pair in zip(shardings, dims, strict=False))


def _mismatch(node: Node, index: int, producer: Node, wanted: Sharding) -> Violation:
    """An operand that arrives other than wanted; an unreduced value in a non-linear op has a message of its own."""
    dims, arriving = _dims(node, producer), arriving_sharding(node, producer)
    expected, got = describe_sharding(wanted, dims), f"{describe_sharding(arriving, dims)} from {at(producer)}"
    unreduced = [entry for entry in arriving.unreduced if entry not in wanted.unreduced]
    if not unreduced:
        what = f"operand {index} does not arrive sharded as the strategy wants"
        return Violation(what, at(node), expected, got, "insert a reshard between the two")
    over = ", ".join(f"{kind} over {axis}" for axis, kind in unreduced)
    what = f"operand {index} arrives unreduced ({over}), and {op_name(node.target)} under this strategy is not linear in it"
    return Violation(what, at(node), expected, got, "reduce it first: insert a reshard between the two")


def _dims(node: Node, producer: Node) -> Dims:
    return (DIMS.get(producer) or ((),))[operand_result(node, producer)]


def _getitem(node: Node) -> Iterator[Violation]:
    producer, index = node.args
    assert isinstance(producer, Node) and isinstance(index, int)
    shardings = SHARDING.get(producer) or ()
    if index < len(shardings) and SHARDING[node] != (shardings[index],):
        dims = (DIMS.get(node) or ((),))[0]
        expected, got = describe_sharding(shardings[index], dims), describe_sharding(SHARDING[node][0], dims)
        yield Violation(f"not sharded as result {index} of its op", at(node), expected, got, "copy the sharding of the result it picks")


def _reshard(node: Node) -> Iterator[Violation]:
    producer = operands(node)[0]
    source, target = SHARDING[producer][0], SHARDING[node][0]
    if not reachable(source, target):
        dims = (DIMS.get(node) or ((),))[0]
        fix = "a reshard may only reduce, gather, split or move"
        yield Violation(
            "the reshard makes a value unreduced", at(node), describe_sharding(source, dims), describe_sharding(target, dims), fix
        )


def _ends(program: Program) -> Iterator[Violation]:
    """Results are where the runtime looks for them."""
    homes = {(item.kind, item.name): node for item, node in program.named_inputs() if node in SHARDING}
    for item, node in program.named_outputs():
        if node not in SHARDING or node not in DIMS:
            continue
        dims, got = DIMS[node][0], summed(SHARDING[node][0])
        home = homes.get(("parameter" if item.kind == "gradient" else "buffer", item.name))
        if item.kind == "loss" and not got.is_replicated:
            yield Violation("the loss is not replicated", at(node), "[]", describe_sharding(got, dims), "reduce it before it leaves")
        elif item.kind in ("gradient", "buffer") and home is not None and got != SHARDING[home][0]:
            what = f"the {'gradient' if item.kind == 'gradient' else 'new value'} of {item.name!r} is not sharded as {item.name!r} is"
            yield Violation(
                what, at(node), describe_sharding(SHARDING[home][0], dims), describe_sharding(got, dims), "reshard it before it leaves"
            )


def _shares(program: Program) -> Iterator[Violation]:
    """What real ranks are given, and give, is read as their shares of the samples."""
    counting = {item.name: item for item in program.signature.outputs if item.kind in ("output", "loss")}
    dealt = [(item, node) for item, node in program.named_inputs() if item.kind == "batch"]
    dealt += [(counting[item.name], node) for item, node in program.named_inputs() if item.kind == "tangent" and item.name in counting]
    dealt += [(item, node) for item, node in program.named_outputs() if item.kind == "output"]
    for item, node in dealt:
        if node not in SHARDING or node not in DIMS:
            continue
        dims, sharding = DIMS[node][0], summed(SHARDING[node][0])
        shared = () if item.batch_dim is None else atoms_of_dim(dims, item.batch_dim)
        off_share = [axis for atom, split in enumerate(sharding.splits) if atom not in shared for axis in split]
        if beside := [axis for axis in off_share if program.freedom.is_batch(axis)]:
            counts = "no dim counts samples" if item.batch_dim is None else f"dim {item.batch_dim} counts samples"
            what = f"{', '.join(beside)} split{'s' if len(beside) == 1 else ''} a dim of {node.name} that is no rank's share"
            yield Violation(what, at(node), counts, describe_sharding(sharding, dims), "split it along its samples, or leave it whole")
